"""Every use of a parameter reads its own clone."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gramfx.errors import VerificationError
from gramfx.graph import Builder, output_node, rename, results, value
from gramfx.provenance import Provenance, provenance
from gramfx.rules.uses import is_pointwise
from gramfx.torch_compat import is_symbolic, same_shape, same_size

aten = torch.ops.aten


def separate_uses(graph_module: GraphModule) -> GraphModule:
    """Insert ``{value}_use{i}``, a clone, on every edge from a parameter value into an op that also sees data.

    A parameter value is a trainable parameter (a placeholder with ``meta["parameter"]``) or what is computed from
    parameters and constants alone. Where the op is pointwise the clone is broadcast to the op's shape, so that the
    cotangent of each entry stands apart. ``meta["use"]`` of a clone names the value, the op and the operand it feeds.
    Bitwise exact. Works on any functional FX graph with fake values in ``meta["val"]``.
    """
    graph_module = copy.deepcopy(graph_module)
    known = provenance(graph_module)
    for node in [n for n in graph_module.graph.nodes if n in known.parameter_values]:
        for user in _readers(node, known):
            _separate(node, user)
    _separate_objectives(graph_module, known)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    verify_separated(graph_module)
    return graph_module


def _readers(node: Node, known: Provenance) -> list[Node]:
    return [user for user in node.users if user in known.data]


def _separate(node: Node, user: Node) -> None:
    """A clone for each operand position at which ``user`` reads ``node``."""
    build = Builder(user)

    def own(argument: Node) -> Node:
        return _clone(node, user, build) if argument is node else argument

    args, kwargs = torch.fx.node.map_aggregate((user.args, user.kwargs), lambda a: own(a) if isinstance(a, Node) else a)
    user.args, user.kwargs = args, kwargs
    if is_pointwise(user.target):
        _broadcast_operands(user, build)


def _clone(node: Node, user: Node, build: Builder) -> Node:
    clone = build(aten.clone.default, node)
    clone.meta["use"] = {"value": node.name, "op": user.name, "operand": clone.name}
    number = sum("use" in reader.meta for reader in node.users) - 1
    rename(clone, f"{node.name}_use{number}")
    clone.meta["use"]["operand"] = clone.name
    return clone


def _broadcast_operands(user: Node, build: Builder) -> None:
    """Expand the clones among a pointwise op's operands to its shape."""
    operands = [arg for arg in user.all_input_nodes if isinstance(value(arg), Tensor)]
    shape = torch.broadcast_shapes(*(value(arg).shape for arg in operands))
    for clone in [arg for arg in operands if arg.meta.get("use", {}).get("op") == user.name]:
        if not same_shape(value(clone).shape, shape):
            sizes = [_size(operands, dim - len(shape), size, build) for dim, size in enumerate(shape)]
            full = build(aten.expand.default, clone, sizes)
            user.replace_input_with(clone, full)
            rename(full, f"{clone.name}_broadcast")
            clone.meta["use"]["operand"] = full.name


def _size(operands: list[Node], dim: int, size: int | torch.SymInt, build: Builder) -> int | Node:
    """``size`` as a number, or as the node that reads it off an operand."""
    if not is_symbolic(size):
        return int(size)
    source = next(arg for arg in operands if value(arg).dim() >= -dim and same_size(value(arg).shape[dim], size))
    return build(aten.sym_size.int, source, value(source).dim() + dim)


def _separate_objectives(graph_module: GraphModule, known: Provenance) -> None:
    """Objectives that never see data are themselves the use."""
    objectives, *rest = results(graph_module)
    if objectives in known.parameter_values:
        output = output_node(graph_module)
        output.args = ((_clone(objectives, output, Builder(output)), *rest),)


def verify_separated(graph_module: GraphModule) -> None:
    """Raise :class:`VerificationError` where an op that sees data reads a parameter value without a clone."""
    known = provenance(graph_module)
    # In graph order, not the set's, so that it is always the same read that is named.
    for node in [n for n in graph_module.graph.nodes if n in known.parameter_values]:
        if any("use" in held.meta for held in (node, *node.all_input_nodes[:1])):
            continue
        for user in _readers(node, known):
            raise VerificationError("a use reads its parameter value directly", got=f"{user} reads {node}")
