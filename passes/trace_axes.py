"""Follow the batch through a functional ATen graph and find the ops whose derivatives mix samples.

An abstract interpretation: ``node.meta["axes"]`` becomes the Value of every node (a tuple for several outputs, None for
what is no tensor). A rule that sees samples mix flags the edge (output, operand) and goes on; a sweep back from the
objectives then tells which flagged edges, and which values behind them, the objectives depend on.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_flatten

from gramfx.axes import Loc, Size, Value, holds, shape_of, size_of
from gramfx.errors import VerificationError
from gramfx.functions import BACKWARD
from gramfx.graph import target_name, where
from gramfx.rules import axis_rule
from gramfx.rules.decompose import Hole, StandIn, decomposed
from gramfx.rules.table import Call, Operand, opaque

Axes = Value | tuple[Value | None, ...] | None
Flags = dict[tuple[Node, int], dict[Node, str]]  # (node, output) -> operand -> why its samples mix there


@dataclass(frozen=True)
class CouplingEdge:
    """``operand`` brings several samples into one sample of ``node``."""

    node: Node
    operand: Node
    reason: str

    def __str__(self) -> str:
        return f"{where(self.node)}: {self.operand.name} {self.reason}"


@dataclass(frozen=True)
class Coupling:
    """``edges``: the flagged edges the objectives depend on, in program order. ``coupled``: the nodes behind them."""

    edges: list[CouplingEdge]
    coupled: set[Node]

    @property
    def first(self) -> CouplingEdge | None:
        """The first in program order."""
        return self.edges[0] if self.edges else None


def trace_axes(
    graph_module: GraphModule,
    batch_dims: Mapping[str, int],
    batch_size: int | torch.SymInt,
    trainable: Collection[str],
    objectives: Node | None = None,
    rows: Mapping[str, Loc] = MappingProxyType({}),
) -> Coupling:
    """Set ``meta["axes"]`` on every node and say what couples the objectives.

    ``batch_dims``: the dim of the batch of each placeholder that has one. ``trainable``: the placeholders derivatives
    are taken by. ``objectives``: the node of the objectives, by default the first output. ``rows``: the places of
    placeholders in which samples are runs of rows.
    """
    inputs = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), torch.Tensor):
            shape = shape_of(node.meta["val"])
            batch = Loc(batch_dims[node.name] % len(shape), 1) if node.name in batch_dims else rows.get(node.name)
            inputs[node.name] = Value(shape, node.name in trainable, batch)
    flags = propagate(graph_module, inputs, size_of(batch_size))
    return sweep(graph_module.graph, flags, objectives or _outputs(graph_module.graph)[0])


def verify_batched(graph_module: GraphModule, batch_size: int | torch.SymInt) -> None:
    """Raise :class:`VerificationError` where a tensor has no value, or one whose dim cannot hold the samples."""
    batch = size_of(batch_size)
    for node in graph_module.graph.nodes:
        if "axes" not in node.meta:
            raise VerificationError("the axes of a node are unknown", got=where(node))
        for value in () if node.op == "output" else _values(node):
            if value is None or value.batch is None:
                continue
            loc = value.batch
            if loc.dim >= len(value.shape) or not holds(value.shape[loc.dim], loc.inner, batch):
                raise VerificationError("the samples are in a dim that cannot hold them", got=where(node))


def propagate(graph_module: GraphModule, inputs: Mapping[str, Value], batch: Size, decompose: bool = True) -> Flags:
    """Set ``meta["axes"]`` on every node from the placeholders' values; the flagged edges."""
    flags: Flags = {}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            node.meta["axes"] = inputs.get(node.name, _constant(node.meta.get("val")))
        elif node.op == "get_attr":
            node.meta["axes"] = _constant(node.meta.get("val", getattr(graph_module, str(node.target), None)))
        elif node.op == "output":
            node.meta["axes"] = tuple(arg.meta["axes"] if isinstance(arg, Node) else None for arg in _outputs_of(node))
        elif node.target is operator.getitem and isinstance(node.args[0].meta["axes"], tuple):
            node.meta["axes"] = node.args[0].meta["axes"][node.args[1]]
        else:
            node.meta["axes"] = _evaluate(node, batch, flags, decompose)
    return flags


def sweep(graph: Graph, flags: Flags, objectives: Node) -> Coupling:
    """Walk back from the objectives along derivative paths; what lies behind a flagged edge is coupled."""
    reached: dict[Node, dict[int, bool]] = {objectives: dict.fromkeys(range(len(_values(objectives))), False)}
    edges: list[CouplingEdge] = []
    for node in reversed(graph.nodes):
        for index, behind in reached.get(node, {}).items():
            if node.target is operator.getitem and isinstance(node.args[0].meta["axes"], tuple):
                _reach(reached, node.args[0], node.args[1], behind)
                continue
            for operand in node.all_input_nodes:
                reason = flags.get((node, index), {}).get(operand)
                if reason is not None:
                    edges.append(CouplingEdge(node, operand, reason))
                for output, value in enumerate(_values(operand)):
                    if value is not None and value.differentiable:
                        _reach(reached, operand, output, behind or reason is not None)
    distinct = list(dict.fromkeys(reversed(edges)))
    return Coupling(distinct, {node for node, outputs in reached.items() if any(outputs.values())})


def _reach(reached: dict[Node, dict[int, bool]], node: Node, output: int, behind: bool) -> None:
    outputs = reached.setdefault(node, {})
    outputs[output] = outputs.get(output, False) or behind


def _values(node: Node) -> tuple[Value | None, ...]:
    axes = node.meta["axes"]
    return axes if isinstance(axes, tuple) else (axes,)


def _outputs_of(node: Node) -> list[Any]:
    return tree_flatten(node.args[0])[0]


def _outputs(graph: Graph) -> list[Node]:
    return [arg for arg in _outputs_of(graph.output_node()) if isinstance(arg, Node)]


def _constant(tensor: Any) -> Value | None:
    """A value that belongs to no sample and has no derivative."""
    return Value(shape_of(tensor), False, None) if isinstance(tensor, torch.Tensor) else None


def _evaluate(node: Node, batch: Size, flags: Flags, decompose: bool) -> Axes:
    """One op call: its rule, else the rules of its parts, else every sample may meet every other."""
    result = node.meta.get("val")
    tensors = list(result) if isinstance(result, (list, tuple)) else [result]
    shapes = tuple(shape_of(t) if isinstance(t, torch.Tensor) else () for t in tensors)
    rule = axis_rule(node.target) or opaque
    values: list[Value | None] = []
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            values.append(None)
            continue
        floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        call = Call(cast(Any, node.target), _arguments(node), shapes, index, floating, batch)
        parts = by_parts(call) if rule is opaque and decompose else None
        values.append(parts or rule(call))
        for operand in call.operands:
            if id(operand) not in call.seen and parts is None:
                call.flag(operand, "is an argument its rule does not know")
        if call.flags:
            flags[node, index] = call.flags
    return tuple(values) if isinstance(result, (list, tuple)) else values[0]


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments by their schema names, defaults filled in, tensors as operands and symbolic sizes as Size."""

    def known(argument: Any) -> Any:
        if not isinstance(argument, Node):
            return argument
        if isinstance(argument.meta["axes"], tuple):
            return [Operand(argument, value) for value in argument.meta["axes"] if value is not None]
        if argument.meta["axes"] is not None:
            return Operand(argument, argument.meta["axes"])
        number = argument.meta.get("val")
        return size_of(number) if isinstance(number, torch.SymInt) else number

    positional = [map_aggregate(argument, known) for argument in node.args]
    named = {name: map_aggregate(argument, known) for name, argument in node.kwargs.items()}
    if not isinstance(node.target, torch._ops.OpOverload):
        return {**{f"argument {at}": argument for at, argument in enumerate(positional)}, **named}
    schema = node.target._schema.arguments
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in schema}
    return {**defaults, **{a.name: value for a, value in zip(schema, positional, strict=False)}, **named}


def by_parts(call: Call) -> Value | None:
    """The value of an output from the ops an op without a rule decomposes into, None if it does not."""
    if not isinstance(call.op, torch._ops.OpOverload):
        return None
    stand_in = StandIn(call)
    parts = decomposed(call.op, _stand_ins(call, stand_in))
    if parts is None:
        return None
    flags = _propagated(parts, [stand_in.value(operand.value) for operand in call.operands], call, stand_in)
    if call.op in BACKWARD:
        return _by_backward(call, stand_in, parts)
    output = _outputs(parts.graph)[call.index]
    _flag_coupled(call, call.operands, parts, flags, output)
    return _placed(call, stand_in, output.meta["axes"])


def _stand_ins(call: Call, stand_in: StandIn) -> dict[str, Any]:
    return {name: stand_in.argument(value) for name, value in call.args.items()}


def _propagated(parts: GraphModule, values: Sequence[Value], call: Call, stand_in: StandIn) -> Flags:
    names = [node.name for node in parts.graph.find_nodes(op="placeholder")]
    inputs = dict(zip(names, values, strict=True))
    return propagate(parts, inputs, stand_in.size(call.batch), decompose=False)


def _flag_coupled(call: Call, operands: Sequence[Operand], parts: GraphModule, flags: Flags, output: Node) -> None:
    """Flag the operands, one for each placeholder of the parts, whose samples mix on the way to ``output``."""
    coupling = sweep(parts.graph, flags, output)
    for node, operand in zip(parts.graph.find_nodes(op="placeholder"), operands, strict=True):
        call.seen.add(id(operand))
        if node in coupling.coupled:
            call.flag(operand, f"{coupling.edges[0].reason} ({target_name(coupling.edges[0].node)} inside)")


def _placed(call: Call, stand_in: StandIn, value: Value) -> Value:
    batch = None if value.batch is None else stand_in.original(value.batch)
    if batch is None and value.differentiable:
        # What has no place for the samples, or none that holds at every batch size, has them mixed.
        for operand in call.operands:
            call.flag(operand, "loses its samples inside an op taken apart")
    return Value(call.shape, value.differentiable and call.floating, batch)


def _by_backward(call: Call, stand_in: StandIn, parts: GraphModule) -> Value | None:
    """Of a hand-written Function: samples lie where its forward puts them, and mix where its backward mixes them."""
    outs = _outputs(parts.graph)
    holes = {f"c{i}": Hole(out.meta["axes"].shape, out.meta["val"].dtype) for i, out in enumerate(outs)}
    backward = decomposed(BACKWARD[call.op], _stand_ins(call, stand_in) | holes)
    if backward is None:
        return None
    fixed = [dataclasses.replace(stand_in.value(o.value), differentiable=False) for o in call.operands]
    cotangents = [dataclasses.replace(out.meta["axes"], differentiable=True) for out in outs]
    flags = _propagated(backward, [*fixed, *cotangents], call, stand_in)
    for operand, gradient in zip(call.operands, _outputs(backward.graph), strict=True):
        found = gradient.meta["axes"]
        if operand.value.differentiable and found.differentiable:
            everyone = [operand] * (len(fixed) + len(cotangents))
            _flag_coupled(call, everyone, backward, flags, gradient)
            if found.batch != stand_in.value(operand.value).batch:
                call.flag(operand, "has a gradient whose samples are not in its own place")
    call.seen.update(id(operand) for operand in call.operands)
    depends = call.floating and any(operand.value.differentiable for operand in call.operands)
    return _placed(call, stand_in, dataclasses.replace(outs[call.index].meta["axes"], differentiable=depends))
