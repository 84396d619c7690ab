"""The examples run, and each checks its own answer."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    """An empty folder would pass unseen."""
    names = ["jacobian_descent", "models", "multi_task", "ntk", "per_sample_norms", "pinn"]
    assert [path.stem for path in EXAMPLES] == names


#: Those that Inductor compiles several graphs for.
LONG = {"pinn"}


@pytest.mark.parametrize(
    "path", [pytest.param(e, id=e.stem, marks=[pytest.mark.slow] if e.stem in LONG else []) for e in EXAMPLES]
)
def test_example_runs_from_anywhere(path: Path, tmp_path: Path) -> None:
    """In a process and a folder of its own, warnings as errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stderr


def test_readme_code_and_dumps_are_true() -> None:
    """The example runs, and the stages that the README shows are its stages."""
    text = (ROOT / "README.md").read_text()
    code, *others = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    for other in others:
        exec(other, {})
    assert all(parameter.grad is not None for parameter in names["model"].parameters())
    dumps = [dump.splitlines() for dump in re.findall(r"\n\n```\n(.*?)\n```", text, re.DOTALL)[:3]]
    planned = dumps.pop()
    for stage, dump in zip(("separated", "planned"), dumps, strict=True):
        rows = [row.rstrip() for row in str(names["step"].stage(stage)).splitlines()]
        shown = [row for row in dump if not row.startswith(">>>")]
        assert shown == rows[-len(shown) :], stage
    # The line that names the machine is another one everywhere.
    rows = str(names["step"].plan).splitlines()
    assert [row for row in planned if "planned at" not in row] == [row for row in rows if "planned at" not in row]


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's dot is not installed")
def test_readme_commands_work_as_printed(tmp_path: Path) -> None:
    """The block that tells of the command line, in a folder where it may leave its files."""
    text = (ROOT / "README.md").read_text()
    (block,) = [found for found in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "tied()" in found]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = block.replace(".venv/bin/gramfx", f"{sys.executable} -m gramfx")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {"tied.html", "tied.svg", "plan.svg"} <= {path.name for path in tmp_path.iterdir()}
    for word in ("== lowered", "+++ separated", "plain peak", "8 of 8 objectives against autograd"):
        assert word in done.stdout
