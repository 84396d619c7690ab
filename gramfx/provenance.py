"""Which values come from trainable parameters alone, and which have seen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gramfx.graph import placeholders, value
from gramfx.torch_compat import pytree, same_size

_STOPS = {torch.ops.aten.detach.default}


@dataclass(frozen=True)
class Provenance:
    """``parameter_values``: differentiable values computed from parameters and constants alone.

    ``data``: values that depend on the samples, or on a random draw, which no later pass may repeat.
    """

    parameter_values: frozenset[Node]
    data: frozenset[Node]


#: Ops that draw random numbers only where this argument is not zero.
_DROPOUT_ARGUMENT = {
    torch.ops.aten.scaled_dot_product_attention.default: (4, "dropout_p"),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (3, "dropout_p"),
    torch.ops.aten._scaled_dot_product_flash_attention.default: (3, "dropout_p"),
    torch.ops.aten._scaled_dot_product_efficient_attention.default: (5, "dropout_p"),
}


def is_random(node: Node) -> bool:
    """Whether running the node twice gives two results."""
    if node.target in _DROPOUT_ARGUMENT:
        position, name = _DROPOUT_ARGUMENT[node.target]
        return bool(node.args[position] if len(node.args) > position else node.kwargs.get(name))
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def differentiable(held: Any) -> bool:
    """Whether a fake value can carry a gradient."""
    leaves = pytree.tree_leaves(held)
    return any(isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in leaves)


def provenance(graph_module: GraphModule) -> Provenance:
    """Follow parameters and data through the graph.

    Data are the inputs that have a batch dim; where none has, all inputs of the call.
    """
    inputs = [node for node in placeholders(graph_module) if "batch_dim" in node.meta]
    batched = {node for node in inputs if node.meta["batch_dim"] is not None}
    data = set(batched or inputs)
    sizes = [value(node).shape[node.meta["batch_dim"]] for node in batched]
    learned = {node for node in placeholders(graph_module) if "parameter" in node.meta}
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "output") or not _holds_tensors(node):
            continue
        read = node.all_input_nodes
        if is_random(node) or any(source in data for source in read) or _is_shaped_by(node, sizes):
            data.add(node)
        if node.target not in _STOPS and differentiable(node.meta.get("val")) and any(s in learned for s in read):
            learned.add(node)
    return Provenance(frozenset(learned - data), frozenset(data))


def _is_shaped_by(node: Node, sizes: list[Any]) -> bool:
    """Whether a constant has a row a sample, as initial states have: it meets parameters as data do."""
    if not sizes or any(_holds_tensors(source) for source in node.all_input_nodes):
        return False
    shape = value(node).shape if isinstance(value(node), Tensor) else ()
    return sum(same_size(size, sizes[0]) for size in shape) == 1


def _holds_tensors(node: Node) -> bool:
    """Sizes are the same for all values of the data, so they are no data."""
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(node.meta.get("val")))
