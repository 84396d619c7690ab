"""Parameters meet data in a small set of bilinear and pointwise ops; random draws stand alone."""

from __future__ import annotations

import copy

import torch
from torch.fx import GraphModule, Node

from gramfx.errors import VerificationError
from gramfx.graph import Builder, arguments, verify_functional, where
from gramfx.provenance import Provenance, is_random, provenance
from gramfx.rules.rewrites import AFFINE, ITEM_REWRITES, REWRITES

aten = torch.ops.aten


def canonicalize(graph_module: GraphModule) -> GraphModule:
    """Split affine norms, biases with factors, PReLU, Bilinear and their like where they read parameters.

    Dropout becomes a mask, drawn with the same random numbers, and a product, so that a later replay can be given the
    mask. Not bitwise exact: the split ops round once more.
    """
    graph_module = copy.deepcopy(graph_module)
    known = provenance(graph_module)
    for node in list(graph_module.graph.nodes):
        if node.target in REWRITES and _concerned(node, REWRITES[node.target][1], known):
            _replace(node, REWRITES[node.target][0](node, Builder(node)))
        elif node.target in ITEM_REWRITES and _concerned(node, ITEM_REWRITES[node.target][1], known):
            for item in [user for user in node.users if user.args[1] == 0]:
                _replace(item, ITEM_REWRITES[node.target][0](node, item, Builder(item.next)))
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def _concerned(node: Node, positions: tuple[int, ...], known: Provenance) -> bool:
    """Whether an op that sees data reads a parameter value at one of the positions, or draws random numbers."""
    if is_random(node):
        return True
    operands = [arguments(node)[position] for position in positions if position < len(arguments(node))]
    operands += [node.kwargs[name] for name in ("weight", "bias") if name in node.kwargs]
    return node in known.data and any(operand in known.parameter_values for operand in operands)


def verify_canonical(graph_module: GraphModule) -> None:
    """Raise :class:`VerificationError` where a norm still reads its parameters, or a draw passes a gradient."""
    verify_functional(graph_module)
    known = provenance(graph_module)
    for node in graph_module.graph.nodes:
        if node.target is aten.native_dropout.default and node.args[0].target is not aten.detach.default:
            raise VerificationError("dropout is differentiated together with its draw", got=where(node))
        split = AFFINE.get(node.target, ())
        if split and _concerned(node, split, known):
            raise VerificationError("a compound op still reads a parameter", got=where(node))


def _replace(node: Node, made: Node | None) -> None:
    """Let all read ``made`` but the nodes that it is made of."""
    if made is not None:
        inner = _between(node, made)
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user not in inner)
        if not node.users:
            node.graph.erase_node(node)


def _between(node: Node, made: Node) -> set[Node]:
    found: set[Node] = set()
    pending = [made]
    while pending:
        current = pending.pop()
        if current not in found and current is not node and current.op == "call_function":
            found.add(current)
            pending.extend(current.all_input_nodes)
    return found
