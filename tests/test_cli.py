"""The command line."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from typer.testing import CliRunner, Result

import gramfx
from gramfx.cli import main
from gramfx.cli.spec import read_inputs
from gramfx.cli.target import model_of
from gramfx.emit import gramian_of
from gramfx.passes import insert_gramians, lower_contractions
from gramfx.terms import ParameterTerms

RUNNER = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.mark.parametrize("command", ["", "demo", "dump", "plan", "check"])
def test_help_has_an_example(command: str) -> None:
    """Every help page shows a command that works."""
    for option in ("--help", "-h"):
        result = RUNNER.invoke(main, [*filter(None, [command]), option])
        assert result.exit_code == 0
        assert f"Example: gramfx {command or 'demo'}" in result.output


def test_exit_codes_are_told() -> None:
    text = " ".join(RUNNER.invoke(main, ["--help"]).output.split())
    assert "0 all is well; 1 what was checked is wrong; 2 the command could not be carried out" in text


def test_shells_can_complete() -> None:
    assert "--install-completion" in RUNNER.invoke(main, ["--help"]).output


def test_help_agrees_with_the_options() -> None:
    """All options of the demo, with their defaults."""
    text = RUNNER.invoke(main, ["demo", "--help"]).output
    for option in ("--epochs", "--samples", "--seed", "--compile", "--no-compile"):
        assert option in text


def test_version() -> None:
    """The package's own."""
    assert RUNNER.invoke(main, ["--version"]).output.strip() == f"gramfx {gramfx.__version__}"


def test_demo_trains_and_is_exact() -> None:
    """Both methods are in the table, and the Gramian is exact in float64."""
    result = RUNNER.invoke(main, ["demo", "--epochs", "1", "--samples", "64"])
    assert result.exit_code == 0, result.output
    for word in ("average", "Jacobian descent", "mean loss", "worst loss", "accuracy", "train", "test"):
        assert word in result.output
    errors = re.findall(r"\d\.\de-\d+", result.output)
    assert float(errors[-1]) < 1e-12
    shares = dict(re.findall(r"^  (.*): ([\d.]+)%$", result.output, re.MULTILINE))
    assert float(shares["Jacobian descent"]) <= float(shares["average"])


@pytest.mark.parametrize(
    "arguments",
    [["demo", "--samples", "4"], ["demo", "--epochs", "0"], ["train"], ["demo", "--epoch", "3", "x"]],
    ids=" ".join,
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    """With the usage and exit code 2."""
    result = RUNNER.invoke(main, arguments)
    assert result.exit_code == 2
    assert "Usage" in result.output


def test_missing_digits_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-learn the demo says what to install."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = RUNNER.invoke(main, ["demo"])
    assert result.exit_code == 1
    assert "gramfx[demo]" in result.output


def test_runs_as_a_module() -> None:
    """``python -m gramfx`` is the same command."""
    done = subprocess.run([sys.executable, "-m", "gramfx", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"gramfx {gramfx.__version__}"


# ---------------------------------------------------------------- targets and inputs

ROOT = Path(__file__).parent.parent
MODELS = str(ROOT / "examples" / "models.py")
LOSS = ["--objective", f"{MODELS}:loss_per_sequence"]
TIED = [f"{MODELS}:Tied", "-i", "i64[B=4,6]<11", "-t", "i64[B,6]<11", *LOSS]
LINEAR = "torch.nn:Linear(in_features=3, out_features=2)"


def invoked(*arguments: str) -> Result:
    return RUNNER.invoke(main, [*arguments, "--quiet"])


@pytest.mark.parametrize(
    ("target", "made"),
    [
        (LINEAR, "Linear(in_features=3, out_features=2, bias=True)"),
        ("torch.nn:Linear(in_features=3, out_features=2, bias=False)", "out_features=2, bias=False)"),
        (f"{MODELS}:Tied(words=5)", "(embedding): Embedding(5, 4)"),
        (f"{MODELS}:Tied", "(embedding): Embedding(11, 4)"),
        (f"{MODELS}:convolutions(channels=2)", "(5): Linear(in_features=32, out_features=10, bias=True)"),
        ("tests.test_cli:MADE", "ReLU()"),
    ],
)
def test_targets_name_modules_classes_and_factories(target: str, made: str) -> None:
    assert made in str(model_of(target))


MADE = nn.ReLU()


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("torch.nn", "this is no target"),
        ("nope.nope:Model", "No module named 'nope'"),
        ("missing.py:Model", "no file missing.py"),
        (f"{MODELS}:Missing", "got: 'Missing'"),
        (f"{MODELS}:Tied(", "cannot be read"),
        (f"{MODELS}:Tied(words=__import__('os').getcwd())", "cannot be read"),
        (f"{MODELS}:Tied(5)", "arguments need names"),
        (f"{MODELS}:Tied(colour=5)", "unexpected keyword argument 'colour'"),
        (f"{MODELS}:Tied()()", "only names and dots"),
        ("math:pi", "'float' object is not callable"),
        ("builtins:len(obj='ab')", "could not be made"),
    ],
)
def test_wrong_targets_are_one_line(target: str, fault: str) -> None:
    refused(invoked("dump", target, "-i", "f32[4,3]"), fault)


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("f32[4,3", "an input cannot be read"),
        ("f33[4,3]", "dtypes f64, f32"),
        ("f32[4,x]", "a size that is no number"),
        ("f32[B,3]", "B has no size"),
        ("f32[B=4,B]", "several batch dims"),
        ("i64[4,3]<0", "a bound is above 0"),
        ("f32[4,3]<9", "of integers"),
        ("f32[4,5]", "the model refuses the input"),
    ],
)
def test_wrong_inputs_are_one_line(spec: str, fault: str) -> None:
    refused(invoked("dump", LINEAR, "-i", spec), fault)


def test_what_cannot_be_captured_is_one_line() -> None:
    result = invoked("dump", "tests.test_cli:Branching", "-i", "f32[4,3]")
    refused(result, "control flow or shapes depend on tensor values")
    assert "test_cli.py" in result.stderr


class Branching(nn.Module):
    """Its path depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Doubled where it is positive."""
        out = self.linear(inputs)
        return out * 2 if out.sum() > 0 else out


def refused(result: Result, fault: str) -> None:
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("gramfx: ")
    assert fault in line
    assert "Traceback" not in result.output


def test_whatever_goes_wrong_is_one_line() -> None:
    result = invoked("check", LINEAR, "-i", "f32[4,3]", "--objective", "tests.test_cli:fails")
    refused(result, "no such thing")


def fails(output: Tensor) -> Tensor:
    """Always."""
    raise KeyError("no such thing")


def test_a_file_runs_once_with_its_folder_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "sibling_of_the_model.py").write_text("SIZE = 3\n")
    code = "import torch\nfrom sibling_of_the_model import SIZE\nRUNS = []\n"
    code += "def model():\n    RUNS.append(1)\n    return torch.nn.Linear(SIZE, 2)\n"
    code += "def total(out):\n    return out.sum(1) * len(RUNS)\n"
    place = tmp_path / "model_beside_another.py"
    place.write_text(code)
    result = invoked("check", f"{place}:model", "-i", "f32[4,3]", "--objective", f"{place}:total")
    assert result.exit_code == 0, result.output


def test_traceback_shows_where_an_error_came_from() -> None:
    result = RUNNER.invoke(main, ["dump", "nope:Model", "-i", "f32[4,3]", "--traceback"])
    assert isinstance(result.exception, gramfx.errors.InputError)


def test_inputs_are_what_they_say() -> None:
    given = read_inputs(["f32[2,B=5]", "mask=b8[B,3]", "bf16[]"], ["i64[B,7]<1000"])
    assert [(one.dtype, tuple(one.shape)) for one in given.args] == [
        (torch.float32, (2, 5)),
        (torch.bfloat16, ()),
    ]
    assert given.kwargs["mask"].dtype == torch.bool
    assert given.targets is not None
    assert given.targets[0].shape == (5, 7)
    assert 2 < given.targets[0].max() < 1000
    assert (given.in_dims, given.symbolic) == ((1, None), True)
    again = read_inputs(["f32[2,B=5]", "mask=b8[B,3]", "bf16[]"], ["i64[B,7]<1000"])
    assert torch.equal(again.targets[0], given.targets[0]) if again.targets else False


def test_dump_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr("gramfx.api.confirm", fails)
    result = invoked("dump", "tests.test_cli:Huge", "-i", "f32[B=8,3]", "--objective", "tests.test_cli:total")
    assert result.exit_code == 0, result.output
    assert "f32[B, 4294967296]" in result.stdout


class Huge(nn.Module):
    """Its activations would take hundreds of gigabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2**16)

    def forward(self, inputs: Tensor) -> Tensor:
        """Outer products."""
        out = self.linear(inputs)
        return (out[:, :, None] * out[:, None, :]).flatten(1)


def total(output: Tensor) -> Tensor:
    """One a sample."""
    return output.sum(1)


# ---------------------------------------------------------------- plan


def test_plan_prints_the_plan_and_writes_it_as_json() -> None:
    assert "embedding.weight" in invoked("plan", *TIED).stdout
    plan = gramfx.Plan.from_json(invoked("plan", *TIED, "--json").stdout)
    assert plan.batch == 4
    budget = gramfx.Plan.from_json(invoked("plan", *TIED, "--json", "--memory-budget", "2MiB").stdout)
    assert budget.budget == 2 * 2**20


def test_plans_over_batch_sizes_cover_the_range(tmp_path: Path) -> None:
    target = ["torch.nn:Linear(in_features=64, out_features=64)", "-i", "f32[B=8,16,64]"]
    target += ["--objective", "tests.test_cli:squares"]
    result = invoked("plan", *target, "--batch", "2:65536", "--json", "--memory-budget", "64KiB")
    assert result.exit_code == 0, result.output
    plans = [gramfx.Plan.from_json(json.dumps(one)) for one in json.loads(result.stdout)]
    assert len(plans) > 1
    assert plans[0].regime.first <= 2
    for before, after in itertools.pairwise(plans):
        assert before.regime.last is not None
        assert before.regime.last < after.batch
    # The Gramian itself outgrows the budget.
    assert "on a memory budget of at least" in result.stderr
    table = invoked("plan", *target, "--batch", "2:65536", "--memory-budget", "64KiB").stdout
    assert len(table.splitlines()) == len(plans) + 2
    picture = tmp_path / "plan.svg"
    assert invoked("plan", *target, "--batch", "2:64", "--plot", str(picture)).exit_code == 0
    assert "<svg" in picture.read_text()


def squares(output: Tensor) -> Tensor:
    """One a sample."""
    return output.square().sum((1, 2))


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--batch", "1-9"], "the range of batch sizes cannot be read"),
        (["--batch", "9:1"], "the range of batch sizes cannot be read"),
        (["--plot", "plan.png"], "a picture needs a range of batch sizes"),
        (["--memory-budget", "much"], "memory_budget is no number of bytes"),
    ],
)
def test_wrong_plans_are_one_line(arguments: list[str], fault: str) -> None:
    refused(invoked("plan", *TIED, *arguments), fault)


def test_a_range_needs_a_symbolic_batch() -> None:
    refused(invoked("plan", LINEAR, "-i", "f32[4,3]", "--batch", "1:8"), "plans over batch sizes need a symbolic batch")


# ---------------------------------------------------------------- check


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_check_agrees_with_autograd(dtype: str) -> None:
    result = invoked("check", *TIED, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert "embedding.weight" in result.stdout
    assert "4 of 4 objectives against autograd" in result.stdout
    assert "OFF" not in result.stdout


def test_check_says_which_op_couples() -> None:
    result = invoked("check", f"{MODELS}:convolutions", "-i", "f32[4,3,8,8]", "--samples", "5")
    assert result.exit_code == 0, result.output
    assert "5 of 40 objectives" in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("coupled by")]
    assert "batch_norm" in line
    assert "module '1'" in line


def test_check_of_a_model_with_dropout_and_a_keyword() -> None:
    layer = "torch.nn:TransformerEncoderLayer(d_model=4, nhead=2, dim_feedforward=8, batch_first=True)"
    result = invoked("check", layer, "-i", "f32[3,5,4]", "--samples", "6")
    assert result.exit_code == 0, result.output


def normed() -> nn.Module:
    """Its forward changes a buffer that its output depends on."""
    return nn.Sequential(spectral_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))


def biased() -> nn.Module:
    """A bias before a batch norm has no gradient but rounding."""
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def frozen() -> nn.Module:
    """One layer is not trained, another not used."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    model[1].register_parameter("spare", nn.Parameter(torch.ones(2)))
    return model


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("model", ["normed", "biased", "frozen"])
def test_check_finds_nothing_where_nothing_is_wrong(model: str, dtype: str) -> None:
    result = invoked("check", f"tests.test_cli:{model}", "-i", "f32[4,6]", "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert ("1.spare" in result.stdout) == (model == "frozen")


def test_check_misses_no_parameter_that_the_compiler_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = insert_gramians._Insertion.total

    def forgetful(self: Any, *rest: Any) -> Any:
        del self.found[next(iter(self.found))]
        return whole(self, *rest)

    monkeypatch.setattr(insert_gramians._Insertion, "total", forgetful)
    monkeypatch.setattr("gramfx.api.confirm", lambda *_: None)
    result = invoked("check", LINEAR, "-i", "f32[4,3]")
    assert result.exit_code == 1
    off = [line for line in result.stdout.splitlines() if line.endswith("OFF")]
    assert [line.split()[0] for line in off] == ["weight", "the"]


def test_check_names_the_parameter_and_the_strategy_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gramian_of

    def wrong(terms: ParameterTerms, *rest: Any) -> Tensor:
        made = right(terms, *rest)
        return made * 1.01 if len(terms.terms) == 2 else made

    monkeypatch.setattr(lower_contractions, "gramian_of", wrong)
    monkeypatch.setattr("gramfx.api.confirm", lambda *_: None)
    result = invoked("check", *TIED)
    assert result.exit_code == 1
    off = [line.rsplit(None, 2) for line in result.stdout.splitlines() if line.endswith("OFF")]
    assert [line[-2] for line in off] == ["1.0e-02"] * 2
    assert [line[0].split()[0] for line in off] == ["embedding.weight", "the"]
    uses = [line for line in result.stdout.splitlines() if "embedding_weight_use" in line]
    assert len(uses) == 2
    assert "the Gramian or the gradient is off" in result.stderr
