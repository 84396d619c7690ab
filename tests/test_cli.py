"""The command line."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import gramfx
from gramfx.cli import main

RUNNER = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["demo", "-h"]], ids=" ".join)
def test_help_has_an_example(arguments: list[str]) -> None:
    """Every help page shows a command that works."""
    result = RUNNER.invoke(main, arguments)
    assert result.exit_code == 0
    assert "Example: gramfx demo" in result.output


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
