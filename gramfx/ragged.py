"""Jagged nested tensors as plain ones: the rows of all samples, and offsets that say where each sample's begin.

A program takes the two apart, and puts the nested tensor together inside; below it torch runs ATen ops on plain
tensors. Two of these, from rows to a padded batch and back, have no derivative in torch. Here they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from gramfx.errors import UnsupportedError
from gramfx.torch_compat import JaggedParts, jagged_from, jagged_parts

aten = torch.ops.aten


@dataclass(frozen=True)
class Jagged:
    """In place of a nested tensor among the leaves of a call.

    ``offsets``: which of the call's distinct offsets it has; ``dim``: its ragged dim; the lengths of its shortest and
    longest sample, which a graph has baked in.
    """

    offsets: int
    dim: int
    shortest: int
    longest: int

    def rebuilt(self, values: Tensor, offsets: Sequence[Tensor]) -> Tensor:
        """The nested tensor."""
        return jagged_from(JaggedParts(values, offsets[self.offsets], self.dim, self.shortest, self.longest))


def refuse_holes(tensor: Tensor) -> JaggedParts:
    """The parts of a nested tensor; an :class:`UnsupportedError` where it is not made of consecutive rows."""
    parts = jagged_parts(tensor)
    if not isinstance(parts, str):
        return parts
    raise UnsupportedError(
        "an input is a nested tensor that is not made of consecutive rows",
        expected="a nested tensor of layout torch.jagged, without holes",
        got=parts,
        remedy="call .contiguous() on a jagged one with holes, make others by torch.nested.nested_tensor(tensors, "
        "layout=torch.jagged), or pad them and pass a mask",
    )


def taken_apart(tensor: Tensor, offsets: list[Tensor]) -> tuple[Jagged, Tensor]:
    """What stands for a nested tensor, and its rows; offsets that are not in the list yet are added."""
    parts = refuse_holes(tensor)
    # Nested tensors can only meet if they share the very tensor of their offsets.
    index = next((i for i, one in enumerate(offsets) if one is parts.offsets), len(offsets))
    if index == len(offsets):
        offsets.append(parts.offsets)
    return Jagged(index, parts.dim, parts.shortest, parts.longest), parts.values


def owners(offsets: Tensor, rows: int) -> Tensor:
    """``[rows]``: the sample that each row belongs to."""
    return torch.bucketize(torch.arange(rows, device=offsets.device), offsets[1:], right=True)


@torch.library.custom_op("gramfx::jagged_to_padded", mutates_args=())
def jagged_to_padded(values: Tensor, offsets: Tensor, longest: int, padding: float) -> Tensor:
    """``[rows, …] -> [samples, longest, …]``: each sample's rows, then padding."""
    return aten._jagged_to_padded_dense_forward(values.contiguous(), [offsets], [longest], padding).contiguous()


@jagged_to_padded.register_fake
def _(values: Tensor, offsets: Tensor, longest: int, padding: float) -> Tensor:
    return values.new_empty((offsets.shape[0] - 1, longest, *values.shape[1:]))


@torch.library.custom_op("gramfx::padded_to_jagged", mutates_args=())
def padded_to_jagged(padded: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """``[samples, longest, …] -> [rows, …]``, the inverse."""
    return aten._padded_dense_to_jagged_forward(padded.contiguous(), [offsets], rows).contiguous()


@padded_to_jagged.register_fake
def _(padded: Tensor, offsets: Tensor, rows: int) -> Tensor:
    return padded.new_empty((rows, *padded.shape[2:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.size = inputs[0].shape[0 if len(inputs) == 4 else 1]


def _padded_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return padded_to_jagged(gradient, ctx.saved_tensors[0], ctx.size), None, None, None


def _jagged_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return jagged_to_padded(gradient, ctx.saved_tensors[0], ctx.size, 0.0), None, None


jagged_to_padded.register_autograd(_padded_backward, setup_context=_save)
padded_to_jagged.register_autograd(_jagged_backward, setup_context=_save)


@jagged_to_padded.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...], values: Tensor, offsets: Tensor, longest: int, padding: float
) -> tuple[Tensor, int]:
    assert in_dims[0] is not None
    return jagged_to_padded(values.movedim(in_dims[0], 1), offsets, longest, padding), 2


@padded_to_jagged.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], padded: Tensor, offsets: Tensor, rows: int) -> tuple[Tensor, int]:
    assert in_dims[0] is not None
    return padded_to_jagged(padded.movedim(in_dims[0], 2), offsets, rows), 1


def with_derivatives(graph_module: GraphModule) -> None:
    """Put the ops above in place of torch's."""
    for node in graph_module.graph.nodes:
        if node.target is aten._jagged_to_padded_dense_forward.default and len(node.args[1]) == 1:
            values, (offsets,), (longest,), *padding = node.args
            node.args = (values, offsets, longest, float(padding[0]) if padding else 0.0)
            node.target = torch.ops.gramfx.jagged_to_padded.default
        elif node.target is aten._padded_dense_to_jagged_forward.default and len(node.args[1]) == 1:
            padded, (offsets,), *_ = node.args
            node.args = (padded, offsets, int(node.meta["val"].shape[0]))
            node.target = torch.ops.gramfx.padded_to_jagged.default
    graph_module.recompile()
