"""The clones that told uses apart are gone."""

from __future__ import annotations

import copy

import torch
from torch.fx import GraphModule

from gramfx.graph import placeholders, results

aten = torch.ops.aten


def erase_clones(graph_module: GraphModule) -> GraphModule:
    """Read through every clone of a placeholder that is not returned. Bitwise exact: nothing is written in place."""
    graph_module = copy.deepcopy(graph_module)
    inputs = set(placeholders(graph_module))
    kept = set(results(graph_module))
    for node in list(graph_module.graph.nodes):
        if node.target is aten.clone.default and len(node.args) == 1 and not node.kwargs and node not in kept:
            source = node.args[0]
            if source in inputs:
                node.replace_all_uses_with(source)
                graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module
