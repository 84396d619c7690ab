"""What is different on CUDA: the caching allocator, and kernels that differ from one run to the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

#: torch's allocator gives out multiples of this (``c10/core/AllocatorConfig.h``, ``kMinBlockSize``).
_BLOCK = 512


def allocated(nbytes: int, device: torch.device) -> int:
    """What ``torch.cuda.memory_allocated`` rises by for a tensor of this size; on other devices, its size.

    The allocator takes this from segments of 2 MiB (tensors of up to 1 MiB), 20 MiB (up to 10 MiB) or its own size
    rounded up to 2 MiB; what of these is unused is not counted, since other tensors are put there.
    """
    return -(-nbytes // _BLOCK) * _BLOCK if device.type == "cuda" else nbytes


def cuda_devices(tensors: Iterable[Tensor]) -> list[torch.device]:
    """The CUDA devices that they are on, once each."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type == "cuda"))


@contextlib.contextmanager
def reproducible(devices: list[torch.device]) -> Iterator[None]:
    """Random state as before afterwards; on CUDA, float32 products in full, and attention by its reference path.

    Two programs that compute the same are then as close as on a CPU: TF32, the default of cuDNN, has half the digits,
    and fused attention draws its dropout in an order of its own, which no graph of simpler ops can follow.
    """
    with torch.random.fork_rng(devices), contextlib.ExitStack() as stack:
        if devices:
            stack.enter_context(_full_float32())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    places: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, held in zip(places, before, strict=True):
            place.fp32_precision = held
