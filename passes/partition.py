"""One joint graph as several, each with a part of its outputs: forward, Gramian, gradient."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from gramfx.gramians import maker_of
from gramfx.graph import dependents, named, value
from gramfx.memory import is_view
from gramfx.provenance import is_random
from gramfx.torch_compat import contiguous


def residuals(graph_module: GraphModule, seeds: Collection[Node], outputs: Sequence[Node]) -> list[Node]:
    """What has to be kept of the part before ``seeds`` for ``outputs``: views, sizes and constants are made again."""
    later, nodes = dependents(graph_module, seeds), named(graph_module)
    kept: set[Node] = set()
    seen: set[Node] = set()
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        if node in later or _made_again(node):
            pending.extend(_reads(node, nodes))
        else:
            kept.add(node)
    return [node for node in graph_module.graph.nodes if node in kept]


def _reads(node: Node, nodes: dict[str, Node]) -> list[Node]:
    """The node's operands, and what its rows can be made from anew."""
    maker = maker_of(node)
    return [*node.all_input_nodes, *(nodes[name] for name in (maker.inputs if maker else ()))]


def _made_again(node: Node) -> bool:
    """Whether a value costs nothing to keep out of memory."""
    constant = not any(isinstance(value(read), Tensor) for read in node.all_input_nodes)
    return is_view(node) or not isinstance(value(node), Tensor) or (constant and not is_random(node))


def extract(graph_module: GraphModule, given: Sequence[Node], outputs: Sequence[Node]) -> GraphModule:
    """``(*given) -> (*outputs,)`` with all that is in between; names stay. Bitwise exact."""
    nodes = named(graph_module)
    needed: set[Node] = set(given)
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(_reads(node, nodes))
    graph = Graph()
    mapping: dict[Node, Node] = {}
    for node in given:
        mapping[node] = graph.placeholder(node.name)
        mapping[node].meta = {**node.meta, "val": contiguous(value(node))}
        mapping[node].meta.pop("maker", None)
    for node in graph_module.graph.nodes:
        if node in needed and node not in mapping:
            mapping[node] = graph.node_copy(node, lambda argument: mapping[argument])
    graph.output(tuple(mapping[node] for node in outputs))
    return GraphModule(torch.nn.Module(), graph)
