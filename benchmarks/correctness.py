"""Who computes exact Gramians in which situation: ``python -m benchmarks.correctness``.

Peers are installed by ``pip install '.[bench,peers]'``. Each cell is a process of its own and compares with one
backward pass of autograd per objective, in float64:

  ✓         exact
  W 3e-01   silently wrong, by this relative error
  W 3e-01*  the same where the system's documentation excludes the situation
  warned    wrong, and a warning of the system says so
  refused   an error of the system that names the trouble
  E ...     another error (MissingGradient: a parameter was left without its gradients), or the time limit
  -         not installed

†: objectives depend on other samples, which per-sample gradients by their nature exclude. Ghost norms are compared with
the Gramian's diagonal. The exit status is 1 where gramfx is not exact.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import Row, as_is, table
from benchmarks.correctness_rows import SITUATIONS
from benchmarks.correctness_systems import SEED, SYSTEMS, reference
from benchmarks.models import Workload

#: What every process has loaded already when it starts.
PRELOADED = ["benchmarks.correctness_rows", "benchmarks.correctness_systems"]

#: Systems that promise exact Gramians where objectives depend on other samples.
COUPLED = {"gramfx", "torchjd-unbatched"}
#: Seconds that a process has to end after its answer.
LAST_WORDS = 2


def built(row: str) -> Workload:
    """A situation, the same at every call."""
    torch.manual_seed(0)
    return SITUATIONS[row].build()


def compared(got: Tensor, want: Tensor) -> float:
    """The largest error relative to the largest entry; against the diagonal where there is no more."""
    want = want if got.dim() == 2 else want.diagonal()
    if got.shape != want.shape:
        return math.inf
    return ((got.detach().double() - want).abs().max() / want.abs().max()).item()


def expected(row: str) -> Tensor:
    """The Gramian by autograd, with nothing left behind for the system that comes next."""
    found = reference(built(row))
    torch.compiler.reset()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return found


def measured(row: str, system: str) -> Row:
    """One cell, in this process."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    want, held = expected(row), built(row)
    torch.manual_seed(SEED)
    try:
        with warnings.catch_warnings(record=True) as said:
            error = compared(SYSTEMS[system].solve(held), want)
    except Exception as problem:
        status = "refused" if SYSTEMS[system].refuses(problem) else "error"
        return {"status": status, "class": type(problem).__name__, "message": str(problem)}
    return judged(row, system, error, {str(one.message) for one in said})


def judged(row: str, system: str, error: float, said: set[str]) -> Row:
    """One cell, from the relative error, which may be no number, and the warnings."""
    used, situation = SYSTEMS[system], SITUATIONS[row]
    if error <= situation.limit:
        return {"status": "exact", "error": error}
    warned = used.caveat is not None and any(used.caveat in one for one in said)
    excluded = row in used.excluded or (situation.coupled and system not in COUPLED)
    return {
        "status": "warned" if warned else "wrong",
        "error": error,
        "excluded": excluded,
        "warnings": sorted(said),
    }


def answer(row: str, system: str, sender: Connection) -> None:
    """What a process of its own does."""
    sender.send(measured(row, system))
    sender.close()


def cell(row: str, system: str, timeout: float) -> Row:
    """One cell, from a process of its own that is ended after ``timeout`` seconds."""
    if find_spec(SYSTEMS[system].package) is None:
        return {"status": "absent"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(row, system, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout):
            return receiver.recv()
        return {"status": "error", "class": "timeout", "message": f"no answer after {timeout} s"}
    except EOFError:
        return {"status": "error", "class": "crash", "message": "the process ended without an answer"}
    finally:
        process.join(LAST_WORDS)
        process.kill()
        process.join()


def shown(found: Row) -> str:
    """A cell of the table."""
    if found["status"] == "wrong":
        return f"W {found['error']:.0e}" + ("*" if found["excluded"] else "")
    if found["status"] == "error":
        return f"E {found['class']}"
    return {"exact": "✓", "warned": "warned", "refused": "refused", "absent": "-"}[found["status"]]


def version(distribution: str) -> str | None:
    """The installed one, if any."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def matrix(rows: Sequence[str], systems: Sequence[str], timeout: float) -> Row:
    """All cells, and the versions of all systems."""
    found: list[Row] = []
    for row in rows:
        print(f"{row} ...", file=sys.stderr, flush=True)
        cells = {system: cell(row, system, timeout) for system in systems}
        found.append({"case": row, "coupled": SITUATIONS[row].coupled, "cells": cells})
    versions = {system: version(SYSTEMS[system].distribution) for system in systems}
    return {"torch": torch.__version__, "versions": versions, "rows": found}


def text(found: Row) -> str:
    """The matrix, and what gramfx says where it is not exact."""
    lines = []
    for row in found["rows"]:
        name = row["case"] + (" †" if row["coupled"] else "")
        lines.append({"": name, **{system: shown(one) for system, one in row["cells"].items()}})
    columns = {"": as_is, **dict.fromkeys(found["versions"], as_is)}
    said = [f"{row['case']}: {row['cells']['gramfx'].get('message', 'wrong')}" for row in inexact(found)]
    return "\n\n".join([table(lines, columns), *said])


def inexact(found: Row) -> list[Row]:
    """The rows where gramfx was asked and was not exact."""
    return [row for row in found["rows"] if row["cells"].get("gramfx", {"status": "exact"})["status"] != "exact"]


def parsed() -> Namespace:
    """The options of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.correctness", description=__doc__, formatter_class=raw)
    parser.add_argument("--only", nargs="+", choices=SITUATIONS, default=list(SITUATIONS), metavar="ROW")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM")
    parser.add_argument("--output", type=Path, help="a JSON file of all cells, with errors and messages")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each cell")
    return parser.parse_args()


def main() -> None:
    """Print the matrix."""
    options = parsed()
    found = matrix(options.only, options.systems, options.timeout)
    print(text(found))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(inexact(found)))


if __name__ == "__main__":
    main()
