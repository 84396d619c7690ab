"""All figures for one GPU, in eight minutes at a time: ``python -m benchmarks.gpu``.

Exactness against autograd; then AlexNet (128 images), ``nn.Transformer`` (256 samples) and a tied language model of the
size of GPT-2 small (16 samples of 256 tokens), none with dropout in its attention: time and peak memory of a whole step
of Jacobian descent against plain training and, but for the last, against the same step by TorchJD, where that is
installed, op by op and compiled; the largest batch in 16 GiB; and the rate of the kernel of pairwise products, where
there is one.

Each system runs in a process of its own. Results are kept in the file named by ``--output``: what the time did not
suffice for is made when the same command is run again. ``--dry`` makes everything in tiny sizes on the CPU, to see that
it runs; the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import gramfx
from benchmarks.common import (
    LEAST_RUNS,
    MeasurementFailed,
    Row,
    as_is,
    mebibytes,
    milliseconds,
    own_process,
    ratio,
    table,
)
from benchmarks.gpu_jobs import JOBS
from benchmarks.models import LARGE

SYSTEMS = ("plain", "gramfx", "torchjd")
#: A peer takes each tensor that a module is given for a batch, also the mask and the places that samples share.
REFUSED = {("gpt2", "torchjd")}
#: The memory that the largest batch has to fit in.
LIMIT, DRY_LIMIT = 16 * 2**30, 2**20
#: The largest relative errors of what is exact, in double precision and in float32.
ERRORS = {False: 1e-8, True: 1e-3}
#: Under this many seconds no part is begun.
LEAST_SECONDS = 15


@dataclass(frozen=True)
class Part:
    """One process: a job and its arguments. ``key`` names it in the file."""

    key: str
    job: str
    given: Row


def parts(models: Sequence[str], dry: bool, systems: Sequence[str], runs: int, eager: bool) -> Iterator[Part]:
    """All of them, what matters most first: compiling takes minutes, and comes last."""
    device = "cpu" if dry else "cuda"
    where: Row = {"tiny": dry, "device": device}
    for model in models:
        yield Part(f"exactness {model}", "exactness", {"model": model, "compiled": False, "device": device})
    yield Part("kernel", "kernel", {**where, "runs": runs})
    for model in models:
        for system in (one for one in systems if (model, one) not in REFUSED):
            given = {"model": model, "system": system, "compiled": False, **where, "runs": runs}
            yield Part(f"speed {model} {system}", "speed", given)
    for model in models:
        for system in systems[:2]:
            given = {"model": model, "system": system, **where, "limit": DRY_LIMIT if dry else LIMIT}
            yield Part(f"largest {model} {system}", "largest", given)
    for model in () if eager else models:
        for system in systems[:2]:
            given = {"model": model, "system": system, "compiled": True, **where, "runs": runs}
            yield Part(f"speed {model} {system} compiled", "speed", given)
        yield Part(f"exactness {model} compiled", "exactness", {"model": model, "compiled": True, "device": device})


@dataclass
class Kept:
    """Results in a file; those of another device or torch are not this run's."""

    path: Path
    about: Row
    found: Row = field(default_factory=dict)

    def __post_init__(self) -> None:
        held = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.found = held.get("found", {}) if held.get("about") == self.about else {}

    def add(self, key: str, result: Any) -> None:
        """Write one more."""
        self.found[key] = result
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps({"about": self.about, "found": self.found}, indent=1) + "\n")
        part.replace(self.path)


def run(wanted: Sequence[Part], kept: Kept, minutes: float) -> list[str]:
    """Make what is not there yet, as long as time allows; returns what was left."""
    end = time.monotonic() + 60 * minutes
    missing = [part for part in wanted if part.key not in kept.found]
    with tempfile.TemporaryDirectory() as folder:
        environment = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
        for number, part in enumerate(missing):
            left = end - time.monotonic()
            if left < LEAST_SECONDS:
                return [one.key for one in missing[number:]]
            print(f"gpu: {part.key} ...", file=sys.stderr, flush=True)
            try:
                kept.add(part.key, own_process("gpu", part.job, environment, seconds=left, **part.given))
            except MeasurementFailed as failure:
                print(failure, file=sys.stderr)
                # What only lacked time is tried again by the next run.
                if "TimeoutError" not in failure.reason:
                    kept.add(part.key, {"failed": failure.reason})
    return [part.key for part in wanted if part.key not in kept.found]


# ---------------------------------------------------------------- tables


def tables(found: Mapping[str, Any]) -> str:
    """What was found, by question."""
    questions: dict[str, tuple[list[Row], Columns]] = {
        "exactness": ([_exactness(found, *one) for one in _pairs()], EXACTNESS),
        "speed": ([_speed(found, model) for model in LARGE], SPEED),
        "memory": ([_memory(found, model) for model in LARGE], MEMORY),
        "kernel": ([{"case": "pairwise_gram", **(found.get("kernel") or {})}], KERNEL),
    }
    shown = {}
    for name, (rows, columns) in questions.items():
        known = [row for row in rows if any(row.get(key) is not None for key in columns if key != "case")]
        if known:
            shown[name] = table(known, columns)
    return "\n\n".join(f"{name}\n{text}" for name, text in shown.items())


def scientific(value: float) -> str:
    """A relative error."""
    return f"{value:.1e}"


def teraflops(value: float) -> str:
    """A rate."""
    return f"{value / 1e12:.3g} Tflop/s"


def whether(value: bool) -> str:
    """Yes or no."""
    return "yes" if value else "NO"


Columns = dict[str, Callable[[Any], str]]
WAYS = ("", " compiled")
EXACTNESS: Columns = {"case": as_is, "gramian": scientific, "gradient": scientific, "exact": whether, "failed": as_is}
SPEED: Columns = {
    **{"case": as_is, "batch": as_is},
    **{system + way: milliseconds for way in WAYS for system in SYSTEMS},
    **{"ratio": ratio, "gain": ratio},
    **{f"first gramfx{way}": milliseconds for way in WAYS},
    "failed": as_is,
}
MEMORY: Columns = {
    "case": as_is,
    **{f"{system}{way} peak": mebibytes for way in WAYS for system in SYSTEMS},
    "peak ratio": ratio,
    **{f"{system} batch": as_is for system in SYSTEMS[:2]},
    **{"share": ratio, "failed": as_is},
}
KERNEL: Columns = {"case": as_is, "kernel": teraflops, "matmul": teraflops, "share": ratio, "failed": as_is}


def _pairs() -> list[tuple[str, bool]]:
    return [(model, compiled) for compiled in (False, True) for model in LARGE]


def _exactness(found: Mapping[str, Any], model: str, compiled: bool) -> Row:
    row: Row = {"case": f"{model}{' compiled' * compiled}"}
    held = found.get(f"exactness {row['case']}", {})
    exact = max(held["gramian"], held["gradient"]) <= ERRORS[compiled] if "gramian" in held else None
    return {**row, **held, "exact": exact}


def _speed(found: Mapping[str, Any], model: str) -> Row:
    """Medians; ratios are of the faster of each system's two ways."""
    held = {f"{s}{way}": found.get(f"speed {model} {s}{way}", {}) for s in SYSTEMS for way in WAYS}
    seconds = {name: statistics.median(one["seconds"]) for name, one in held.items() if "seconds" in one}
    best = {s: min((t for name, t in seconds.items() if name.startswith(s)), default=None) for s in SYSTEMS}
    plain, ours, theirs = (best[system] for system in SYSTEMS)
    row: Row = {"case": model, "batch": held["plain"].get("batch"), **seconds, "failed": _failed(held)}
    row |= {f"first gramfx{way}": held[f"gramfx{way}"].get("first") for way in WAYS}
    return row | {"ratio": _over(ours, plain), "gain": _over(theirs, ours)}


def _memory(found: Mapping[str, Any], model: str) -> Row:
    held = {f"{s}{way} peak": found.get(f"speed {model} {s}{way}", {}) for s in SYSTEMS for way in WAYS}
    row: Row = {"case": model, **{name: one.get("peak") for name, one in held.items()}}
    batches = {f"{s} batch": found.get(f"largest {model} {s}") for s in SYSTEMS[:2]}
    numbers = {name: one for name, one in batches.items() if isinstance(one, int)}
    failed = _failed({name: one for name, one in batches.items() if isinstance(one, dict)})
    row |= {**numbers, "share": _over(numbers.get("gramfx batch"), numbers.get("plain batch")), "failed": failed}
    return row | {"peak ratio": _over(row["gramfx peak"], row["plain peak"])}


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _failed(held: Mapping[str, Row]) -> str | None:
    return "; ".join(f"{name}: {one['failed']}" for name, one in held.items() if "failed" in one) or None


# ---------------------------------------------------------------- command line


def parsed() -> argparse.Namespace:
    """The options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__, formatter_class=raw)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="the JSON file, gpu.json by default")
    parser.add_argument("--minutes", type=float, default=8, help="how long to go on, 8 by default")
    parser.add_argument("--runs", type=int, default=7, help="timed steps of each system, at least 5")
    parser.add_argument("--models", nargs="+", choices=tuple(LARGE), default=list(LARGE), metavar="NAME")
    parser.add_argument("--eager", action="store_true", help="leave the compiled systems out")
    parser.add_argument("--again", action="store_true", help="make what is in the file anew")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    parser.add_argument("--only", nargs=2, metavar=("JOB", "ARGUMENTS"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Do as the command line says; the exit status says whether a part failed, was wrong, or is left."""
    options = parsed()
    if options.only:
        job, arguments = options.only
        print(json.dumps(JOBS[job](**json.loads(arguments))))
        return
    if not options.dry and not torch.cuda.is_available():
        sys.exit("gpu: there is no CUDA device; --dry runs everything in tiny sizes on the CPU")
    name = "dry" if options.dry else torch.cuda.get_device_name()
    if options.again:
        options.output.unlink(missing_ok=True)
    kept = Kept(options.output, {"device": name, "torch": torch.__version__, "gramfx": gramfx.__version__})
    systems = SYSTEMS if find_spec("torchjd") else SYSTEMS[:2]
    wanted = parts(options.models, options.dry, systems, max(LEAST_RUNS, options.runs), options.eager)
    left = run(list(wanted), kept, options.minutes)
    print(tables(kept.found))
    if left:
        print(f"\nleft for another run of the same command: {', '.join(left)}")
    wrong = [one for one in (_exactness(kept.found, *pair) for pair in _pairs()) if one["exact"] is False]
    failed = [one for one in kept.found.values() if isinstance(one, dict) and "failed" in one]
    sys.exit(bool(left or wrong or failed))


if __name__ == "__main__":
    main()
