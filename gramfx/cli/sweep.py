"""``gramfx plan --batch``: plans over batch sizes, and their picture."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gramfx.api import Step
from gramfx.cost import seconds_of
from gramfx.errors import InputError, MemoryBudgetError
from gramfx.fitting import Lowering, Planning, replanned
from gramfx.machine import Machine, machine_of
from gramfx.memory import profile
from gramfx.plan import Plan, Regime, counted, sized, table
from gramfx.torch_compat import fake_batch_size, is_symbolic

#: Points of a picture, evenly spaced in the logarithm of the batch size.
POINTS = 25
#: So many plans are shown; a budget near its floor may need one for every batch size.
MOST_BANDS = 64


@dataclass(frozen=True)
class Point:
    """Predicted seconds and peak bytes at a batch size, of the step and of a plain forward and backward."""

    batch: int
    seconds: float
    peak: int
    plain_seconds: float
    plain_peak: int


@dataclass(frozen=True)
class Band:
    """A regime inside the range asked for, its plan, and points in it."""

    regime: Regime
    plan: Plan
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Sweep:
    """The bands of a range, in order; ``end`` says why they stop short of it, ``""`` where they do not."""

    bands: tuple[Band, ...]
    end: str = ""


def read_range(text: str) -> tuple[int, int]:
    """``1:4096`` as two numbers. Raises :class:`InputError`."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise InputError("the range of batch sizes cannot be read", expected="first:last, as 1:4096", got=text)
    return int(found[1]), int(found[2])


def sweep(step: Step, planning: Planning, first: int, last: int) -> Sweep:
    """The plans for all batch sizes from ``first`` to ``last``, as far as some plan keeps the memory budget.

    From two on: one sample is a case of its own, which a capture with a symbolic batch does not serve.

    Raises :class:`InputError`, and :class:`MemoryBudgetError` where even the first has none.
    """
    lowering, first = step.lowering, max(first, 2)
    if not is_symbolic(fake_batch_size(lowering.stages["captured"])) or last < first:
        raise InputError(
            "plans over batch sizes need a symbolic batch, of two samples at least",
            expected="B in --input, as f32[B=8,3,32,32], and --batch 2:1024",
            got=f"a plan for batch {step.plan.regime}, and --batch up to {last}",
            remedy="a model whose objectives are coupled has no symbolic batch; plan it for one size",
        )
    sizes, machine = _spaced(first, last), machine_of(torch.device("cpu"))
    bands: list[Band] = []
    batch = first
    while batch <= last:
        if len(bands) == MOST_BANDS:
            return Sweep(tuple(bands), f"from batch {batch} on more plans than {MOST_BANDS}")
        try:
            made = replanned(lowering, batch, planning)
        except MemoryBudgetError as refused:
            if not bands:
                raise
            return Sweep(tuple(bands), f"from batch {batch} on a memory budget of at least {sized(refused.least)}")
        bands.append(_band(made, batch, last, sizes, machine))
        batch = (bands[-1].regime.last or last) + 1
    return Sweep(tuple(bands))


def _band(made: Lowering, batch: int, last: int, sizes: Sequence[int], machine: Machine) -> Band:
    assert made.plan is not None
    end = made.plan.regime.last
    regime = Regime(batch, last if end is None else min(end, last))
    inside = sorted({batch, *(size for size in sizes if size in regime)})
    return Band(regime, made.plan, tuple(_point(made, size, machine) for size in inside))


def _spaced(first: int, last: int) -> list[int]:
    ratio = last / first
    return sorted({round(first * ratio ** (k / (POINTS - 1))) for k in range(POINTS)})


def _point(made: Lowering, batch: int, machine: Machine) -> Point:
    graph_module = made.stages["lowered"]
    seconds = seconds_of(graph_module.graph.nodes, batch, machine)
    peak = profile(graph_module, batch).peak
    return Point(batch, seconds, peak, made.plain_seconds(batch, machine), made.plain_peak(batch))


def shown(found: Sweep) -> str:
    """A table of the regimes, and what changes from one to the next."""
    head = ("batch", "flops", "peak", "plain peak", "predicted time", "plain time", "changes")
    rows, before = [head], None
    for band in found.bands:
        at, total = band.points[0], band.plan.totals
        times = f"{at.seconds * 1e3:.3g} ms", f"{at.plain_seconds * 1e3:.3g} ms"
        cells = (str(band.regime), counted(total.flops), sized(at.peak), sized(at.plain_peak), *times)
        rows.append((*cells, _changes(before, band.plan) or "-"))
        before = band.plan
    return "\n".join([*table(rows), *filter(None, [found.end])])


def _changes(before: Plan | None, plan: Plan) -> str:
    if before is None:
        return ""
    old = {one.parameter: (one.label, one.chunks) for one in before.contractions}
    new = [one for one in plan.contractions if old.get(one.parameter) != (one.label, one.chunks)]
    words = [f"{one.parameter}: {' in '.join(filter(None, (one.label, one.chunks)))}" for one in new[:2]]
    return ", ".join(words) + (f" and {len(new) - 2} more" if len(new) > 2 else "")


def plot(bands: Sequence[Band], title: str, output: Path) -> None:
    """Time and peak bytes against batch size, regimes as bands. Raises :class:`InputError` without matplotlib."""
    try:
        figure_module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as problem:
        raise InputError(
            "a picture needs matplotlib", got=str(problem), remedy="pip install matplotlib, or leave --plot out"
        ) from problem
    figure = figure_module.Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    points = [point for band in bands for point in band.points]
    batches = [point.batch for point in points]
    for axes, ours, plain, label in (
        (upper, [p.seconds * 1e3 for p in points], [p.plain_seconds * 1e3 for p in points], "predicted time, ms"),
        (lower, [p.peak / 2**20 for p in points], [p.plain_peak / 2**20 for p in points], "peak, MiB"),
    ):
        for number, band in enumerate(bands):
            axes.axvspan(band.regime.first, band.regime.last, color="#1c7ed6", alpha=0.05 + 0.09 * (number % 2), lw=0)
        axes.plot(batches, ours, color="#1864ab", marker="o", markersize=3, label="objectives and Gramian")
        axes.plot(batches, plain, color="#868e96", linestyle="--", label="plain forward and backward")
        axes.set(xscale="log", yscale="log", ylabel=label)
        axes.grid(alpha=0.25)
    upper.set_title(f"{title}: a band for each plan")
    upper.legend(frameon=False)
    lower.set_xlabel("batch size")
    figure.savefig(output)
