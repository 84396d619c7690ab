"""A stage as data: what every way of showing it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from gramfx.axes import Loc, Value
from gramfx.fitting import Lowering
from gramfx.gramians import terms_of
from gramfx.graph import module_path, source_line, target_name
from gramfx.ops import GRAMIAN
from gramfx.plan import Contraction, Plan
from gramfx.torch_compat import pytree, spelled

_SHORT = {"torch.float64": "f64", "torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16"}
_SHORT |= {"torch.int64": "i64", "torch.int32": "i32", "torch.bool": "b8", "torch.complex64": "c64"}
_SHORT |= {"torch.int16": "i16", "torch.int8": "i8", "torch.uint8": "u8", "torch.complex128": "c128"}
#: What a node is there for.
KINDS = ("input", "parameter", "use", "forward", "backward", "cotangent", "gramian", "contraction", "sum", "output")
#: Those that come after the forward.
BACKWARD = ("backward", "cotangent", "gramian", "contraction", "sum")


@dataclass(frozen=True)
class NodeView:
    """One node.

    ``kind``: one of :data:`KINDS`; ``subject``: the parameter that is read or contracted, or what the cotangent belongs
    to; ``value``: dtype and axes, ``B`` for the batch; ``reads``: names of nodes; ``arguments``: all arguments as text;
    ``module`` and ``source``: where in the model; ``plan``: of a Gramian how it is contracted and what that costs.
    """

    name: str
    kind: str
    subject: str
    op: str
    value: str
    reads: tuple[str, ...]
    arguments: str
    module: str
    source: str
    plan: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """Kind and subject in words, ``""`` where there is nothing to say."""
        if self.kind in ("forward", "backward", "output"):
            return ""
        words = {"use": "use of", "cotangent": "cotangent of", "gramian": "Gramian of", "contraction": "contracts"}
        text = f"{words.get(self.kind, self.kind)} {self.subject}".rstrip()
        uses = self.plan.get("uses", ())
        if len(uses) > 1:
            text += f", {len(uses)} uses with{'' if self.plan['cross'] else 'out'} cross terms"
        return f"{text} [{self.plan['label']}]" if "label" in self.plan else text


@dataclass(frozen=True)
class StageView:
    """All nodes of a stage, in order."""

    name: str
    nodes: tuple[NodeView, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def view(lowering: Lowering, stage: str) -> StageView:
    """One stage of a program."""
    return _Known(lowering).view(stage, lowering.stages[stage])


def views(lowering: Lowering) -> dict[str, StageView]:
    """Every stage of a program, by name and in order."""
    return {stage: view(lowering, stage) for stage in lowering.stages}


class _Known:
    """What is known besides the stage that is looked at."""

    def __init__(self, lowering: Lowering) -> None:
        batched = lowering.stages.get("batched")
        nodes = list(batched.graph.nodes) if batched is not None else []
        self.modules = {node.name: module_path(node) for node in nodes}
        self.uses = {use.clone.name: _parameters(use.clone) for use in lowering.uses}
        self.batch = next((_batch(n) for n in nodes if n.meta.get("batch_dim") is not None), None)
        self.plan = lowering.plan

    def view(self, stage: str, graph_module: GraphModule) -> StageView:
        modules = _modules(graph_module, self.modules)
        return StageView(stage, tuple(self._node(stage, node, modules) for node in graph_module.graph.nodes))

    def _node(self, stage: str, node: Node, modules: Mapping[Node, str]) -> NodeView:
        kind, subject = self._role(node)
        read = tuple(dict.fromkeys(one.name for one in node.all_input_nodes))
        shown = "" if node.op == "placeholder" else _arguments(node)
        planned = self.plan if stage in ("planned", "lowered") else None
        return NodeView(
            name=node.name,
            kind=kind,
            subject=subject,
            op=node.op if node.op in ("placeholder", "output") else target_name(node),
            value=", ".join(filter(None, (self._value(one, axes) for one, axes in _leaves(node)))),
            reads=read,
            arguments=shown,
            module=modules.get(node, ""),
            source=source_line(node),
            plan=_planned(node, planned) if node.target is GRAMIAN else {},
        )

    def _role(self, node: Node) -> tuple[str, str]:
        if node.op == "output":
            return "output", ""
        if node.op == "placeholder":
            name = node.meta.get("parameter")
            return ("parameter", str(name)) if name else ("input", "")
        if node.name in self.uses:
            return "use", self.uses[node.name]
        role: tuple[str, str] = node.meta.get("role", ("forward", ""))
        return role

    def _value(self, held: Any, axes: Value | None) -> str:
        if not isinstance(held, Tensor):
            return "" if held is None else spelled(held)
        dtype = _SHORT.get(str(held.dtype), str(held.dtype).removeprefix("torch."))
        sizes = [spelled(size) for size in held.shape]
        if axes is not None and axes.batch is not None:
            # Cotangents of several objectives a sample have one more dim, in front.
            dim = axes.batch.dim + len(sizes) - len(axes.shape)
            sizes[dim] = self._batched(held.shape[dim], axes.batch, sizes[dim])
        return f"{dtype}[{', '.join(sizes)}]"

    def _batched(self, size: Any, loc: Loc, plain: str) -> str:
        """``5·B·2`` for a dim whose index holds the sample between others."""
        batch, inner = self.batch, loc.inner
        if not isinstance(batch, int) or not isinstance(size, int) or not isinstance(inner, int):
            return plain
        outer = size // (batch * inner)
        parts = [str(outer)] * (outer > 1) + ["B"] + [str(inner)] * (inner > 1)
        return "·".join(parts) if outer * batch * inner == size else plain


def _batch(node: Node) -> Any:
    return node.meta["val"].shape[node.meta["batch_dim"]]


def _parameters(clone: Node) -> str:
    """The parameters that a use reads, by name."""
    found, pending, seen = [], [clone], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if "parameter" in node.meta:
            found.append(str(node.meta["parameter"]))
        pending.extend(node.all_input_nodes)
    return ", ".join(sorted(found))


def _modules(graph_module: GraphModule, known: Mapping[str, str]) -> dict[Node, str]:
    """The path of the module that each node belongs to. known: by the names of the forward's nodes.

    A node of the backward pass, or of which nobody knows, belongs where the latest value that it reads of the forward
    belongs, else where the latest one that it reads at all does.
    """
    found: dict[Node, str] = {}
    order = {node: number for number, node in enumerate(graph_module.graph.nodes)}
    for node in graph_module.graph.nodes:
        role, subject = node.meta.get("role", ("", ""))
        if role in ("gramian", "contraction") or (node.op == "placeholder" and "parameter" in node.meta):
            found[node] = str(subject or node.meta["parameter"]).rpartition(".")[0]
        elif role == "cotangent":
            found[node] = known.get(subject, "")
        elif node.op not in ("placeholder", "output") and role != "sum":
            # A call of the forward outside of all modules, as in the objective, has a stack that says so.
            stacked = role != "backward" and node.meta.get("nn_module_stack")
            found[node] = module_path(node) if stacked else _of_reads(node, found, order)
    return found


def _of_reads(node: Node, found: Mapping[Node, str], order: Mapping[Node, int]) -> str:
    read = sorted((one for one in node.all_input_nodes if found.get(one)), key=order.__getitem__)
    forward = [one for one in read if "role" not in one.meta]
    return found[(forward or read)[-1]] if read else ""


def _leaves(node: Node) -> list[tuple[Any, Value | None]]:
    """Each value that a node makes, and its axes where they are known."""
    held = node.meta.get("val") if node.op != "output" else None
    values = held if isinstance(held, (tuple, list)) else [held]
    axes = node.meta.get("axes")
    each = axes if isinstance(axes, tuple) and len(axes) == len(values) else [axes] * len(values)
    return [(one, known if isinstance(known, Value) else None) for one, known in zip(values, each, strict=True)]


def _arguments(node: Node) -> str:
    return ", ".join(_argument(arg) for arg in pytree.tree_leaves((node.args, node.kwargs)))


def _argument(argument: Any) -> str:
    shown = str(argument)
    return shown if len(shown) <= 60 else "…"


def _planned(node: Node, plan: Plan | None) -> dict[str, Any]:
    """The uses that a Gramian node contracts, and how, where that is planned."""
    terms = terms_of(node)
    known: dict[str, Any] = {"uses": [term.use for term in terms.terms], "cross": terms.cross}
    found: Contraction | None = None if plan is None else plan.of(terms.parameter)
    if found is None:
        return known
    shown = {"label": found.label, "form": found.form, "chunks": found.chunks, "flops": found.flops}
    shown |= {"bytes": found.peak, "seconds": found.seconds, "batch": str(found.regime), "then": found.then}
    return {**known, **{key: held for key, held in {**shown, "fallback": found.fallback}.items() if held != ""}}
