"""Whether the planner picks the faster strategy for a linear layer: ``python -m benchmarks.choice``.

Points are N x T x d x p: ``nn.Linear(d, p)`` on N samples of T tokens, on both sides of where the outer product needs
fewer flops than the pairwise one, which is ``(T + N/2) d p < N T² (d + p) / 2``.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

import gramfx
from benchmarks.common import (
    UNLIMITED,
    Benchmark,
    Row,
    add_rounds,
    as_is,
    median,
    milliseconds,
    own_process,
    ratio,
    timed_in_turn,
    verdict,
)

FORCED = ("pairwise", "outer")
#: How much longer than the fastest a good choice may take.
CLOSE = 1.15
POINTS = tuple(f"{n}x{t}x{d}x{p}" for n, t, (d, p) in itertools.product((4, 16), (4, 32, 256), ((64, 64), (256, 1024))))


def weighted(output: Tensor, weights: Tensor) -> Tensor:
    """An objective a sample that is next to nothing to compute."""
    return (output * weights).sum((1, 2))


def time_point(point: str, device: str, runs: int) -> dict[str, Row]:
    """Seconds of a step with the planner's own choice and with each strategy forced, in turn, in one process.

    They are one system, and one graph where the choice is a forced one; what a process does to its memory meets all.
    """
    n, t, d, p = map(int, point.split("x"))
    torch.manual_seed(0)
    model = nn.Linear(d, p, bias=False, device=device)
    inputs, weights = torch.randn(n, t, d, device=device), torch.randn(n, t, p, device=device)
    step = gramfx.transform(model, weighted, compile=False, memory_budget=UNLIMITED).capture(inputs, targets=weights)
    chosen = step.plan.contractions[0]
    steps = {"choice": step}
    for strategy in FORCED:
        plan = step.plan.forced(strategy)
        steps[strategy] = gramfx.transform(model, weighted, compile=False, memory_budget=UNLIMITED, plan=plan)
    found = timed_in_turn({name: partial(one, inputs, targets=weights) for name, one in steps.items()}, runs, device)
    return {name: {**row, "strategy": chosen.strategy, "chunks": chosen.chunks} for name, row in found.items()}


def rows(options: Namespace, point: str) -> list[Row]:
    """One point, all strategies."""
    n, t, d, p = map(int, point.split("x"))
    given = {"point": point, "device": options.device, "runs": options.runs}
    each = [own_process("choice", "timed", **given) for _ in range(options.rounds)]
    found = {name: [process[name] for process in each] for name in ("choice", *FORCED)}
    seconds = {name: median(held) for name, held in found.items()}
    fastest = min(seconds.values())
    chosen = found["choice"][0]
    return [
        {
            **{"case": point, "fewer flops": "outer" if (t + n / 2) * d * p < n * t**2 * (d + p) / 2 else "pairwise"},
            **{"chosen": chosen["strategy"], "chunks": chosen["chunks"] or None, **seconds},
            **{"faster": min(FORCED, key=seconds.__getitem__), "over fastest": seconds["choice"] / fastest},
            **{"good": seconds["choice"] <= CLOSE * fastest},
        }
    ]


def share(found: Sequence[Row]) -> Row:
    """How often the choice was good."""
    return {f"good choices, of {len(found)} points": sum(row["good"] for row in found) / len(found)}


BENCHMARK = Benchmark(
    name="choice",
    about=__doc__,
    cases=POINTS,
    columns={
        **{"fewer flops": as_is, "chosen": as_is, "chunks": as_is},
        **dict.fromkeys(("choice", *FORCED), milliseconds),
        **{"faster": as_is, "over fastest": ratio, "good": verdict},
    },
    rows=rows,
    jobs={"timed": time_point},
    quick=("--models", POINTS[0], "--runs", "5", "--rounds", "1"),
    options=add_rounds,
    summary=share,
)

if __name__ == "__main__":
    BENCHMARK.main()
