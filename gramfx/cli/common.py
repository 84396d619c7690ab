"""What the commands share: capturing a target, progress, where output goes, and how errors end."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from torch import nn

import gramfx
from gramfx.api import Step
from gramfx.cli.spec import Inputs, read_inputs
from gramfx.cli.target import model_of, objective_of
from gramfx.errors import GramfxError, InputError

#: Exit codes: what was checked is wrong; the command could not be carried out.
MISMATCH, REFUSED = 1, 2


@contextlib.contextmanager
def progress(what: str, quiet: bool) -> Iterator[None]:
    """A spinner on stderr while something takes long, on a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def carried_out(traceback: bool) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Let errors end in one line on stderr and exit code 2; with ``traceback``, as Python shows them."""

    def around(command: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(command)
        def run() -> None:
            if traceback:
                return command()
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                warnings.showwarning = _told
                try:
                    return command()
                except typer.Exit:
                    raise
                except (GramfxError, OSError) as problem:
                    said = str(problem)
                except Exception as problem:
                    said = f"{type(problem).__name__}: {problem}\n--traceback shows where"
            typer.echo(f"gramfx: {_one_line(said)}", err=True)
            raise typer.Exit(REFUSED)

        return run

    return around


def _told(message: Warning | str, *_: Any, **__: Any) -> None:
    typer.echo(f"gramfx: {_one_line(str(message))}", err=True)


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def step_for(target: str, objective: str | None, inputs: Inputs, device: str = "cpu", **options: Any) -> Step:
    """A step for a target and inputs."""
    model = model_of(target)
    return gramfx.transform(
        model.to(device) if isinstance(model, nn.Module) and device != "cpu" else model,
        objective_of(objective) if objective else None,
        in_dims=inputs.in_dims,
        compile=False,
        dynamic=inputs.symbolic,
        **options,
    )


def captured(
    target: str,
    objective: str | None,
    inputs: Sequence[str],
    targets: Sequence[str],
    quiet: bool,
    device: str = "cpu",
    **options: Any,
) -> Step:
    """A target captured and planned for inputs as they are described; nothing runs."""
    given = read_inputs(inputs, targets).to(device)
    with progress(f"making {target}", quiet):
        step = step_for(target, objective, given, device, **options)
        step.trial = False
    with progress(f"capturing {target}", quiet):
        return capture(step, given)


def capture(step: Step, given: Inputs) -> Step:
    """Capture a step; whatever the model itself raises is told as an error of the input."""
    try:
        return step.capture(*given.args, targets=given.targets, **given.kwargs)
    except GramfxError:
        raise
    except Exception as problem:
        shapes = ", ".join(str(tuple(one.shape)) for one in given.args)
        raise InputError("the model refuses the input", got=f"{shapes}: {problem}") from problem


def write(text: str, output: Path | None) -> None:
    """To a file, or to stdout."""
    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")
