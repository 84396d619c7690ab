"""Time of a step against its memory budget, from the least that will do to no limit: ``python -m benchmarks.budget``.

``--picture PATH`` draws it, for which matplotlib must be installed.
"""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence

import gramfx
from benchmarks.common import (
    UNLIMITED,
    Benchmark,
    Row,
    add_rounds,
    alternated,
    as_is,
    mebibytes,
    milliseconds,
    own_process,
    ratio,
    timed,
)
from benchmarks.models import SMALL, workload
from gramfx.errors import MemoryBudgetError

#: The least budget above zero that is worth a point.
SMALLEST = 2**16


def bounds(model: str, device: str) -> Row:
    """``floor``: the least budget that will do; ``need``: how far a step without a limit goes above plain."""
    held = workload(model, device=device)

    def above_plain(budget: int) -> int:
        step = gramfx.transform(held.model, held.objective, compile=False, memory_budget=budget)
        totals = step.capture(*held.inputs, targets=held.targets).plan.totals
        return totals.peak - totals.plain_peak

    try:
        above_plain(0)
        floor = 0
    except MemoryBudgetError as refused:
        floor = refused.least
    return {"floor": floor, "need": above_plain(UNLIMITED)}


def time_budget(model: str, budget: int, device: str, runs: int) -> Row:
    """Seconds of a step under a budget, and how it was planned."""
    held = workload(model, device=device)
    step = gramfx.transform(held.model, held.objective, compile=False, memory_budget=budget)
    found = timed(lambda: step(*held.inputs, targets=held.targets), runs, device)
    totals = step.plan.totals
    labels = Counter(one.label + (" in chunks" if one.chunks else "") for one in step.plan.contractions)
    planned = ", ".join(f"{count} {label}" for label, count in labels.most_common())
    return {**found, "peak": totals.peak, "plain": totals.plain_peak, "planned": planned}


def budgets(floor: int, need: int, points: int) -> list[int]:
    """From the floor to what is needed, each the same factor above the one before; no limit last."""
    first = max(floor, SMALLEST)
    if need <= first:
        return [floor, UNLIMITED]
    steps = [int(first * (need / first) ** (k / (points - 1))) for k in range(points - 1)]
    steps = steps if floor else [0, *steps[1:]]
    return [*dict.fromkeys(steps), UNLIMITED]


def rows(options: Namespace, model: str) -> list[Row]:
    """One model, all budgets."""
    found = own_process("budget", "bounds", model=model, device=options.device)
    given = {"model": model, "device": options.device, "runs": options.runs}
    systems = {str(b): {"budget": b, **given} for b in budgets(found["floor"], found["need"], options.points)}
    timings = alternated("budget", systems, options.rounds)
    unlimited = timings[str(UNLIMITED)]["seconds"]
    return [
        {
            **{"case": model, "budget": None if int(name) == UNLIMITED else int(name), "peak": row["peak"]},
            **{"plain": row["plain"], "seconds": row["seconds"], "relative": row["seconds"] / unlimited},
            **{"need": found["need"], "planned": row["planned"]},
        }
        for name, row in timings.items()
    ]


def draw(options: Namespace, found: Sequence[Row]) -> None:
    """A panel a model, if a picture is asked for."""
    if not options.picture:
        return
    figure_module = importlib.import_module("matplotlib.figure")
    models = list(dict.fromkeys(row["case"] for row in found))
    figure = figure_module.Figure(figsize=(4 * len(models), 3.2), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for panel, model in zip(panels, models, strict=True):
        points = [row for row in found if row["case"] == model]
        limited = [row for row in points if row["budget"] is not None]
        positive = [row["budget"] for row in limited if row["budget"]] + [max(points[0]["need"], SMALLEST)]
        places = [max(row["budget"], min(positive) / 4) for row in limited] + [2 * max(positive)]
        panel.plot([place / 2**20 for place in places], [row["relative"] for row in points], marker="o")
        panel.axhline(1, color="gray", linewidth=0.8)
        panel.axvline(max(positive) / 2**20, color="gray", linewidth=0.8, linestyle=":")
        panel.set(xscale="log", title=model, xlabel="budget above plain, MiB (last point: no limit)")
    panels[0].set(ylabel="time relative to no limit", ylim=(0, None))
    figure.savefig(options.picture, format="svg")


def add_options(parser: ArgumentParser) -> None:
    """What this benchmark alone can be told."""
    add_rounds(parser)
    parser.add_argument("--points", type=int, default=6, help="budgets a model")
    parser.add_argument("--picture", metavar="PATH", help="an SVG file to write")


BENCHMARK = Benchmark(
    name="budget",
    about=__doc__,
    cases=tuple(SMALL),
    columns={
        **{"budget": mebibytes, "peak": mebibytes, "plain": mebibytes, "seconds": milliseconds},
        **{"relative": ratio, "planned": as_is},
    },
    rows=rows,
    jobs={"bounds": bounds, "timed": time_budget},
    quick=("--models", "tokens", "--runs", "5", "--rounds", "1", "--points", "3"),
    options=add_options,
    finish=draw,
)

if __name__ == "__main__":
    BENCHMARK.main()
