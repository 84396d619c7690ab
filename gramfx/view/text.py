"""Stages as text: one node a line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from gramfx.view.stages import NodeView, StageView

Line = tuple[str, ...]
#: Lines of what stayed the same around a change.
CONTEXT = 2


def text(stage: StageView) -> str:
    """A table: name, op, axes, what is read, what it is there for, module path."""
    return "\n".join(line for line, _ in lines(stage))


def lines(stage: StageView) -> Iterator[tuple[str, NodeView]]:
    """Each line of the table, and the node that it shows."""
    rows = [_row(node) for node in stage.nodes]
    yield from zip(_aligned(rows), stage.nodes, strict=True)


def diff(before: StageView, after: StageView) -> list[str]:
    """The lines that the passes between two stages took (``-``) and added (``+``), with a little around them."""
    old, new = [_row(node) for node in before.nodes], [_row(node) for node in after.nodes]
    shown = _aligned([*old, *new])
    old_lines, new_lines = shown[: len(old)], shown[len(old) :]
    found = [f"--- {before.name}", f"+++ {after.name}"]
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        found.append("...")
        for tag, i, j, k, m in group:
            if tag == "equal":
                found += [f"  {line}" for line in old_lines[i:j]]
                continue
            found += [f"- {line}" for line in old_lines[i:j]]
            found += [f"+ {line}" for line in new_lines[k:m]]
    return found


def _row(node: NodeView) -> Line:
    op = node.kind if node.op == "placeholder" else node.op
    return node.name, op, node.value, ", ".join(node.reads), node.mark, node.module


def _aligned(rows: Sequence[Line]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
