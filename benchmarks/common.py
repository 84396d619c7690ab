"""What the benchmarks share: processes of their own, medians, tables, command lines."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Row = dict[str, Any]
#: Fewer runs than this give no median worth printing.
LEAST_RUNS = 5
#: More bytes than any plan needs.
UNLIMITED = 2**50


class MeasurementFailed(RuntimeError):
    """A measurement's process failed; the message is what it wrote, ``reason`` its error alone."""

    def __init__(self, written: str) -> None:
        super().__init__(written)
        lines = written.splitlines() or ["no message"]
        # A traceback is indented but for its first line and the error.
        starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
        self.reason = " ".join(" ".join(lines[starts[-1] if starts else -1 :]).split())


def own_process(
    module: str, job: str, env: Mapping[str, str] | None = None, *, seconds: float | None = None, **given: Any
) -> Any:
    """What ``job`` of ``benchmarks.<module>`` returns for these arguments, from a process of its own.

    seconds: how long it may take.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", "--only", job, json.dumps(given)]
    whole = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=whole, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        raise MeasurementFailed(f"TimeoutError: {late.timeout:.0f} seconds were not enough") from late
    if done.returncode:
        raise MeasurementFailed(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def alternated(
    module: str, systems: Mapping[str, Row], rounds: int, env: Mapping[str, str] | None = None
) -> dict[str, Row]:
    """Job ``timed`` for each system in turn, in several rounds, so that a slow minute of the machine meets them all.

    ``seconds`` of a system is the median of all its runs; whatever else the job returns is that of the first round.
    """
    found: dict[str, list[Row]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, given in systems.items():
            found[name].append(own_process(module, "timed", env, **given))
    return {name: {**rows[0], "seconds": median(rows)} for name, rows in found.items()}


def median(rows: Sequence[Row]) -> float:
    """The median of all runs in all rows."""
    return statistics.median(seconds for row in rows for seconds in row["seconds"])


def timed(run: Callable[[], object], runs: int, device: str) -> Row:
    """Seconds of the first call, and of each of ``runs`` after it."""
    return timed_in_turn({"": run}, runs, device)[""]


def timed_in_turn(systems: Mapping[str, Callable[[], object]], runs: int, device: str) -> dict[str, Row]:
    """:func:`timed` for several in one process, in turn, each turn in another order: one finds what another left."""

    def seconds(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - start

    found: dict[str, Row] = {name: {"first": seconds(run), "seconds": []} for name, run in systems.items()}
    order, shuffled = list(systems), random.Random(0)
    for _ in range(runs):
        shuffled.shuffle(order)
        for name in order:
            found[name]["seconds"].append(seconds(systems[name]))
    return found


# ---------------------------------------------------------------- what columns show


def as_is(value: object) -> str:
    """The value itself."""
    return str(value)


def mebibytes(value: float) -> str:
    """A number of bytes."""
    return f"{value / 2**20:.2f} MiB"


def milliseconds(value: float) -> str:
    """A number of seconds."""
    return f"{1000 * value:.2f} ms"


def ratio(value: float) -> str:
    """How many times as much."""
    return f"{value:.2f}x"


def percent(value: float) -> str:
    """A share of one, with its sign."""
    return f"{100 * value:+.2f} %"


def verdict(value: bool) -> str:
    """Whether a limit was kept."""
    return "pass" if value else "FAIL"


def table(rows: Sequence[Row], columns: Mapping[str, Callable[[Any], str]]) -> str:
    """Lines with columns in line; ``-`` where a row has no such value, no column where none has."""
    shown = {key: show for key, show in columns.items() if any(row.get(key) is not None for row in rows)}
    cells = [[*shown]]
    cells += [["-" if row.get(key) is None else show(row[key]) for key, show in shown.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in cells)
    )


# ---------------------------------------------------------------- command lines


@dataclass(frozen=True)
class Benchmark:
    """One command: its module's name and docstring, what it can be run on, and how.

    ``rows``: from the options and one name out of ``cases`` to rows of the table. ``jobs``: what runs in processes of
    its own, by name. ``options`` adds arguments of its own; ``quick`` are arguments for a smoke test. ``summary``: one
    more row, made from all others. ``finish`` is called with the options and all rows.
    """

    name: str
    about: str
    cases: tuple[str, ...]
    columns: Mapping[str, Callable[[Any], str]]
    rows: Callable[[Namespace, str], list[Row]]
    jobs: Mapping[str, Callable[..., Any]]
    quick: tuple[str, ...]
    options: Callable[[ArgumentParser], None] = lambda parser: None
    summary: Callable[[Sequence[Row]], Row] = lambda rows: {}
    finish: Callable[[Namespace, Sequence[Row]], None] = lambda options, rows: None

    def parsed(self, arguments: Sequence[str] | None = None) -> Namespace:
        """The options that a command line gives; the process's own by default."""
        raw = argparse.RawDescriptionHelpFormatter
        parser = ArgumentParser(prog=f"benchmarks.{self.name}", description=self.about, formatter_class=raw)
        parser.add_argument("--runs", type=_runs, default=7, help="runs of each system, at least 5")
        parser.add_argument("--models", nargs="+", choices=self.cases, default=list(self.cases), metavar="NAME")
        parser.add_argument("--device", default="cpu")
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
        parser.add_argument("--only", nargs=2, metavar=("JOB", "ARGUMENTS"), help=argparse.SUPPRESS)
        self.options(parser)
        return parser.parse_args(arguments)

    def run(self, options: Namespace) -> Row:
        """All rows, and the summary. A case whose process failed has its error for a row."""
        rows: list[Row] = []
        for case in options.models:
            print(f"{self.name}: {case} ...", file=sys.stderr, flush=True)
            try:
                rows += self.rows(options, case)
            except MeasurementFailed as failure:
                print(failure, file=sys.stderr)
                rows.append({"case": case, "failed": failure.reason})
        measured = [row for row in rows if "failed" not in row]
        self.finish(options, measured)
        return {"rows": rows, "summary": self.summary(measured) if measured else {}}

    def text(self, found: Row) -> str:
        """A table, and the summary below it."""
        lines = [table(found["rows"], {"case": as_is, **self.columns, "failed": as_is})]
        return "\n".join(lines + [f"{key}: {value}" for key, value in found["summary"].items()])

    def main(self) -> None:
        """Do as the command line says; the exit status says whether a process failed."""
        options = self.parsed()
        if options.only:
            job, arguments = options.only
            print(json.dumps(self.jobs[job](**json.loads(arguments))))
            return
        found = self.run(options)
        print(json.dumps(found, indent=1) if options.json else self.text(found))
        sys.exit(any("failed" in row for row in found["rows"]))


def _runs(given: str) -> int:
    if int(given) < LEAST_RUNS:
        raise argparse.ArgumentTypeError(f"at least {LEAST_RUNS}")
    return int(given)


def add_rounds(parser: ArgumentParser) -> None:
    """``--rounds``, for benchmarks that alternate between systems."""
    parser.add_argument("--rounds", type=int, default=3, help="how often to go through the systems")


def add_batch(parser: ArgumentParser) -> None:
    """``--batch``, for benchmarks of whole models."""
    parser.add_argument("--batch", type=int, help="batch size, each model's own by default")
