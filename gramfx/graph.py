"""Small questions asked of FX graphs: uses, sources, insertion, copying."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gramfx.errors import VerificationError
from gramfx.source import is_users
from gramfx.torch_compat import FakeTensor, pytree, tracing_quirks


def module_path(node: Node) -> str:
    """The dotted path of the module in whose forward ``node`` was recorded, or ``""``."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).removeprefix("L['self'].").removeprefix("model.").removeprefix("model")


def source_line(node: Node) -> str:
    """``file.py:12 in forward: code`` of the innermost user frame that recorded ``node``, or ``""``."""
    return _users_line(node.meta.get("stack_trace") or "")


@functools.lru_cache(4096)
def _users_line(stack_trace: str) -> str:
    frames = [line.strip() for line in stack_trace.splitlines() if line.strip()]
    for at in range(len(frames) - 1, -1, -1):
        if not frames[at].startswith('File "'):
            continue
        file, line, function = (part.strip() for part in frames[at].split(",", 2))
        file = file.removeprefix("File ").strip('"')
        if is_users(file):
            code = frames[at + 1] if at + 1 < len(frames) and not frames[at + 1].startswith("File") else ""
            place = f"{file}:{line.removeprefix('line ')} {function}"
            return f"{place}: {code}" if code else place
    return ""


def where(node: Node) -> str:
    """Where a node comes from, for error messages: op, module path, the user's source line."""
    parts = [f"op {target_name(node)} ({node.name})"]
    if path := module_path(node):
        parts.append(f"module {path!r}")
    if line := source_line(node):
        parts.append(line)
    return ", ".join(parts)


def target_name(node: Node) -> str:
    """``aten.linear`` for ``aten.linear.default``; the function's name for anything else."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(".default")
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", repr(node.target))


def arguments(node: Node) -> tuple[Any, ...]:
    """The positional arguments of a node, untyped: each op's rule knows its own."""
    return tuple(node.args)


def argument(node: Node, position: int, name: str = "", default: Any = None) -> Any:
    """One argument, given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def value(node: Node) -> Any:
    """The fake value of a node."""
    return node.meta["val"]


def item(node: Node, index: int) -> Node:
    """Output ``index`` of a call with several, added where nothing reads it yet."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    made = Builder(node.next)(operator.getitem, node, index)
    if isinstance(axes := node.meta.get("axes"), tuple):
        made.meta["axes"] = axes[index]
    return made


def rename(node: Node, name: str) -> None:
    """Give ``node`` a name close to ``name``, unique in its graph."""
    node._rename(name)


def placeholders(graph_module: GraphModule) -> list[Node]:
    """The placeholders in order."""
    return [node for node in graph_module.graph.nodes if node.op == "placeholder"]


def output_node(graph_module: GraphModule) -> Node:
    """The single output node."""
    return next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")


def results(graph_module: GraphModule) -> list[Node]:
    """The nodes that a graph returns; the objectives come first."""
    returned: Any = output_node(graph_module).args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def named(graph_module: GraphModule) -> dict[str, Node]:
    """The nodes by name."""
    return {node.name: node for node in graph_module.graph.nodes}


def verify_functional(graph_module: GraphModule) -> None:
    """Raise :class:`VerificationError` unless all is placeholders and functional calls with fake values."""
    graph_module.graph.lint()
    for node in graph_module.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise VerificationError("a graph holds more than placeholders and calls", got=f"{node.op} {node.name}")
        if node.op != "output" and "val" not in node.meta:
            raise VerificationError("a node has no fake value", got=node.name)
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise VerificationError("an op works in place", got=where(node))


def ancestors(node: Node) -> list[Node]:
    """The node and all that it is computed from, in graph order."""
    found: set[Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending.extend(current.all_input_nodes)
    return [candidate for candidate in node.graph.nodes if candidate in found]


def dependents(graph_module: GraphModule, sources: Iterable[Node]) -> set[Node]:
    """What is computed from ``sources``, and they."""
    found = set(sources)
    for node in graph_module.graph.nodes:
        if node.op != "output" and any(read in found for read in node.all_input_nodes):
            found.add(node)
    return found


class Builder:
    """Adds calls before a node, each with its fake value, as if they stood in that node's source line."""

    def __init__(self, before: Node) -> None:
        self._graph, self._before = before.graph, before
        self._meta: dict[str, Any] = {
            key: before.meta[key] for key in ("stack_trace", "nn_module_stack") if key in before.meta
        }

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """The node that calls ``target``."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        values = torch.fx.map_arg((args, kwargs), value)
        fakes = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, FakeTensor)]
        with tracing_quirks(), fakes[0].fake_mode if fakes else contextlib.nullcontext(), torch.no_grad():
            node.meta = {**self._meta, "val": target(*values[0], **values[1])}
        return node


def mark(graph_module: GraphModule, role: str, subject: str = "") -> None:
    """Say in ``meta["role"]`` what the calls of a graph are there for: a role, and what they do it for."""
    for node in graph_module.graph.nodes:
        node.meta["role"] = (role, subject)


def inline(graph: Graph, inner: GraphModule, arguments: list[Any]) -> list[Any]:
    """Copy ``inner``'s nodes into ``graph`` at its insertion point, reading ``arguments``; return what it returns."""
    mapping: dict[Node, Any] = dict(zip(placeholders(inner), arguments, strict=True))
    for node in inner.graph.nodes:
        if node.op == "call_function":
            mapping[node] = graph.node_copy(node, lambda argument: mapping[argument])
        elif node.op == "get_attr":
            raise VerificationError("a traced function closed over a tensor", got=str(node.target))
    returned = output_node(inner).args[0]
    leaves = returned if isinstance(returned, (tuple, list)) else [returned]
    return [mapping.get(leaf, leaf) if isinstance(leaf, Node) else leaf for leaf in leaves]
