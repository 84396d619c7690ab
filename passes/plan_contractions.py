"""Choose, for each parameter, between per-objective gradients and products of factors."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import torch
from torch.fx import GraphModule, Node

from gramfx.align import aligned, disjoint, groups, merged
from gramfx.cost import pair_cost, products_cost, rows_cost
from gramfx.errors import VerificationError
from gramfx.terms import ParameterTerms, Term

GRAMIAN = torch.ops.gramfx.gramian.default


def plan_contractions(graph_module: GraphModule, batch: int) -> GraphModule:
    """Set the strategy of every ``gramfx::gramian`` node, by multiply-adds at batch size ``batch``.

    ``pairwise`` contracts factors with factors (Hadamard where there are no tokens); ``outer`` makes each objective's
    gradient first. The choice depends on the batch: outer wins when ``(T + N/2) d p < N T² (d + p) / 2``.
    """
    graph_module = copy.deepcopy(graph_module)
    for node in gramian_nodes(graph_module):
        terms = planned(ParameterTerms.from_json(str(node.args[2])), batch)
        node.args = (*node.args[:2], terms.to_json(), *node.args[3:])
        node.meta["plan"] = terms.strategy
    graph_module.recompile()
    return graph_module


def gramian_nodes(graph_module: GraphModule) -> list[Node]:
    """The symbolic gramian nodes in order."""
    return [node for node in graph_module.graph.nodes if node.target is GRAMIAN]


def planned(terms: ParameterTerms, batch: int) -> ParameterTerms:
    """The cheaper strategy, with the terms brought to common axes where the pairwise one needs them."""
    common = aligned(terms.terms) if terms.cross else _one_by_one(terms.terms)
    if common is None:
        return dataclasses.replace(terms, strategy="outer")
    blocks = [_merged(common)] if terms.cross else [[term] for term in common]
    pairwise = sum(_pairwise_cost(block, batch) for block in blocks)
    outer = sum(_outer_cost(block, terms.shape, batch) for block in blocks)
    return dataclasses.replace(terms, terms=common, strategy="outer" if outer < pairwise else "pairwise")


def _one_by_one(terms: tuple[Term, ...]) -> tuple[Term, ...] | None:
    alone = [aligned([term]) for term in terms]
    return None if any(one is None for one in alone) else tuple(one[0] for one in alone if one)


def _merged(terms: tuple[Term, ...]) -> list[Term]:
    return [merged(group) if len(group) > 1 else group[0] for group in groups(terms)]


def _pairwise_cost(terms: list[Term], batch: int) -> int:
    pairs = itertools.combinations_with_replacement(terms, 2)
    return sum(pair_cost(left, right, batch) for left, right in pairs if not disjoint(left, right))


def _outer_cost(terms: list[Term], shape: tuple[int, ...], batch: int) -> int:
    return sum(rows_cost(term, batch) for term in terms) + products_cost(terms, shape, batch)


def verify_planned(graph_module: GraphModule) -> None:
    """Raise :class:`VerificationError` where a gramian node has no strategy."""
    for node in gramian_nodes(graph_module):
        if not ParameterTerms.from_json(str(node.args[2])).strategy:
            raise VerificationError("a contraction was not planned", got=node.name)
