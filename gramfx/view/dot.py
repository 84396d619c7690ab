"""Stages for Graphviz."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from gramfx.errors import InputError
from gramfx.view.fold import folded
from gramfx.view.stages import NodeView, StageView

#: Colours by kind, from ColorBrewer's qualitative sets.
COLOURS = {
    **{"input": "#d9d9d9", "parameter": "#fdb462", "use": "#fed9a6", "forward": "#ffffff", "backward": "#e5f5f9"},
    **{"cotangent": "#80b1d3", "gramian": "#b3de69", "contraction": "#ccebc5", "sum": "#e5f5e0", "output": "#d9d9d9"},
}
#: Above this many nodes Graphviz takes minutes, and nobody finds anything: a picture has modules folded.
MOST = 150


def dot(stage: StageView) -> str:
    """The stage in Graphviz's language, a box a module."""
    lines = [f"digraph {_quoted(stage.name)} {{", "  compound=true;"]
    lines.append('  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=10];')
    lines += _boxes(stage)
    lines += [f"  {_quoted(read)} -> {_quoted(node.name)};" for node in stage.nodes for read in node.reads]
    return "\n".join([*lines, "}"])


def _boxes(stage: StageView) -> Iterator[str]:
    modules: dict[str, list[NodeView]] = {}
    for node in stage.nodes:
        modules.setdefault(node.module, []).append(node)
    for number, (module, nodes) in enumerate(modules.items()):
        inside = [f"    {_node(node)}" for node in nodes]
        if not module:
            yield from inside
            continue
        yield f"  subgraph cluster_{number} {{"
        yield f'    label={_quoted(module)}; fontname="Helvetica"; fontsize=11; color="#999999"; style=rounded;'
        yield from inside
        yield "  }"


def _node(node: NodeView) -> str:
    shown = [node.name, node.op if node.op != "placeholder" else node.kind, node.value, node.mark]
    label = "\\n".join(_escaped(line) for line in shown if line)
    return f'{_quoted(node.name)} [label="{label}", fillcolor="{COLOURS[node.kind]}", tooltip={_quoted(node.source)}];'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def svg(stage: StageView) -> str:
    """Laid out by Graphviz's ``dot``, modules folded where there are many nodes.

    Raises :class:`InputError` where ``dot`` is not installed or fails.
    """
    program = shutil.which("dot")
    if program is None:
        raise InputError(
            "Graphviz's dot was not found",
            expected="the program dot on PATH",
            got="none",
            remedy="install the package graphviz of your system, or use --format html",
        )
    done = subprocess.run(
        [program, "-Tsvg"], input=dot(folded(stage, MOST)), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InputError("Graphviz's dot failed", got=done.stderr.strip())
    return done.stdout
