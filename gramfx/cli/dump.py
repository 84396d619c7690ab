"""``gramfx dump``: the stages of a model, in the formats that there are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from gramfx import __version__
from gramfx.api import Step
from gramfx.cli.common import write
from gramfx.cross import sources
from gramfx.errors import InputError
from gramfx.view import StageView, views
from gramfx.view.dot import dot, svg
from gramfx.view.explorer import model_explorer
from gramfx.view.page import page
from gramfx.view.text import diff, lines, text

#: Of the JSON format; changes where a field changes its meaning or goes.
VERSION = 1
#: What comes after the last stage.
INDUCTOR = "inductor"
_STYLES = {
    **{"parameter": "yellow", "use": "yellow", "input": "bold", "cotangent": "blue", "backward": "cyan"},
    **{"gramian": "bold green", "contraction": "green", "sum": "dim green"},
}


@dataclass(frozen=True)
class Wanted:
    """What to show: ``stage``, or all of them, or the difference of two; compiled for ``device``."""

    stage: str
    every: bool = False
    diff: tuple[str, str] | None = None
    device: str = "cpu"

    @property
    def compiled(self) -> bool:
        """Whether it is what Inductor makes of the last stage."""
        return self.stage == INDUCTOR and not self.every and self.diff is None

    def place(self, form: str) -> str:
        """The device to capture on. Raises :class:`InputError` where there is no such output, or no such device."""
        if self.stage == INDUCTOR and (form != "text" or not self.compiled):
            alone = f"--stage {INDUCTOR} without --all-stages and --diff"
            raise InputError("what Inductor writes is text", expected=alone, got=f"--format {form}")
        there = self.device == "cpu" or torch.cuda.is_available()
        if not there and not self.compiled:
            raise InputError("there is no CUDA device", expected=f"--stage {INDUCTOR}, which needs none")
        return self.device if there else "cpu"

    def of(self, stages: Mapping[str, StageView]) -> dict[str, StageView]:
        """The stages to show."""
        return dict(stages) if self.every else {self.stage: stages[self.stage]}


def dump(step: Step, title: str, wanted: Wanted, form: str, output: Path | None) -> None:
    """Write what is wanted of a captured step."""
    if wanted.compiled:
        written = sources(step, wanted.device)
        write("\n".join(f"# == {name}\n{one.source.strip()}\n" for name, one in written.items()), output)
        return
    stages = views(step.lowering)
    if wanted.diff is not None:
        if form != "text":
            raise InputError("a difference is text", expected="--diff without --format", got=f"--format {form}")
        _in_colour("\n".join(diff(*(stages[name] for name in wanted.diff))), output)
    elif form == "text":
        _as_text(wanted.of(stages), output)
    elif form in _PICTURES:
        _as_pictures(wanted.of(stages), form, output)
    elif form == "html":
        write(page(title, stages, wanted.stage, str(step.plan).splitlines()), output)
    else:
        made = model_explorer(wanted.of(stages)) if form == "model-explorer" else _data(step, wanted.of(stages))
        write(json.dumps(made, ensure_ascii=False), output)


_PICTURES: dict[str, Callable[[StageView], str]] = {"dot": dot, "svg": svg}


def _data(step: Step, stages: Mapping[str, StageView]) -> dict[str, object]:
    return {
        **{"format": "gramfx", "version": VERSION, "gramfx": __version__},
        "stages": [stage.to_json() for stage in stages.values()],
        "plan": json.loads(step.plan.to_json()),
    }


def _as_pictures(stages: Mapping[str, StageView], form: str, output: Path | None) -> None:
    if len(stages) == 1:
        write("".join(map(_PICTURES[form], stages.values())), output)
        return
    if output is None:
        raise InputError(f"several stages as {form} are several files", expected="-o FOLDER", got="no -o")
    output.mkdir(parents=True, exist_ok=True)
    for name, stage in stages.items():
        write(_PICTURES[form](stage), output / f"{name}.{form}")


def _as_text(stages: Mapping[str, StageView], output: Path | None) -> None:
    console = Console(soft_wrap=True, highlight=False)
    if output is not None or not console.is_terminal:
        parts = [f"== {name}\n{text(stage)}" for name, stage in stages.items()]
        write("\n\n".join(parts) if len(parts) > 1 else text(next(iter(stages.values()))), output)
        return
    for name, stage in stages.items():
        if len(stages) > 1:
            console.rule(name)
        for line, node in lines(stage):
            console.print(Text(line, style=_STYLES.get(node.kind, "")))


def _in_colour(changes: str, output: Path | None) -> None:
    console = Console(soft_wrap=True, highlight=False)
    if output is not None or not console.is_terminal:
        write(changes, output)
        return
    for line in changes.splitlines():
        console.print(Text(line, style={"-": "red", "+": "green"}.get(line[:1], "")))
