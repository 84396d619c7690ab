"""The largest batch that fits in a memory of a given size: ``python -m benchmarks.batch``.

Nothing is run: the memory profile of both graphs is torch's own
(``torch._inductor.fx_passes.memory_estimator``). Parameters, inputs and, for plain forward and backward, the
parameters' gradients count. A batch for which no plan keeps gramfx's default budget does not fit.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.fx_passes import memory_estimator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import gramfx
from benchmarks.common import Benchmark, Row, as_is, own_process, ratio, verdict
from benchmarks.models import MODELS, workload
from gramfx.errors import MemoryBudgetError
from gramfx.fitting import replanned
from gramfx.graph import placeholders
from gramfx.regimes import largest
from gramfx.sketch import evaluated

#: Where the search for the largest batch begins, and where the graph with a symbolic batch is captured.
FIRST, CAPTURED = 8, (4, 6)
#: The least share of the plain batch size wanted.
LEAST_SHARE = {"alexnet": 0.9}


def peak(run: Callable[..., Any], arguments: Sequence[Any]) -> int:
    """The most bytes alive at once when ``run`` is called with fakes; what it is given stays alive."""
    traced = make_fx(run, tracing_mode="fake")(*arguments)
    traced.graph.eliminate_dead_code()
    with mock.patch.object(memory_estimator, "device_filter", lambda device: True):
        return max(memory_estimator.build_memory_profile(traced.graph, lambda node: node.op != "placeholder"))


def plain_peak(model: str, batch: int) -> int:
    """Of losses and the gradients of their sum."""
    with FakeTensorMode():
        held = workload(model, batch)
    learned, buffers = dict(held.model.named_parameters()), dict(held.model.named_buffers())

    def forward_backward(
        parameters: dict[str, Tensor], others: dict[str, Tensor], inputs: tuple[Tensor, ...], targets: Tensor
    ) -> list[Tensor]:
        losses = held.objective(functional_call(held.model, {**parameters, **others}, inputs), targets)
        return [losses.detach(), *torch.autograd.grad(losses.sum(), list(parameters.values()))]

    return peak(forward_backward, (learned, buffers, held.inputs, held.targets))


def our_peak(model: str) -> Callable[[int], int]:
    """Of objectives and Gramian, captured once, and planned for each batch size."""
    sized = [workload(model, size) for size in CAPTURED]
    step = gramfx.transform(sized[0].model, sized[0].objective, compile=False, dynamic=True)
    for held in sized:
        step.capture(*held.inputs, targets=held.targets)
    captured = step._last
    assert captured is not None and not captured.static

    def planned(batch: int) -> int:
        lowered = replanned(captured.lowering, batch, step._planning).stages["lowered"]
        inputs = [node.meta["val"] for node in placeholders(lowered)]
        with FakeTensorMode():
            # Made anew, since views in the lowered graph's own fakes do not share memory.
            fakes = [torch.empty([evaluated(size, batch) for size in one.shape], dtype=one.dtype) for one in inputs]
        return peak(lowered, fakes)

    return planned


def largest_batch(model: str, system: str, limit: int) -> int | None:
    """By doubling and halving; ``None`` where even the first size is too large."""
    peaks = partial(plain_peak, model) if system == "plain" else our_peak(model)

    def fits(batch: int) -> bool:
        try:
            return peaks(batch) <= limit
        except MemoryBudgetError:
            # The budget is the default one: what it refuses is not to be had either.
            return False

    return largest(fits, FIRST) if fits(FIRST) else None


def rows(options: Namespace, model: str) -> list[Row]:
    """One model, both systems."""
    limit = int(options.limit * 2**30)
    found: dict[str, Any] = {
        system: own_process("batch", "largest", model=model, system=system, limit=limit)
        for system in ("plain", "gramfx")
    }
    row: Row = {"case": model, "GiB": options.limit, **found}
    if None in found.values():
        return [row]
    row["share"] = found["gramfx"] / found["plain"]
    least = LEAST_SHARE.get(model)
    return [row if least is None else {**row, "least": least, "kept": row["share"] >= least}]


def add_options(parser: ArgumentParser) -> None:
    """What this benchmark alone can be told."""
    parser.add_argument("--limit", type=float, default=8, help="GiB")


BENCHMARK = Benchmark(
    name="batch",
    about=__doc__,
    cases=("alexnet", *(name for name in MODELS if name != "alexnet")),
    columns={"GiB": as_is, "plain": as_is, "gramfx": as_is, "share": ratio, "least": as_is, "kept": verdict},
    rows=rows,
    jobs={"largest": largest_batch},
    quick=("--models", "mlp", "--limit", "0.02"),
    options=add_options,
)

if __name__ == "__main__":
    BENCHMARK.main()
