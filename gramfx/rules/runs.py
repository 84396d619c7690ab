"""Samples that are runs of rows: from rows to a padded batch and back, and what is taken of each run."""

from __future__ import annotations

from gramfx.axes import Loc, Ragged, Value, ragged
from gramfx.rules.table import AXIS_RULES, Call, Operand, define

OTHERS = "meets offsets that are not its own"


def _own(operand: Operand, offsets: Operand) -> bool:
    """Whether an operand's first dim holds the rows that these offsets cut into samples."""
    runs = ragged(operand.batch)
    return (
        runs is not None
        and operand.batch == Loc(0, runs.unit)
        and operand.shape[0] == runs.rows
        and offsets.node.op == "placeholder"
        and offsets.node.name == runs.offsets
    )


def padded(call: Call) -> Value:
    """``out[b, i] = x[offsets[b] + i]``: the sample's number becomes an index."""
    rows, offsets = call.operands
    call.seen.add(id(offsets))
    return call.result(call.placed(rows, Loc(0, 1) if _own(rows, offsets) else None, OTHERS))


def jagged(call: Call) -> Value:
    """``out[offsets[b] + i] = x[b, i]``, the inverse."""
    batch, offsets = call.operands
    call.seen.add(id(offsets))
    known = offsets.node.op == "placeholder" and "longest" in offsets.node.meta
    runs = Ragged(offsets.node.name, int(call.shape[0])) if known else None
    place = Loc(0, runs.unit) if runs and batch.batch == Loc(0, 1) and batch.shape[0] == call.batch else None
    return call.result(call.placed(batch, place, OTHERS))


def reduced(call: Call) -> Value:
    """``out[b] = f(x[offsets[b]:offsets[b + 1]])``."""
    rows, *others = call.operands
    call.seen.update(id(o) for o in others)
    offsets = call.get("offsets")
    own = isinstance(offsets, Operand) and call.get("axis", 0) == 0 and _own(rows, offsets)
    return call.result(call.placed(rows, Loc(0, 1) if own else None, OTHERS))


AXIS_RULES["gramfx.jagged_to_padded"] = padded
AXIS_RULES["gramfx.padded_to_jagged"] = jagged
define("segment_reduce", reduced)
