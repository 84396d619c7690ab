"""Graphs as text: one node a line."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from gramfx.axes import Value
from gramfx.graph import module_path, target_name
from gramfx.torch_compat import pytree

_SHORT = {"torch.float64": "f64", "torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16"}
_SHORT |= {"torch.int64": "i64", "torch.int32": "i32", "torch.bool": "b8", "torch.complex64": "c64"}


def text(graph_module: GraphModule) -> str:
    """A table: name, value, op and operands, module path."""
    rows = [_row(node) for node in graph_module.graph.nodes]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows
    )


def print_graph(graph_module: GraphModule) -> None:
    """Print :func:`text`."""
    print(text(graph_module))


def _row(node: Node) -> tuple[str, str, str, str]:
    if node.op == "placeholder":
        mark = node.meta.get("parameter")
        return (
            node.name,
            _value(node.meta.get("val")) + _sample(node),
            "parameter" if mark else "input",
            str(mark or ""),
        )
    if node.op == "output":
        return "output", "", f"({_arguments(node)})", ""
    marks = [name for name in ("plan",) if name in node.meta]
    mark = " ".join(f"[{node.meta[name]}]" for name in marks)
    return (
        node.name,
        _value(node.meta.get("val")) + _sample(node),
        f"{target_name(node)}({_arguments(node)}) {mark}",
        module_path(node),
    )


def _sample(node: Node) -> str:
    """Where the sample is in a value, after the batched stage: ``@1`` for dim 1, ``@0/5`` for ``index // 5``."""
    axes = node.meta.get("axes")
    if not isinstance(axes, Value) or axes.batch is None:
        return ""
    return f"@{axes.batch.dim}" + ("" if axes.batch.inner == 1 else f"/{axes.batch.inner}")


def _arguments(node: Node) -> str:
    return ", ".join(_argument(arg) for arg in pytree.tree_leaves((node.args, node.kwargs)))


def _argument(argument: Any) -> str:
    shown = str(argument)
    return shown if len(shown) <= 60 else "…"


def _value(held: Any) -> str:
    if isinstance(held, Tensor):
        dtype = _SHORT.get(str(held.dtype), str(held.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(size) for size in held.shape)}]"
    if isinstance(held, (tuple, list)):
        return ", ".join(_value(one) for one in held)
    return "" if held is None else str(held)
