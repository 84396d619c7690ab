"""``gramfx plan``: the plan at one batch size, or at many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from gramfx.cli.common import captured, progress
from gramfx.cli.sweep import plot, read_range, shown, sweep
from gramfx.errors import InputError
from gramfx.fitting import Planning
from gramfx.plan import parse_bytes


def plan(
    target: str,
    objective: str | None,
    inputs: Sequence[str],
    targets: Sequence[str],
    memory_budget: str | None,
    batch: str | None,
    picture: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print the plan, or the plans for a range of batch sizes."""
    if picture is not None and batch is None:
        raise InputError("a picture needs a range of batch sizes", expected="--batch first:last", got="no --batch")
    ends = None if batch is None else read_range(batch)
    step = captured(target, objective, inputs, targets, quiet, memory_budget=memory_budget)
    if ends is None:
        typer.echo(step.plan.to_json() if as_json else str(step.plan))
        return
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    with progress("planning for all batch sizes", quiet):
        found = sweep(step, Planning(memory_budget=budget), *ends)
    plans = [json.loads(one.plan.to_json()) for one in found.bands]
    typer.echo(json.dumps(plans) if as_json else shown(found))
    if as_json and found.end:
        typer.echo(f"gramfx: {found.end}", err=True)
    if picture is not None:
        plot(found.bands, target, picture)
