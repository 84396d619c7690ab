"""Time of objectives and Gramian against plain forward and backward: ``python -m benchmarks.step``.

Each system runs in a process of its own, on the same model and inputs; medians and their ratio are printed, as JSON too
with ``--json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramfx

SYSTEMS = ("plain", "gramfx")


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """3072-512-512-10, 64 samples."""
    layers = (nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return nn.Sequential(*layers), torch.randn(64, 3072), torch.randint(10, (64,))


def convolutions() -> tuple[nn.Module, Tensor, Tensor]:
    """Three convolutions and a linear layer on 32 x 32 images, 32 samples."""
    widths = (3, 32, 64, 64)
    layers = [
        layer
        for a, b in itertools.pairwise(widths)
        for layer in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    ]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))
    return net, torch.randn(32, 3, 32, 32), torch.randint(10, (32,))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {"mlp": mlp, "convolutions": convolutions}


def losses(output: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy a sample."""
    return F.cross_entropy(output, labels, reduction="none")


def measure(model: str, system: str, runs: int) -> float:
    """Median seconds of one run after one that is not counted."""
    torch.manual_seed(0)
    net, inputs, labels = MODELS[model]()
    step = gramfx.transform(net, losses, compile=False)

    def plain() -> None:
        losses(net(inputs), labels).sum().backward()

    def ours() -> None:
        step(inputs, targets=labels)

    run = plain if system == "plain" else ours
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def in_own_process(model: str, system: str, runs: int) -> float:
    """:func:`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.step", "--only", model, system, "--runs", str(runs)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", nargs=2, metavar=("MODEL", "SYSTEM"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(measure(*given.only, given.runs))
        return
    rows = []
    for model in MODELS:
        seconds = {system: in_own_process(model, system, given.runs) for system in SYSTEMS}
        rows.append({"model": model, **seconds, "ratio": seconds["gramfx"] / seconds["plain"]})
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['model']:14} plain {row['plain']:.4f} s   gramfx {row['gramfx']:.4f} s   ratio {row['ratio']:.2f}")


if __name__ == "__main__":
    main()
