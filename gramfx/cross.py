"""What Inductor makes of a step's programs, for a device that need not be there."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator

import torch
from torch.fx import GraphModule

from gramfx.api import Step
from gramfx.cuda_compat import Written, cubin, has_triton, kernels_of, on_cuda, pretended, written
from gramfx.errors import InputError
from gramfx.fitting import replanned
from gramfx.graph import placeholders, value
from gramfx.pipeline import hint_of
from gramfx.runtime import gradient_graph
from gramfx.torch_compat import fake_batch_size

#: The compute capability that code is written for where there is no device: a data-centre GPU's.
CAPABILITY = 90


def programs(step: Step) -> dict[str, GraphModule]:
    """The graphs that a captured step compiles, by what they compute, planned as they are for a compiler."""
    size = fake_batch_size(step.lowering.stages["canonical"])
    planning = dataclasses.replace(step._planning, compiled=True)
    planned = replanned(step.lowering, hint_of(1 if size is None else size), planning)
    found = {"objectives and Gramian": planned.stages["lowered"], "gradient": gradient_graph(planned)}
    return {name: graph_module for name, graph_module in found.items() if graph_module is not None}


def sources(step: Step, device: str) -> dict[str, Written]:
    """What Inductor writes for each of a captured step's programs on a device.

    For CUDA without a CUDA device, graphs that were captured and planned on the CPU are moved, and what Inductor finds
    out by running (whether to pad a product, which tiles are fastest) is left open.
    Raises :class:`InputError` without triton, which CUDA's kernels are written for.
    """
    found = programs(step)
    random = bool(step.lowering.draws)
    with target(device):
        return {name: written(_on(device, one), random=random) for name, one in found.items()}


def cubins(source: str, capability: int = CAPABILITY) -> dict[str, bytes]:
    """The Triton kernels in what Inductor wrote, as machine code for a compute capability, by name.

    Each in the first of the ways that Inductor would try on the device.
    """
    with target("cuda", capability):
        return {name: cubin(name, kernel, capability) for name, kernel in kernels_of(source).items()}


@contextlib.contextmanager
def target(device: str, capability: int = CAPABILITY) -> Iterator[None]:
    """In which code for a device can be written; a CUDA device that is not there is pretended."""
    if device == "cuda" and not has_triton():
        raise InputError("Inductor writes CUDA kernels for triton, which is not installed", remedy="pip install triton")
    pretend = device == "cuda" and not torch.cuda.is_available()
    with warnings.catch_warnings():
        # Inductor and triton warn about torch, themselves, and settings of a device that nothing runs on.
        warnings.simplefilter("ignore")
        with pretended(capability) if pretend else contextlib.nullcontext():
            yield


def _on(device: str, graph_module: GraphModule) -> GraphModule:
    inputs = [value(node) for node in placeholders(graph_module)]
    there = any(one.device.type == device for one in inputs)
    return graph_module if there or device == "cpu" else on_cuda(graph_module)
