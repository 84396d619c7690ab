"""Symbolic gramian nodes become ATen ops."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.fx import GraphModule

from gramfx.emit import gramian_of
from gramfx.errors import VerificationError
from gramfx.graph import arguments, inline, rename, value
from gramfx.passes.plan_contractions import gramian_nodes
from gramfx.terms import ParameterTerms
from gramfx.torch_compat import trace


def lower_contractions(graph_module: GraphModule) -> GraphModule:
    """Replace each ``gramfx::gramian`` node, in its place, by the contraction it stands for."""
    graph_module = copy.deepcopy(graph_module)
    for node in gramian_nodes(graph_module):
        factors, _, held, dtype = arguments(node)
        terms = ParameterTerms.from_json(str(held))

        def contract(*tensors: Tensor, terms: ParameterTerms = terms, dtype: torch.dtype = dtype) -> Tensor:
            return gramian_of(terms, tensors, dtype)

        with torch.no_grad():
            inner = trace(contract, [value(factor) for factor in factors])
        with graph_module.graph.inserting_before(node):
            made = inline(graph_module.graph, inner, list(factors))[0]
        node.replace_all_uses_with(made)
        graph_module.graph.erase_node(node)
        rename(made, node.name)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def verify_lowered(graph_module: GraphModule) -> None:
    """Raise :class:`VerificationError` where anything but ATen is left."""
    for node in graph_module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims"):
            raise VerificationError("the lowered graph holds an op of its own", got=str(node.target))
