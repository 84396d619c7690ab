"""A symbolic batch becomes a number."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, GraphModule, Node

from gramfx.torch_compat import Fixed


def fix_batch(graph_module: GraphModule, batch: int) -> GraphModule:
    """A copy for one batch size: its sizes are numbers, in arguments and in fake values."""
    fixed, graph = Fixed(batch), Graph()
    made: dict[Node, Any] = {}
    for node in graph_module.graph.nodes:
        held = fixed(node.meta.get("val"))
        if node.op == "call_function" and isinstance(held, (int, float)):
            made[node] = held
            continue
        made[node] = graph.node_copy(node, lambda argument: made[argument])
        made[node].meta = {**node.meta, "val": held}
    return GraphModule(graph_module, graph)
