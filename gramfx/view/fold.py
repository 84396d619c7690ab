"""A stage with whole modules as single nodes, for pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gramfx.view.stages import BACKWARD, NodeView, StageView

#: So many edges a node, on the average, are still to be followed by eye.
EDGES = 3


def folded(stage: StageView, most: int) -> StageView:
    """The stage with modules as one node each, as deep as it takes to have ``most`` nodes at most, and few edges.

    The forward and the backward of a module are two. What belongs to no module stays as it is, the sum of the Gramians
    is one node.
    """
    depth = max((node.module.count(".") + 1 for node in stage.nodes if node.module), default=0)
    found = stage
    while depth > 0 and (len(found.nodes) > most or _edges(found) > EDGES * most):
        found = _at_depth(stage, depth)
        depth -= 1
    return found


def _edges(stage: StageView) -> int:
    return sum(len(node.reads) for node in stage.nodes)


def _at_depth(stage: StageView, depth: int) -> StageView:
    place = {node.name: _group(node, depth) for node in stage.nodes}
    members: dict[str, list[NodeView]] = {}
    for node in stage.nodes:
        members.setdefault(place[node.name], []).append(node)
    return StageView(stage.name, tuple(_one(name, nodes, place) for name, nodes in members.items()))


def _group(node: NodeView, depth: int) -> str:
    if node.kind == "sum":
        return "sum of the Gramians"
    if not node.module:
        return node.name
    path = ".".join(node.module.split(".")[:depth])
    # No node has a colon in its name, and so no module is taken for one.
    return f"{path}: backward" if node.kind in BACKWARD else f"{path}: forward"


def _one(name: str, nodes: list[NodeView], place: Mapping[str, str]) -> NodeView:
    if len(nodes) == 1:
        (node,) = nodes
        return dataclasses.replace(node, reads=tuple(dict.fromkeys(place[read] for read in node.reads)), name=name)
    reads = tuple(dict.fromkeys(place[read] for node in nodes for read in node.reads if place[read] != name))
    last = nodes[-1]
    gramians = sum(node.kind == "gramian" for node in nodes)
    op = f"{len(nodes)} nodes" + (f", {gramians} Gramians" if gramians else "")
    kind = "backward" if last.kind in BACKWARD else "forward"
    return NodeView(name, kind, "", op, last.value, reads, "", "", "")
