"""What :mod:`benchmarks.gpu` runs in processes of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import gramfx
from benchmarks.common import Row, timed
from benchmarks.correctness_systems import reference, trainable
from benchmarks.descent import step_of
from benchmarks.memory import allocated
from benchmarks.models import LARGE, TINY, Workload
from gramfx.errors import GramfxError, MemoryBudgetError

#: How close a search for the largest batch comes: to one part in so many.
PARTS = 16
#: Samples, tokens, inputs and outputs of the linear layer that the kernel's rate is measured on.
LAYER, TINY_LAYER = (64, 64, 768, 3072), (3, 4, 16, 16)
SQUARE, TINY_SQUARE = 8192, 64


def workload(model: str, tiny: bool, device: str, batch: int | None = None) -> Workload:
    """A model, the same at every call."""
    torch.manual_seed(0)
    make = (TINY if tiny else LARGE)[model]
    with torch.device(device):
        return make() if batch is None else make.func(batch, *make.args[1:], **make.keywords)  # type: ignore[attr-defined]


def relative(got: Tensor, want: Tensor) -> float:
    """The largest error, in terms of the largest entry."""
    return float((got.double() - want).abs().max() / want.abs().max())


def exactness(model: str, compiled: bool, device: str) -> Row:
    """Relative errors of Gramian and gradient against autograd, one backward pass an objective, on a tiny model.

    In double precision op by op; compiled, in float32 as it is meant to run, TF32 left out.
    """
    held = workload(model, True, device)
    held.model.eval()
    double = Workload(held.model.double(), tuple(map(_doubled, held.inputs)), _doubled(held.targets), held.objective)
    weights = torch.linspace(-1.0, 2.0, len(held.targets), dtype=torch.float64, device=device)
    gramian = reference(double)
    double.model.zero_grad(set_to_none=True)
    double.losses().backward(weights)
    gradient = _gradient(double)
    double.model.zero_grad(set_to_none=True)
    if compiled:
        held.model.float()
    used = held if compiled else double
    step = gramfx.transform(used.model, used.objective, compile=compiled)
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
        losses, found = step(*used.inputs, targets=used.targets)
        losses.backward(weights.to(losses))
    return {"gramian": relative(found, gramian), "gradient": relative(_gradient(used), gradient)}


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _gradient(held: Workload) -> Tensor:
    parameters = trainable(held.model).values()
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([one.flatten() for one in found]).double()


def speed(model: str, system: str, compiled: bool, tiny: bool, device: str, runs: int) -> Row:
    """Seconds of the first step, of those after it, and the most bytes allocated above parameters and inputs."""
    held = workload(model, tiny, device)
    run = step_of(held, system, compiled)
    row = timed(run, runs, device)
    held.model.zero_grad(set_to_none=True)
    return {**row, "peak": allocated(run, device), "batch": len(held.targets)}


def largest(model: str, system: str, tiny: bool, device: str, limit: int) -> int:
    """The largest batch of which a step, op by op, fits in ``limit`` bytes; 0 where not even one sample does.

    The first step counts, in which gramfx tries a capture against the model.
    """
    if device.startswith("cuda"):
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    fits = partial(_fits, model, system, tiny, device, limit)
    low, high = 0, len(workload(model, tiny, "meta").targets)
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // PARTS):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fits(model: str, system: str, tiny: bool, device: str, limit: int, batch: int) -> bool:
    """A CPU has no limit of its own: what is allocated counts there."""
    try:
        needed = _needed(model, system, tiny, device, batch)
    except (torch.OutOfMemoryError, GramfxError) as problem:
        # A capture that found no memory says so in an error of its own.
        if not isinstance(problem, (torch.OutOfMemoryError, MemoryBudgetError)) and "out of memory" not in str(problem):
            raise
        return False
    finally:
        # What failed is out of scope only now.
        gc.collect()
        torch.cuda.empty_cache()
    return device.startswith("cuda") or needed <= limit


def _needed(model: str, system: str, tiny: bool, device: str, batch: int) -> int:
    held = workload(model, tiny, device, batch)
    run = step_of(held, system, False)
    run()
    return allocated(run, device)


def kernel(tiny: bool, device: str, runs: int) -> Row | None:
    """Rates of ``gramfx::pairwise_gram`` and of a square product, in bfloat16; ``None`` where there is no such op."""
    op = getattr(torch.ops.gramfx, "pairwise_gram", None)
    if op is None:
        return None
    samples, tokens, inputs, outputs = TINY_LAYER if tiny else LAYER
    size = TINY_SQUARE if tiny else SQUARE
    dtype = torch.bfloat16
    act = torch.randn(samples, tokens, inputs, device=device, dtype=dtype)
    cot = torch.randn(samples, tokens, outputs, device=device, dtype=dtype)
    square = torch.randn(size, size, device=device, dtype=dtype)
    pairs, product = (_rate(one, runs, device) for one in (lambda: op(act, cot), lambda: square @ square))
    return {"kernel": pairs, "matmul": product, "share": pairs / product}


def _rate(run: Callable[[], object], runs: int, device: str) -> float:
    """Floating-point operations a second, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        run()
    seconds = timed(run, runs, device)["seconds"]
    return float(counter.get_total_flops() / sorted(seconds)[len(seconds) // 2])


JOBS: dict[str, Callable[..., Any]] = {"exactness": exactness, "speed": speed, "largest": largest, "kernel": kernel}
