"""Stages for Model Explorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gramfx.view.dot import COLOURS
from gramfx.view.stages import BACKWARD, NodeView, StageView


def model_explorer(stages: Mapping[str, StageView]) -> dict[str, Any]:
    """A graph collection, one graph a stage, as Model Explorer's JSON adapter reads it: modules are namespaces."""
    return {"label": "gramfx", "graphs": [_graph(stage) for stage in stages.values()]}


def _graph(stage: StageView) -> dict[str, Any]:
    return {"id": stage.name, "nodes": [_node(node) for node in stage.nodes]}


def _node(node: NodeView) -> dict[str, Any]:
    namespace = "/".join([*(["backward"] if node.kind in BACKWARD else []), *filter(None, node.module.split("."))])
    shown = {"kind": node.kind, "subject": node.subject, "op": node.op, "arguments": node.arguments}
    shown |= {"source": node.source, **{key: str(held) for key, held in node.plan.items()}}
    edges = [
        {"sourceNodeId": read, "sourceNodeOutputId": "0", "targetNodeInputId": str(number)}
        for number, read in enumerate(node.reads)
    ]
    outputs = [{"id": "0", "attrs": [{"key": "tensor_shape", "value": node.value}]}] if node.value else []
    return {
        "id": node.name,
        "label": node.name if node.op in ("placeholder", "output") else node.op.removeprefix("aten."),
        "namespace": namespace,
        "incomingEdges": edges,
        "attrs": [{"key": key, "value": held} for key, held in shown.items() if held],
        "outputsMetadata": outputs,
        "style": {"backgroundColor": COLOURS[node.kind]},
    }
