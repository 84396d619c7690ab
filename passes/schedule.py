"""Each contraction right after what it reads, so that activations and cotangents die early."""

from __future__ import annotations

import copy

from torch.fx import GraphModule, Node

from gramfx.gramians import gramian_nodes


def schedule(graph_module: GraphModule) -> GraphModule:
    """Move every gramian node, and its addition to the total, behind the last of its inputs. Bitwise exact."""
    graph_module = copy.deepcopy(graph_module)
    for node in [*gramian_nodes(graph_module), *_additions(graph_module)]:
        order = {other: position for position, other in enumerate(graph_module.graph.nodes)}
        last = max(node.all_input_nodes, key=order.__getitem__)
        last = _after_placeholders(last, order)
        if last.next is not node:
            last.append(node)
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


def _additions(graph_module: GraphModule) -> list[Node]:
    """What is computed from gramian nodes, in order."""
    found: dict[Node, None] = dict.fromkeys(gramian_nodes(graph_module))
    gramians = len(found)
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and any(read in found for read in node.all_input_nodes):
            found[node] = None
    return list(found)[gramians:]


def _after_placeholders(node: Node, order: dict[Node, int]) -> Node:
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node
