"""Regions as nodes of autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

from gramfx.regions import CompiledRegion
from gramfx.torch_compat import autocast_off


class Region(torch.autograd.Function):
    """Runs a compiled region; its backward takes plain gradients."""

    @staticmethod
    def forward(
        ctx: Any, region: CompiledRegion, batch: int | None, tensors: list[Tensor], *wanted: Tensor
    ) -> tuple[Tensor, ...]:
        """The region's outputs; slots that it changes are changed."""
        given = [tensor.detach().contiguous() for tensor in tensors]
        with torch.no_grad(), autocast_off():
            results = region.forward(*given)
        count, mutated = len(region.captured.differentiable), region.captured.mutated
        before = {index: tensors[index].detach().clone() for index in mutated}
        for index, new in zip(mutated, results[count:], strict=False):
            tensors[index].detach().copy_(new)
        outputs = _distinct(results[:count])
        ctx.save_for_backward(
            *(before.get(index, tensor) for index, tensor in enumerate(tensors)), *results[count + len(mutated) :]
        )
        ctx.region, ctx.batch = region, batch
        ctx.like = [(outputs[i].shape, outputs[i].dtype, outputs[i].device) for i in region.seeded]
        ctx.mark_non_differentiable(
            *(o for o, flag in zip(outputs, region.captured.differentiable, strict=True) if not flag)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the wanted slots."""
        region: CompiledRegion = ctx.region
        seeds = [cotangents[index] for index in region.seeded]
        with torch.no_grad(), autocast_off():
            made = iter(region.gradient(*contiguous_all(ctx.saved_tensors), *contiguous_all(seeds)))
        return (None, None, None, *(next(made) if reached else None for reached in region.reached))


def _distinct(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One tensor object an output: autograd gives each its own place."""
    seen: set[int] = set()
    found = []
    for output in outputs:
        found.append(output.clone() if id(output) in seen else output)
        seen.add(id(output))
    return tuple(found)


def contiguous_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Detached, with the strides that compiled programs take for granted."""
    return [tensor.detach().contiguous() for tensor in tensors]


# ---------------------------------------------------------------- what objectives depend on


@dataclass
class Node:
    """A region's node in autograd's graph: the parameters of its wanted inputs, by number, and its edges."""

    ctx: Any
    parameters: dict[int, Tensor]

    @property
    def region(self) -> CompiledRegion:
        """What it runs."""
        region: CompiledRegion = self.ctx.region
        return region

    @property
    def edges(self) -> list[GradientEdge]:
        """Where the cotangents of its outputs arrive."""
        return [GradientEdge(self.ctx, index) for index in self.region.seeded]

    def zeros(self) -> list[Tensor]:
        """Cotangents of outputs that the objectives do not depend on."""
        return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self.ctx.like]

    def names(self, excluded: set[int]) -> frozenset[str]:
        """The names of those of its parameters whose ``id`` is in ``excluded``."""
        wanted = self.region.wanted
        return frozenset(wanted[i].meta["parameter"] for i, p in self.parameters.items() if id(p) in excluded)


def reached_from(objectives: Tensor) -> tuple[list[Node], dict[int, Tensor]]:
    """The regions that objectives were computed from, and the parameters that they reach in no region, by ``id``."""
    nodes: list[Node] = []
    outside: dict[int, Tensor] = {}
    seen: dict[Any, None] = {}
    pending = [objectives.grad_fn]
    while pending:
        current = pending.pop()
        if current is None or current in seen:
            continue
        seen[current] = None
        following = [edge[0] for edge in current.next_functions]
        region = getattr(current, "region", None)
        if isinstance(region, CompiledRegion):
            wanted = following[len(following) - len(region.wanted) :]
            leaves = {i: found for i, fn in enumerate(wanted) if (found := _leaf(fn)) is not None}
            learned = {i: p for i, p in leaves.items() if "parameter" in region.wanted[i].meta}
            nodes.append(Node(current, learned))
            following = [fn for i, fn in enumerate(wanted) if i not in learned]
        elif hasattr(current, "variable") and isinstance(current.variable, nn.Parameter):
            outside[id(current.variable)] = current.variable
        pending.extend(following)
    return nodes, outside


def _leaf(node: Any) -> Tensor | None:
    """The leaf whose gradient arrives at a node of autograd's graph, also where the region sees it as real."""
    if node is not None and node.name() == "ViewAsRealBackward0":
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)
