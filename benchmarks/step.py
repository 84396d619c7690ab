"""Time of objectives and Gramian against plain forward and backward: ``python -m benchmarks.step``.

Each system runs in processes of its own, in turn, op by op and compiled; what counts is the better of each.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace

import torch

import gramfx
from benchmarks.common import (
    Benchmark,
    Row,
    add_batch,
    add_rounds,
    alternated,
    as_is,
    milliseconds,
    ratio,
    timed,
    verdict,
)
from benchmarks.models import LOOPS, MODELS, workload

SYSTEMS = ("plain", "gramfx")
#: The longest times wanted, in terms of a plain forward and backward.
LARGEST_RATIO = {"alexnet": 1.3, "transformer": 1.1, "lstm": 1.5}


def time_system(model: str, system: str, compiled: bool, batch: int | None, device: str, runs: int) -> Row:
    """Seconds of the first step and of those after it."""
    held = workload(model, batch, device)
    step = gramfx.transform(held.model, held.objective, compile=compiled)
    losses = torch.compile(held.losses) if compiled else held.losses

    def plain() -> None:
        held.plain(losses)

    def ours() -> None:
        step(*held.inputs, targets=held.targets)

    return timed(plain if system == "plain" else ours, runs, device)


def rows(options: Namespace, model: str) -> list[Row]:
    """One model, all systems."""
    given = {"model": model, "batch": options.batch, "device": options.device, "runs": options.runs}
    ways = (False,) if options.eager else (False, True)
    systems = {
        system + (" compiled" if compiled else ""): {"system": system, "compiled": compiled, **given}
        for compiled in ways
        for system in SYSTEMS
    }
    with tempfile.TemporaryDirectory() as folder:
        found = alternated("step", systems, options.rounds, {"TORCHINDUCTOR_CACHE_DIR": folder})
    seconds = {name: row["seconds"] for name, row in found.items()}
    best = {system: min(s for name, s in seconds.items() if name.startswith(system)) for system in SYSTEMS}
    row = {"case": model, **seconds, "ratio": best["gramfx"] / best["plain"]}
    row |= {"first " + name: held["first"] for name, held in found.items()}
    limit = LARGEST_RATIO.get(model)
    return [row if limit is None else {**row, "limit": limit, "kept": row["ratio"] <= limit}]


def add_options(parser: ArgumentParser) -> None:
    """What this benchmark alone can be told."""
    add_batch(parser)
    add_rounds(parser)
    parser.add_argument("--eager", action="store_true", help="leave the compiled systems out")


BENCHMARK = Benchmark(
    name="step",
    about=__doc__,
    cases=(*MODELS, *LOOPS),
    columns={
        **{system + way: milliseconds for way in ("", " compiled") for system in SYSTEMS},
        **{"ratio": ratio, "limit": as_is, "kept": verdict, "first gramfx": milliseconds},
        **{f"first {system} compiled": milliseconds for system in SYSTEMS},
    },
    rows=rows,
    jobs={"timed": time_system},
    quick=("--models", "mlp", "--runs", "5", "--rounds", "1", "--eager"),
    options=add_options,
)

if __name__ == "__main__":
    BENCHMARK.main()
