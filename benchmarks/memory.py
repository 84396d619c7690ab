"""Peak memory and flops of objectives and Gramian against plain forward and backward: ``python -m benchmarks.memory``.

Bytes above parameters and inputs, by the allocator itself, and the growth of the process's resident memory beside it;
then what the plan predicted, relative to what was measured.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import gramfx
from benchmarks.common import Benchmark, Row, add_batch, as_is, mebibytes, own_process, percent, ratio, verdict
from benchmarks.models import MODELS, workload

#: The most bytes wanted, in terms of a plain forward and backward, or in all.
LARGEST_RATIO = {"alexnet": 1.1, "transformer": 1.1, "lm": 1.2}
LARGEST_PEAK = {"mlp": 16 * 2**20}
#: The largest errors wanted of the predictions.
PEAK_ERROR, FLOPS_ERROR = 0.15, 0.05
#: Has the C library give memory back at once, so that what is resident is what is in use.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def measured(model: str, system: str, batch: int | None, device: str, runs: int) -> Row:
    """Peaks and flops of one system, and the plan's predictions."""
    held = workload(model, batch, device)
    step = gramfx.transform(held.model, held.objective, compile=False)

    def ours() -> None:
        step(*held.inputs, targets=held.targets)

    run = held.plain if system == "plain" else ours
    run()

    def median(measure: Callable[[], int]) -> float:
        found = []
        for _ in range(runs):
            held.model.zero_grad(set_to_none=True)
            found.append(measure())
        return statistics.median(found)

    row: Row = {"peak": median(lambda: allocated(run, device))}
    row["resident"] = median(lambda: resident(run)) if _CLEAR.exists() else None
    with FlopCounterMode(display=False) as counter:
        run()
    totals = None if system == "plain" else step.plan.totals
    predicted = {} if totals is None else {name: getattr(totals, name) for name in totals.__dataclass_fields__}
    return {**row, "flops": counter.get_total_flops(), "predicted": predicted}


def allocated(run: Callable[[], object], device: str) -> int:
    """The most bytes that the allocator of tensors gave out at once."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return int(torch.cuda.max_memory_allocated() - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    recorded = profiled.profiler
    assert recorded is not None and recorded.kineto_results is not None
    alive = most = 0
    for event in sorted(recorded.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


def resident(run: Callable[[], object]) -> int:
    """How far the process's resident memory rose."""
    _CLEAR.write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def rows(options: Namespace, model: str) -> list[Row]:
    """One model, both systems."""
    given = {"model": model, "batch": options.batch, "device": options.device, "runs": options.runs}
    plain, ours = (own_process("memory", "measured", GIVE_BACK, system=s, **given) for s in ("plain", "gramfx"))
    said = ours["predicted"]
    row = {
        "case": model,
        "plain": plain["peak"],
        "gramfx": ours["peak"],
        "ratio": ours["peak"] / plain["peak"],
        "plain rss": plain["resident"],
        "gramfx rss": ours["resident"],
        "peak error": said["peak"] / ours["peak"] - 1,
        "plain peak error": said["plain_peak"] / plain["peak"] - 1,
        "flops": ours["flops"] / plain["flops"],
        "flops error": said["flops"] / ours["flops"] - 1,
        "plain flops error": said["plain_flops"] / plain["flops"] - 1,
    }
    peak_kept = row["ratio"] <= LARGEST_RATIO.get(model, 1e9) and row["gramfx"] <= LARGEST_PEAK.get(model, 2**63)
    predicted = abs(row["peak error"]) <= PEAK_ERROR and abs(row["flops error"]) <= FLOPS_ERROR
    return [{**row, "limit": _limit(model), "memory": peak_kept, "predictions": predicted}]


def _limit(model: str) -> str:
    return mebibytes(LARGEST_PEAK[model]) if model in LARGEST_PEAK else ratio(LARGEST_RATIO[model])


BENCHMARK = Benchmark(
    name="memory",
    about=__doc__,
    cases=tuple(MODELS),
    columns={
        **dict.fromkeys(("plain", "gramfx"), mebibytes),
        **{"ratio": ratio, "limit": as_is, "memory": verdict},
        **dict.fromkeys(("plain rss", "gramfx rss"), mebibytes),
        **{"peak error": percent, "flops error": percent, "predictions": verdict},
        **{"plain peak error": percent, "plain flops error": percent, "flops": ratio},
    },
    rows=rows,
    jobs={"measured": measured},
    quick=("--models", "mlp", "--runs", "5"),
    options=add_batch,
)

if __name__ == "__main__":
    BENCHMARK.main()
