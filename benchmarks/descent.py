"""Time of a whole step of Jacobian descent against plain training: ``python -m benchmarks.descent``.

Forward, Gramian, weights (the mean) and backward, beside the forward and backward of plain training, and beside
TorchJD's ``Engine`` (``pip install '.[interop]'``), which cannot run models with dropout in their attention. ``first``
is the time to the first result of the compiled ones. Each system runs in processes of its own, in turn, op by op and
compiled; what counts is the better of each.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import torch
from torch import Tensor

import gramfx
from benchmarks.common import (
    Benchmark,
    Row,
    add_batch,
    add_rounds,
    alternated,
    milliseconds,
    ratio,
    timed,
    verdict,
)
from benchmarks.models import CALM, MODELS, Workload, workload

SYSTEMS = ("plain", "gramfx", "torchjd")
#: The longest times wanted, in terms of plain training; the least advantages over TorchJD's.
LARGEST_RATIO = {"alexnet": 1.6, "transformer": 1.4, "transformer_without_dropout": 1.4}
#: What a peer cannot run.
REFUSED = {("transformer", "torchjd")}
LEAST_GAIN = {"alexnet": 8.0, "transformer_without_dropout": 2.5}
#: The longest time to the first result, in terms of ``torch.compile``'s.
LARGEST_FIRST = 2.5


def descend(held: Workload, losses: Tensor, gramian: Tensor) -> None:
    """Take the mean of all gradients."""
    held.model.zero_grad(set_to_none=True)
    losses.backward(torch.full_like(losses, 1 / len(gramian)))


def step_of(held: Workload, system: str, compiled: bool) -> Callable[[], None]:
    """One step of a system."""
    if system == "plain":
        losses = torch.compile(held.losses) if compiled else held.losses
        return lambda: held.plain(losses)
    if system == "gramfx":
        step = gramfx.transform(held.model, held.objective, compile=compiled)
        return lambda: descend(held, *step(*held.inputs, targets=held.targets))
    from torchjd.autogram import Engine

    engine = Engine(held.model, batch_dim=0)

    def theirs() -> None:
        made = held.losses()
        descend(held, made, engine.compute_gramian(made))

    return theirs


def time_system(model: str, system: str, compiled: bool, batch: int | None, device: str, runs: int) -> Row:
    """Seconds of the first step and of those after it."""
    return timed(step_of(workload(model, batch, device), system, compiled), runs, device)


def rows(options: Namespace, model: str) -> list[Row]:
    """One model, all systems."""
    given = {"model": model, "batch": options.batch, "device": options.device, "runs": options.runs}
    wanted = [name for name in SYSTEMS if name not in options.without and (model, name) not in REFUSED]
    systems = {name: {"system": name, "compiled": False, **given} for name in wanted}
    if not options.eager:
        systems |= {f"{name} compiled": {"system": name, "compiled": True, **given} for name in ("plain", "gramfx")}
    with tempfile.TemporaryDirectory() as folder:
        found = alternated("descent", systems, options.rounds, {"TORCHINDUCTOR_CACHE_DIR": folder})
    seconds = {name: row["seconds"] for name, row in found.items()}
    best = {system: min((s for n, s in seconds.items() if n.startswith(system)), default=None) for system in SYSTEMS}
    plain, ours, theirs = (best[system] for system in SYSTEMS)
    row: Row = {"case": model, **seconds, **{"first " + name: held["first"] for name, held in found.items()}}
    assert plain is not None and ours is not None
    row |= {"ratio": ours / plain, "gain": theirs / ours if theirs is not None else None}
    kept = [ours / plain <= LARGEST_RATIO.get(model, float("inf"))]
    kept += [theirs / ours >= LEAST_GAIN.get(model, 0.0)] if theirs is not None else []
    if not options.eager:
        row["first ratio"] = row["first gramfx compiled"] / row["first plain compiled"]
        kept.append(row["first ratio"] <= LARGEST_FIRST)
    return [{**row, "kept": all(kept)}]


def add_options(parser: ArgumentParser) -> None:
    """What this benchmark alone can be told."""
    add_batch(parser)
    add_rounds(parser)
    parser.add_argument("--eager", action="store_true", help="leave the compiled systems out")
    parser.add_argument("--without", nargs="*", default=[], choices=["torchjd"], help="leave this system out")


BENCHMARK = Benchmark(
    name="descent",
    about=__doc__,
    cases=(*MODELS, *CALM),
    columns={
        **dict.fromkeys((*SYSTEMS, "plain compiled", "gramfx compiled"), milliseconds),
        **{"ratio": ratio, "gain": ratio},
        **dict.fromkeys(("first plain compiled", "first gramfx compiled"), milliseconds),
        **{"first ratio": ratio, "kept": verdict},
    },
    rows=rows,
    jobs={"timed": time_system},
    quick=("--models", "mlp", "--runs", "5", "--rounds", "1", "--eager", "--without", "torchjd"),
    options=add_options,
)

if __name__ == "__main__":
    BENCHMARK.main()
