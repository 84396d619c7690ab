"""All benchmarks, their tables, and one JSON file of what they found: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch

from benchmarks import batch, budget, choice, descent, memory, step
from benchmarks.common import Row

MODULES = (memory, batch, step, descent, budget, choice)


def main() -> None:
    """Run one after the other; the exit status says whether a process failed."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: one small case of each")
    parser.add_argument("--output", type=Path, default=Path("benchmarks.json"), help="the JSON file")
    parser.add_argument("--picture", metavar="PATH", help="an SVG file of time against memory budget")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    found: Row = {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": platform.machine()}
    for module in MODULES:
        one = module.BENCHMARK
        arguments = ["--device", given.device, *(one.quick if given.quick else ())]
        arguments += ["--picture", given.picture] if module is budget and given.picture else []
        found[one.name] = one.run(one.parsed(arguments))
        print(f"\n{one.name}\n{one.text(found[one.name])}", flush=True)
        given.output.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(any("failed" in row for module in MODULES for row in found[module.BENCHMARK.name]["rows"]))


if __name__ == "__main__":
    main()
