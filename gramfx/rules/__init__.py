"""What each ATen op does to samples and to derivatives: one file per op family, most ops one line."""

from __future__ import annotations

from typing import Any

import torch

from gramfx.rules import (
    contraction,
    convolution,
    factories,
    indexing,
    linear_algebra,
    loss,
    normalization,
    pointwise,
    pooling,
    reduction,
    runs,
    views,
)
from gramfx.rules.table import AXIS_RULES, Rule, broadcast

__all__ = [
    "axis_rule",
    "contraction",
    "convolution",
    "factories",
    "indexing",
    "linear_algebra",
    "loss",
    "normalization",
    "pointwise",
    "pooling",
    "reduction",
    "runs",
    "views",
]


def axis_rule(op: Any) -> Rule | None:
    """The axis rule of an op: of the overload, else of the op, else the pointwise one where torch tags it so."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    packet = str(op.overloadpacket)
    rule = AXIS_RULES.get(f"{packet}.{op._overloadname}") or AXIS_RULES.get(packet)
    return rule or (broadcast if torch.Tag.pointwise in op.tags else None)
