"""Whether gramfx is exact on many architectures: ``python -m benchmarks.zoo``.

Tiny models with random weights in float64, each in a process of its own: the Gramian and ``Jᵀ w`` of a loss per sample
against a loop of autograd over the eager model. Statuses: ``exact``, ``refused`` (an error of gramfx's), ``wrong``,
``crashed`` (any other error), ``timeout``, and
``broken`` where the model itself does not run. Where the model computes in less than float64 on the way from its
parameters to its losses the two agree as far as that allows. Results are appended to a file of JSON lines, and those
that are there are not made again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import gramfx
from benchmarks.common import Row, as_is, table
from benchmarks.zoo_media import MEDIA
from benchmarks.zoo_models import Entry
from benchmarks.zoo_text import TEXTS
from gramfx.api import Step
from gramfx.errors import GramfxError

#: The largest relative errors: of models in float64, and of those that compute in less.
LIMIT, LOW_LIMIT = 1e-10, 1e-5
ENTRIES = (*TEXTS, *MEDIA)
TABLE = {entry.name: entry for entry in ENTRIES}


# ---------------------------------------------------------------- one model, in a process of its own


def reference(entry: Entry, model: nn.Module, call: dict[str, Tensor], targets: tuple[Tensor, ...]) -> list[Tensor]:
    """The rows of the Jacobian, by autograd on the eager model."""
    torch.manual_seed(3)
    losses = entry.objective(model(**call), *targets)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = []
    for loss in losses:
        found = torch.autograd.grad(loss, learned, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([gradient.flatten() for gradient in found]))
    return rows


def relative(got: Tensor, want: Tensor) -> float:
    """``max|got - want| / max|want|``."""
    scale = want.abs().max().item()
    error = (got - want).abs().max().item() / (scale or 1.0)
    return error if error == error else float("inf")


def lowered_precision(graph: GraphModule) -> str:
    """The dtypes below float64 that values are cast to on the way from a parameter, as the captured graph says."""
    learned, found = set(), []
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        behind = [source for source in node.all_input_nodes if source in learned]
        if "parameter" in node.meta or (behind and isinstance(value, Tensor | tuple | list)):
            learned.add(node)
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            continue
        if any(isinstance(of, Tensor) and of.dtype == torch.float64 for of in (s.meta.get("val") for s in behind)):
            found.append(str(value.dtype).removeprefix("torch."))
    return " ".join(dict.fromkeys(found))


def planned(step: Step, model: nn.Module) -> Row:
    """What the plan says: which parameters the fallback serves and why, and how many no loss depends on."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    served = {one.parameter: one.fallback for one in step.plan.contractions}
    fallen = {name: why for name, why in served.items() if why}
    total = sum(sizes.values())
    return {
        **{"parameters": total, "tensors": len(sizes), "nodes": len(step.stage("captured").graph_module.graph.nodes)},
        "fallback elements": sum(sizes[name] for name in fallen) / total,
        "fallback tensors": len(fallen) / len(sizes),
        "fallback reasons": dict(Counter(fallen.values())),
        "unread elements": sum(size for name, size in sizes.items() if name not in served) / total,
        "coupled": any(use.coupled for use in step.lowering.uses),
    }


def compare(entry: Entry, mode: str, row: Row) -> Row:
    """One model: fills ``row`` as far as it gets."""
    model, call = entry.build(mode), entry.call()
    torch.manual_seed(3)
    with torch.no_grad():
        targets = entry.targets(model(**call))
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    rows = torch.stack(reference(entry, model, call, targets))
    row["reference"] = "made"
    step = gramfx.transform(model, entry.objective, compile=False)
    start = time.perf_counter()
    step.capture(**call, targets=targets)
    row["capture s"] = time.perf_counter() - start
    row.update(planned(step, model))
    row["downcasts"] = lowered_precision(step.stage("captured").graph_module)
    torch.manual_seed(3)
    objectives, gramian = step(**call, targets=targets)
    weights = torch.randn(objectives.shape, generator=torch.Generator().manual_seed(4), dtype=objectives.dtype)
    objectives.backward(weights)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    row["G error"] = relative(gramian, rows @ rows.T)
    row["Jᵀw error"] = relative(torch.cat([gradient.flatten() for gradient in gradients]), weights.double() @ rows)
    limit = LOW_LIMIT if row["downcasts"] else LIMIT
    row["status"] = "exact" if max(row["G error"], row["Jᵀw error"]) <= limit else "wrong"
    return row


def examined(name: str, mode: str) -> Row:
    """One row of the results, whatever happens short of the process's end."""
    row: Row = {"case": name, "mode": mode}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            compare(TABLE[name], mode, row)
        except GramfxError as problem:
            row |= {"status": "refused", "error": type(problem).__name__, "message": str(problem)}
        except Exception as problem:
            row |= {"status": "crashed" if "reference" in row else "broken", "error": type(problem).__name__}
            row |= {"message": str(problem)[:2000], "trace": traceback.format_exc().splitlines()[-12:]}
    row["warnings"] = dict(Counter(one.category.__name__ for one in caught))
    row["messages"] = [str(one.message)[:400] for one in caught if issubclass(one.category, UserWarning)][:3]
    return row


# ---------------------------------------------------------------- all of them


def in_process(name: str, mode: str, timeout: float) -> Row:
    """:func:`examined` in a process of its own, which may die or take too long."""
    command = [sys.executable, "-m", "benchmarks.zoo", "--worker", name, "--mode", mode]
    row: Row = {"case": name, "mode": mode}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return row | {"status": "timeout", "message": f"more than {timeout:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return row | {"status": "crashed", "error": f"exit code {done.returncode}", "message": lines[-1]}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def finished(path: Path, mode: str) -> dict[str, Row]:
    """The latest row of each model in the results file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["case"]: row for row in map(json.loads, lines) if row["mode"] == mode}


def chosen(names: Sequence[str] | None) -> list[str]:
    """Entries by name, all of those that can be had without ``names``."""
    libraries = {entry.library for entry in ENTRIES}
    missing = [one for one in libraries if not importlib.util.find_spec(one.partition(".")[0])]
    for library in missing:
        print(f"{library} is not installed: its models are left out", file=sys.stderr)
    return list(names or [entry.name for entry in ENTRIES if entry.library not in missing])


def run(given: argparse.Namespace) -> list[Row]:
    """All rows, those made before included."""
    names = chosen(given.only)
    found = {} if given.again else finished(given.output, given.mode)
    for number, name in enumerate(names, 1):
        if name in found:
            continue
        start = time.perf_counter()
        row = in_process(name, given.mode, given.timeout) | {"seconds": time.perf_counter() - start}
        with given.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"[{number}/{len(names)}] {line(row)}", file=sys.stderr, flush=True)
        found[name] = row
    return [found[name] for name in names]


def line(row: Row) -> str:
    """What became of one model, in a line."""
    errors = " ".join(f"{key} {row[key]:.1e}" for key in ("G error", "Jᵀw error") if key in row)
    return f"{row['case']}: {row['status']} {errors} {short(row.get('message', ''))} ({row['seconds']:.0f} s)"


def short(message: Any) -> str:
    """The first line of a message, and no more than fits into a table."""
    return str(message).strip().partition("\n")[0][:90]


def share(value: float) -> str:
    """A part of one."""
    return f"{100 * value:.1f} %"


def small(value: float) -> str:
    """An error."""
    return f"{value:.0e}"


def text(rows: Sequence[Row]) -> str:
    """The table, the counts of statuses, and what was left out."""
    columns: dict[str, Callable[[Any], str]] = {
        **{"case": as_is, "status": as_is, "G error": small, "Jᵀw error": small, "downcasts": as_is},
        **{"capture s": lambda value: f"{value:.1f}", "parameters": as_is, "coupled": as_is},
        **{"fallback elements": share, "fallback tensors": share, "unread elements": share},
        **{"error": as_is, "message": short},
    }
    counts = Counter(row["status"] for row in rows)
    lines = [table(rows, columns), "", ", ".join(f"{number} {status}" for status, number in counts.most_common())]
    exact = [row for row in rows if row["status"] == "exact"]
    fallen = sum(row["parameters"] * row["fallback elements"] for row in exact)
    if total := sum(row["parameters"] for row in exact):
        lines.append(f"by the fallback: {share(fallen / total)} of the {total} parameters of the exact ones")
    if not importlib.util.find_spec("torchvision"):
        lines.append("torchvision is not installed: its models were left out")
    return "\n".join(lines)


def main() -> None:
    """Do as the command line says; the exit status says whether a result was wrong, or a model crashed."""
    parser = argparse.ArgumentParser(prog="benchmarks.zoo", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(TABLE), metavar="NAME", help="these models alone")
    parser.add_argument("--list", action="store_true", help="names of the models")
    parser.add_argument("--mode", choices=("eval", "train"), default="eval", help="train: without dropout")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one model")
    parser.add_argument("--output", type=Path, default=Path("zoo.jsonl"), help="JSON lines; a .json beside it")
    parser.add_argument("--again", action="store_true", help="make results anew that are in the file")
    parser.add_argument("--worker", choices=sorted(TABLE), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.list:
        print("\n".join(TABLE))
    elif given.worker:
        print(json.dumps(examined(given.worker, given.mode)))
    else:
        rows = run(given)
        print(text(rows))
        summary = {"torch": torch.__version__, "counts": Counter(row["status"] for row in rows), "rows": rows}
        given.output.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
        sys.exit(any(row["status"] in ("wrong", "crashed") for row in rows))


if __name__ == "__main__":
    main()
