"""What a capture gives, and how its graph is put into the one form that the passes start from."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from gramfx.errors import ParameterMutationError, UnsupportedError
from gramfx.graph import argument, arguments, where
from gramfx.program import Call, Program, user_name
from gramfx.readings import Reading
from gramfx.torch_compat import RELAXED

aten = torch.ops.aten

# Facts about dtypes and layouts that hold by construction.
_ASSERTIONS = {aten._assert_tensor_metadata.default}
_REFUSED = {
    aten.embedding_renorm.default: "an embedding with max_norm rewrites its weight in the forward, outside of autograd",
}


@dataclass(frozen=True)
class Slot:
    """What a placeholder stands for: a tensor found anew at each call.

    ``key`` is a dotted name in the program (parameter, buffer), or an index into the inputs or the constants.
    ``real``: a complex tensor that gradients are taken by, seen as ``[..., 2]``, as the Jacobian's columns are.
    """

    kind: Literal["parameter", "buffer", "input", "constant"]
    key: str | int
    name: str
    real: bool = False

    def held(self, program: Program, inputs: Sequence[Tensor], constants: Sequence[Tensor] = ()) -> Tensor:
        """The tensor that it stands for now."""
        if isinstance(self.key, str):
            found: Tensor = operator.attrgetter(self.key)(program)
            return found
        return (inputs if self.kind == "input" else constants)[self.key]

    def seen(self, tensor: Tensor) -> Tensor:
        """The tensor as the graph takes it."""
        return torch.view_as_real(tensor.resolve_conj()) if self.real else tensor


@dataclass(frozen=True)
class Probe:
    """What the eager model says of one combination of its objectives: ``|Jᵀ weights|²``, to ``tolerance``.

    ``noise``: entries of ``Jᵀ weights`` of this size may be rounding alone.
    """

    weights: Tensor
    squared_norm: float
    tolerance: float
    noise: float


@dataclass
class Captured:
    """A graph ``(*slots) -> (*returned, *new values of the mutated slots)``, and how it was had.

    A program returns its objectives, and then the tensors of its ``readings``; a region of a model, several outputs, of
    which some are ``differentiable``.
    """

    graph_module: GraphModule
    slots: tuple[Slot, ...]
    mutated: tuple[int, ...]
    constants: tuple[Tensor, ...]
    method: Literal["export", "trace", "guarded"]
    probe: Probe | None = None
    differentiable: tuple[bool, ...] = (True,)
    #: Not where the forward leaves other attributes than it found: the next call finds those.
    lasting: bool = True
    readings: list[Reading] = field(default_factory=list)

    def fetch(self, program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the slots stand for now; ``inputs`` are the call's, then the loose ones."""
        return [slot.seen(slot.held(program, inputs, self.constants)) for slot in self.slots]


def normal_form(
    graph_module: GraphModule,
    slots: Sequence[Slot],
    outputs: Sequence[int | None],
    program: Program,
    call: Call,
    constants: Sequence[Tensor] = (),
    method: Literal["export", "trace", "guarded"] = "export",
) -> Captured:
    """One placeholder a tensor, named after it; what the program returns first; no views that need strides.

    ``outputs[i]`` is the index of the slot whose new value output ``i`` is, or ``None`` for what is returned. Each
    placeholder's ``meta`` says what it is: ``parameter`` (its user's name, where trainable), ``batch_dim``, and
    ``requires_grad``.
    """
    inputs = [*call.tensors, *program.loose]
    tensors = [slot.held(program, inputs, constants) for slot in slots]
    slots = [replace(s, real=t.is_complex() and t.requires_grad) for s, t in zip(slots, tensors, strict=True)]
    first = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
    keep = sorted(set(first.values()))
    graph = Graph()
    made: dict[Node, Node] = {}
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    by_index: dict[int, Node] = {}
    for index in keep:
        by_index[index] = _placeholder(graph, slots[index], tensors[index], call, placeholders[index])
        if slots[index].real:
            by_index[index] = _seen_as_complex(graph, by_index[index])
    for index, node in enumerate(placeholders):
        made[node] = by_index[first[id(tensors[index])]]
    for node in graph_module.graph.nodes:
        if node.op not in ("placeholder", "output") and node.target not in _ASSERTIONS:
            made[node] = _copied(graph, node, made)
    results = next(node for node in graph_module.graph.nodes if node.op == "output").args[0]
    renewed = {
        keep.index(first[id(tensors[i])]): made[n] for n, i in zip(results, outputs, strict=True) if i is not None
    }
    returned = [made[node] for node, index in zip(results, outputs, strict=True) if index is None]
    for index in renewed:
        _refuse_mutation(slots[keep[index]], tensors[keep[index]])
    graph.output((*returned, *renewed.values()))
    normal = GraphModule(torch.nn.Module(), graph)
    normal.graph.eliminate_dead_code()
    normal.recompile()
    return Captured(normal, tuple(slots[i] for i in keep), tuple(renewed), tuple(constants), method)


def _placeholder(graph: Graph, slot: Slot, tensor: Tensor, call: Call, original: Node) -> Node:
    name = re.sub(r"\W", "_", slot.name)
    node = graph.placeholder(name if not name[0].isdigit() else f"p_{name}")
    node.meta = {"val": original.meta["val"], "requires_grad": tensor.requires_grad}
    if tensor.requires_grad and tensor.is_leaf and (slot.kind != "input" or int(slot.key) >= len(call.tensors)):
        node.meta["parameter"] = slot.name
    if slot.kind == "input" and int(slot.key) < len(call.tensors):
        node.meta["batch_dim"] = call.batch_dims[int(slot.key)]
        node.meta |= call.rows_of(int(slot.key))
    return node


def _seen_as_complex(graph: Graph, node: Node) -> Node:
    """The complex value of a placeholder, which itself is real from now on."""
    whole = graph.call_function(aten.view_as_complex.default, (node,))
    whole.meta["val"] = node.meta["val"]
    with whole.meta["val"].fake_mode:
        node.meta["val"] = torch.view_as_real(node.meta["val"].detach().resolve_conj())
    return whole


def _copied(graph: Graph, node: Node, made: dict[Node, Node]) -> Node:
    if node.target in _REFUSED:
        raise ParameterMutationError(
            _REFUSED[node.target],
            where=where(node),
            remedy="normalise the rows in the forward, with torch.nn.functional.normalize for instance",
        )
    if isinstance(node.target, torch._ops.HigherOrderOperator) or node.op not in ("call_function",):
        raise UnsupportedError("the graph holds a subgraph that gramfx cannot look into", where=where(node))
    if node.target is aten.copy.default:
        return _overwritten(graph, node, made)
    copy = graph.node_copy(node, lambda argument: made[argument])
    copy.target = RELAXED.get(node.target, node.target)
    if copy.target is aten.slice_scatter.default:
        _within_bounds(copy)
    return copy


def _within_bounds(node: Node) -> None:
    """Give a written slice bounds from 0 to the dim's size, which ``vmap`` in torch takes for granted."""
    dim, start, end = argument(node, 2, "dim", 0), argument(node, 3, "start"), argument(node, 4, "end")
    size = node.meta["val"].shape[dim]
    if all(one is None or isinstance(one, int) for one in (start, end)) and isinstance(size, int):
        start, end, _ = slice(start, end).indices(size)
        node.args = (*arguments(node)[:2], dim, start, end, argument(node, 5, "step", 1))
        node.kwargs = {}


def _overwritten(graph: Graph, node: Node, made: dict[Node, Node]) -> Node:
    """``copy(old, new)``, which torch cannot differentiate, as ``new`` in the shape and dtype of ``old``."""
    old, new = (made[argument] for argument in arguments(node)[:2])
    if old.meta["val"].dtype != new.meta["val"].dtype:
        new = graph.call_function(aten._to_copy.default, (new,), {"dtype": old.meta["val"].dtype})
        new.meta = dict(node.meta)
    full = graph.call_function(aten.expand_as.default, (new, old))
    full.meta = dict(node.meta)
    return full


def _refuse_mutation(slot: Slot, tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise ParameterMutationError(
            "the forward changes a trainable parameter in place",
            got=slot.name,
            remedy="compute a new tensor from the parameter instead, or make it a buffer",
        )


def slot_of_state(name: str, trainable: bool) -> Slot:
    """The slot of a parameter or buffer, by its dotted name in the program."""
    return Slot("parameter" if trainable else "buffer", name, user_name(name))


def slot_of_input(index: int, call: Call) -> Slot:
    """The slot of the call's tensor ``index``, or of a tensor closed over where the call has fewer."""
    count = len(call.tensors)
    return Slot("input", index, f"input{index}" if index < count else f"closure{index - count}")
