"""The ``gramfx::gramian`` nodes of a graph: what they read, and rows of the Jacobian made for them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node

from gramfx.cost import Making, Source, flops_of
from gramfx.factors import row_cut
from gramfx.fallback import Maker
from gramfx.graph import ancestors, arguments, named
from gramfx.memory import Profile, touched
from gramfx.ops import GRAMIAN
from gramfx.terms import ParameterTerms


def gramian_nodes(graph_module: GraphModule) -> list[Node]:
    """The symbolic gramian nodes in order."""
    return [node for node in graph_module.graph.nodes if node.target is GRAMIAN]


def terms_of(node: Node) -> ParameterTerms:
    """The terms of a gramian node."""
    return ParameterTerms.from_json(str(node.args[2]))


def set_terms(node: Node, terms: ParameterTerms) -> None:
    """Replace the terms of a gramian node."""
    node.args = (*node.args[:2], terms.to_json(), *node.args[3:])
    node.meta["plan"] = terms.recipe.strategy


def factors_of(node: Node) -> list[Node]:
    """The nodes that the factors of a gramian node point at."""
    return list(arguments(node)[0])


def accumulated_in(node: Node) -> torch.dtype:
    """The dtype that a gramian node accumulates in."""
    dtype: torch.dtype = arguments(node)[3]
    return dtype


def key_of(node: Node) -> str:
    """Tells the terms of one parameter from any others."""
    return hashlib.sha256(str(node.args[2]).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- rows that can be made when they are needed


def maker_of(factor: Node) -> Maker | None:
    """What makes some of a factor's rows, where it is rows of the Jacobian made by VJPs."""
    return factor.meta.get("maker")


def without_made_rows(graph_module: GraphModule, made: Collection[str]) -> GraphModule:
    """A copy to profile, not to run: the gramian nodes ``made`` read what rows are made from instead of the rows."""
    lean = copy.deepcopy(graph_module)
    nodes = named(lean)
    for node in [one for one in gramian_nodes(lean) if one.name in made]:
        read: list[Node] = []
        for factor in factors_of(node):
            maker = maker_of(factor)
            read += [factor] if maker is None else [nodes[name] for name in maker.inputs]
        node.args = (list(dict.fromkeys(read)), *node.args[1:])
    lean.graph.eliminate_dead_code()
    return lean


def source_of(factor: Node, node: Node, batch: int, alive: Profile) -> Source:
    """A factor as something to be made when it is needed, where it can be."""
    maker, source = maker_of(factor), Source.of(factor)
    if maker is None:
        return source
    nodes = {one.name: one for one in factor.graph.nodes}
    given = {one for name in maker.inputs for one in ancestors(nodes[name])}
    region = [one for one in ancestors(factor) if one not in given and one.op == "call_function"]
    scratch = max(alive.during[one] for one in region) - min(alive.before[one] for one in region)
    terms, number = terms_of(node), factors_of(node).index(factor)
    (term,) = [term for term in terms.terms if any(f.tensor == number for f in term.factors)]
    axis = row_cut([term])
    work = tuple(filter(None, (touched(one, batch) for one in region)))
    making = Making(term.sizes[axis] if axis else 1, flops_of(region, batch), scratch, work)
    return Source(source.shape, source.dtype, making)
