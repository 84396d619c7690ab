"""``gramfx.gramian`` inside a compiled function: the graph is run up to there, then the Gramian, then the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gramfx.errors import UnsupportedError
from gramfx.graph import dependents, where
from gramfx.jacobian import gramian

Runnable = Callable[..., Any]


def calls_of(graph_module: GraphModule) -> list[Node]:
    """The calls of ``gramfx.gramian`` in a graph of Dynamo's."""
    return [node for node in graph_module.graph.nodes if node.target is gramian]


class Split:
    """A graph as what comes before its Gramians and what is made of them.

    ``first`` takes the graph's inputs and gives the objectives, then what the rest or the caller needs; ``second``
    takes the Gramians, then that. Raises :class:`gramfx.errors.UnsupportedError` where objectives depend on a Gramian.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self.calls = calls_of(graph_module)
        later = dependents(graph_module, self.calls)
        for call in self.calls:
            if len(call.args) != 1 or any(name != "coupled" for name in call.kwargs):
                raise UnsupportedError(
                    "gramian is told of parameters inside a compiled function",
                    expected="gramian(objectives), by all parameters",
                    where=where(call),
                    remedy="return the objectives, and call gramian(objectives, parameters) on them",
                )
            if any(read in later for read in call.all_input_nodes):
                raise UnsupportedError("objectives depend on a Gramian in one compiled function", where=where(call))
        returned: Any = next(node for node in graph_module.graph.nodes if node.op == "output").args[0]
        rest = [node for node in graph_module.graph.nodes if node in later and node not in self.calls]
        read = [node for one in rest for node in one.all_input_nodes] + [n for n in returned if isinstance(n, Node)]
        needed = [node for node in dict.fromkeys(read) if node not in later]
        objectives = [call.args[0] for call in self.calls]
        self.count = len(objectives)
        self.first = _graph(
            graph_module, [n for n in graph_module.graph.nodes if n not in later], [*objectives, *needed]
        )
        self.second = _graph(graph_module, rest, returned, given=[*self.calls, *needed])

    def joined(self, first: Runnable) -> Runnable:
        """The whole, with ``first`` compiled."""

        def run(*arguments: Any) -> Any:
            made = first(*arguments)
            objectives, needed = made[: self.count], made[self.count :]
            options: list[dict[str, Any]] = [dict(call.kwargs) for call in self.calls]
            found = [gramian(one, **given) for one, given in zip(objectives, options, strict=True)]
            return self.second(*found, *needed)

        return run


def _graph(
    graph_module: GraphModule, nodes: Sequence[Node], returned: Sequence[Any], given: Sequence[Node] = ()
) -> GraphModule:
    graph = Graph()
    mapping: dict[Node, Node] = {}
    for node in given:
        mapping[node] = graph.placeholder(node.name)
        mapping[node].meta = dict(node.meta)
    for node in nodes:
        if node.op != "output":
            mapping[node] = graph.node_copy(node, lambda argument: mapping[argument])
            if hasattr(node, "_dynamo_source"):
                mapping[node]._dynamo_source = node._dynamo_source
    graph.output(tuple(torch.fx.node.map_arg(list(returned), lambda node: mapping[node])))
    return GraphModule(graph_module, graph)
