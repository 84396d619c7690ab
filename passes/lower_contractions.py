"""Symbolic gramian nodes become ATen ops."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gramfx.arrays import Dense, Made, dense
from gramfx.emit import gramian_of
from gramfx.errors import VerificationError
from gramfx.fallback import Maker
from gramfx.gramians import accumulated_in, factors_of, gramian_nodes, maker_of, terms_of
from gramfx.graph import inline, mark, named, rename, value
from gramfx.terms import ParameterTerms
from gramfx.torch_compat import trace


def lower_contractions(graph_module: GraphModule) -> GraphModule:
    """Replace each ``gramfx::gramian`` node, in its place, by the contraction it stands for."""
    graph_module = copy.deepcopy(graph_module)
    traced: dict[Hashable, GraphModule] = {}
    for node in gramian_nodes(graph_module):
        terms, dtype = terms_of(node).anonymous(), accumulated_in(node)
        makers = [maker_of(factor) if terms.recipe.made else None for factor in factors_of(node)]
        read = _read(factors_of(node), makers, named(graph_module))
        values = [value(one) for one in read]
        # Parameters that differ in names alone have one contraction.
        key = (terms.to_json(), dtype, *makers, *(_layout(tensor) for tensor in values))
        if key not in traced:
            traced[key] = _traced(terms, dtype, makers, values)
        mark(traced[key], "contraction", terms_of(node).parameter)
        with graph_module.graph.inserting_before(node):
            made = inline(graph_module.graph, traced[key], list(read))[0]
        node.replace_all_uses_with(made)
        graph_module.graph.erase_node(node)
        rename(made, node.name)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def _read(factors: Sequence[Node], makers: Sequence[Maker | None], nodes: Mapping[str, Node]) -> list[Node]:
    """What a contraction reads: its factors, or what they are made from."""
    read: list[Node] = []
    for factor, maker in zip(factors, makers, strict=True):
        read += [factor] if maker is None else [nodes[name] for name in maker.inputs]
    return read


def _layout(tensor: Tensor) -> Hashable:
    return str(tuple(tensor.shape)), str(tensor.stride()), tensor.dtype, tensor.device


def _traced(
    terms: ParameterTerms, dtype: torch.dtype, makers: Sequence[Maker | None], values: Sequence[Any]
) -> GraphModule:
    def contract(*tensors: Tensor) -> Tensor:
        given = iter(tensors)
        factors: list[Tensor | Made] = []
        for maker in makers:
            taken = list(itertools.islice(given, 1 if maker is None else len(maker.inputs)))
            factors.append(taken[0] if maker is None else Made(functools.partial(_dense_rows, maker, taken)))
        return gramian_of(terms, factors, dtype)

    with torch.no_grad():
        return trace(contract, values)


def _dense_rows(maker: Maker, tensors: Sequence[Tensor], part: tuple[int, int] | None) -> Dense:
    return dense(maker(tensors, part))


def verify_lowered(graph_module: GraphModule) -> None:
    """Raise :class:`VerificationError` where a summand is still a node of ours."""
    for node in gramian_nodes(graph_module):
        raise VerificationError("a summand of the Gramian was not lowered", got=node.name)
