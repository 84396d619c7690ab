"""Stages as text, JSON, DOT, SVG, a page, and for Model Explorer, as the command line writes them."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gramfx
from gramfx.cli import Stage, main
from gramfx.cli.common import capture, step_for
from gramfx.cli.dump import VERSION
from gramfx.cli.spec import read_inputs
from gramfx.view.dot import dot
from gramfx.view.fold import folded
from gramfx.view.stages import KINDS, NodeView, StageView, views

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden" / "tied.txt"
MODELS = str(ROOT / "examples" / "models.py")
TIED = [f"{MODELS}:Tied", "-i", "i64[4,6]<11", "-t", "i64[4,6]<11", "--objective", f"{MODELS}:loss_per_sequence"]
CONVOLUTIONS = [f"{MODELS}:convolutions", "-i", "f32[4,3,8,8]"]
RUNNER = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def dumped(*arguments: str) -> str:
    result = RUNNER.invoke(main, ["dump", *arguments, "--quiet"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_all_stages_of_a_tied_model_are_as_they_were() -> None:
    """To renew: gramfx dump, with these arguments, --all-stages -o tests/golden/tied.txt, and read the difference."""
    text = dumped(*TIED, "--all-stages")
    assert text == GOLDEN.read_text()
    gramian = text[text.index("== gramian") : text.index("== planned")]
    assert gramian.count("use of embedding.weight") == 2
    assert gramian.count("Gramian of") == 1
    assert "Gramian of embedding.weight, 2 uses with cross terms" in gramian


def test_text_is_the_same_in_another_process_and_has_no_colour_in_a_pipe() -> None:
    command = [sys.executable, "-m", "gramfx", "dump", *TIED, "--stage", "gramian"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert shown in f"{GOLDEN.read_text()}\n"
    assert "\x1b" not in shown


def test_diff_shows_what_a_pass_changed() -> None:
    lines = dumped(*TIED, "--diff", "canonical", "separated").splitlines()
    assert lines[:2] == ["--- canonical", "+++ separated"]
    added = [line for line in lines[2:] if line.startswith("+ ")]
    assert sum("use of embedding.weight" in line for line in added) == 2
    assert any(line.startswith("- linear ") and "embedding_weight" in line for line in lines)
    assert any(line.startswith("+ linear ") and "embedding_weight_use1" in line for line in lines)


def test_a_difference_is_text_alone() -> None:
    result = RUNNER.invoke(main, ["dump", *TIED, "--diff", "joint", "planned", "--format", "html", "--quiet"])
    assert result.exit_code == 2
    assert "a difference is text" in result.stderr


def test_json_holds_every_node_and_the_plan() -> None:
    data = json.loads(dumped(*TIED, "--all-stages", "--format", "json"))
    assert (data["format"], data["version"], data["gramfx"]) == ("gramfx", VERSION, gramfx.__version__)
    assert [stage["name"] for stage in data["stages"]] == list(gramfx.STAGES) == list(Stage)
    for stage in data["stages"]:
        names = {node["name"] for node in stage["nodes"]}
        for node in stage["nodes"]:
            assert set(node) == {
                *("name", "kind", "subject", "op", "value", "reads", "arguments", "module", "source", "plan"),
            }
            assert node["kind"] in KINDS
            assert set(node["reads"]) <= names
    assert gramfx.Plan.from_json(json.dumps(data["plan"])).contractions[0].parameter == "embedding.weight"


@pytest.fixture(scope="module")
def tied() -> dict[str, StageView]:
    """All stages of the tied model."""
    given = read_inputs(["i64[4,6]<11"], ["i64[4,6]<11"])
    return views(capture(step_for(f"{MODELS}:Tied", f"{MODELS}:loss_per_sequence", given), given).lowering)


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's dot is not installed")
@pytest.mark.parametrize("stage", list(Stage))
def test_dot_is_graphvizs_language(tied: dict[str, StageView], stage: Stage) -> None:
    done = subprocess.run(["dot", "-Tplain"], input=dot(tied[stage]), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    nodes = sum(line.startswith("node ") for line in done.stdout.splitlines())
    assert nodes == len(tied[stage].nodes)


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's dot is not installed")
def test_svg_of_several_stages_goes_to_a_folder(tmp_path: Path) -> None:
    dumped(*TIED, "--all-stages", "--format", "svg", "-o", str(tmp_path / "stages"))
    assert {path.name for path in (tmp_path / "stages").iterdir()} == {f"{stage}.svg" for stage in Stage}
    assert "<svg" in (tmp_path / "stages" / "planned.svg").read_text()


def test_svg_without_graphviz_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = RUNNER.invoke(main, ["dump", *TIED, "--format", "svg"])
    assert result.exit_code == 2
    assert "install the package graphviz" in result.stderr


def test_model_explorer_gets_modules_as_namespaces() -> None:
    data = json.loads(dumped(*CONVOLUTIONS, "--format", "model-explorer"))
    (graph,) = data["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"])
    for node in nodes.values():
        assert all(edge["sourceNodeId"] in nodes for edge in node["incomingEdges"])
        assert all(set(attribute) == {"key", "value"} for attribute in node["attrs"])
    assert {"0", "1", "backward/0", "backward/5"} <= {node["namespace"] for node in nodes.values()}


def test_many_nodes_are_folded_by_module() -> None:
    step = gramfx.transform(nn.Sequential(*(nn.Linear(4, 4) for _ in range(30))), compile=False)
    planned = views(step.capture(torch.randn(3, 4)).lowering)["planned"]
    small = folded(planned, 100)
    assert len(planned.nodes) > 300
    assert len(small.nodes) <= 100
    names = {node.name for node in small.nodes}
    assert {"0: forward", "0: backward", "sum of the Gramians"} <= names
    assert all(set(node.reads) <= names for node in small.nodes)
    assert folded(planned, 10**6) == planned


def test_a_module_and_a_node_of_one_name_are_two() -> None:
    node = NodeView("0", "forward", "", "aten.tanh", "f32[]", (), "", "", "")
    inside = [replace(node, name=f"inside{number}", module="0", reads=("0",)) for number in range(3)]
    small = folded(StageView("planned", (node, *inside)), 2)
    assert [(one.name, one.reads) for one in small.nodes] == [("0", ()), ("0: forward", ("0",))]


def test_axes_show_where_the_samples_are() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    step = gramfx.transform(layer, lambda out: out.sum((0, 2)), in_dims=1, compile=False)
    batched = views(step.capture(torch.randn(5, 3, 4)).lowering)["batched"]
    values = {node.value for node in batched.nodes}
    assert {"f32[5, B, 4]", "f32[B·2, 5, 2]", "f32[B]"} <= values


# ---------------------------------------------------------------- the page

DRIVER = """
<script>
window.onerror = (message) => document.body.setAttribute("data-error", message);
const search = document.getElementById("search");
search.value = "Gramian of embedding";
search.dispatchEvent(new Event("input"));
document.body.setAttribute("data-hits", document.getElementById("hits").textContent);
left.show("gramian");
left.cy.getElementById("gramian").emit("tap");
document.body.setAttribute("data-panel", document.getElementById("panel").textContent);
document.getElementById("beside").value = "lowered";
document.getElementById("beside").dispatchEvent(new Event("change"));
right.show("tanh");
right.cy.getElementById("tanh").emit("tap");
document.body.setAttribute("data-lit", left.cy.$(".chosen").map((node) => node.id()).join());
document.getElementById("fold").click();
document.body.setAttribute("data-folded", left.cy.nodes().length);
document.getElementById("unfold").click();
document.body.setAttribute("data-unfolded", left.cy.nodes("[!open]").length);
</script>
"""


def browser() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


@pytest.mark.skipif(browser() is None, reason="no Chromium is installed")
def test_the_page_works_in_a_browser(tied: dict[str, StageView], tmp_path: Path) -> None:
    page = tmp_path / "tied.html"
    dumped(*TIED, "--format", "html", "-o", str(page))
    text = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    page.write_text(text.replace("</body>", DRIVER + "</body>"))
    command = [str(browser()), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=8000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', done.stdout))
    assert "error" not in found
    assert found["hits"] == "1 found"
    assert "Gramian of embedding.weight, 2 uses with cross terms" in found["panel"]
    for word in ("flops", "bytes", "embedding_cotangent", "linear_cotangent"):
        assert word in found["panel"]
    assert found["lit"] == "tanh"
    assert int(found["folded"]) < int(found["unfolded"]) == len(tied["planned"].nodes)


def test_the_page_needs_no_browser_to_be_whole(tmp_path: Path) -> None:
    page = tmp_path / "tied.html"
    dumped(*TIED, "--format", "html", "--stage", "joint", "-o", str(page))
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert data is not None
    held = json.loads(data[1])
    assert held["shown"] == "joint"
    assert list(held["stages"]) == list(gramfx.STAGES)


# ---------------------------------------------------------------- torch's own tools

SCRIPT = """
import torch, gramfx
step = gramfx.transform(torch.nn.Linear(3, 2), compile=False)
step(torch.randn(4, 3))
"""


def test_stages_are_artifacts_of_the_structured_trace(tmp_path: Path) -> None:
    environment = {"TORCH_TRACE": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment, cwd=ROOT)
    (log,) = tmp_path.glob("*.log")
    for name in (*gramfx.STAGES, "plan"):
        assert f'"name": "gramfx_{name}"' in log.read_text()


def test_stages_are_logged() -> None:
    environment = {"TORCH_LOGS": "+gramfx", "PATH": "", "HOME": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert "Gramian of weight" in done.stderr
    assert all(re.search(rf"\] {name}$", done.stderr, re.MULTILINE) for name in gramfx.STAGES)
