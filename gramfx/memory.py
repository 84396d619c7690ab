"""How many bytes are alive at each node of a graph."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gramfx.devices import allocated
from gramfx.graph import arguments, results, value
from gramfx.sketch import evaluated

aten = torch.ops.aten
#: A tensor of its own memory: the node that made it, and which of its outputs.
Storage = tuple[Node, int]

#: Ops that return their operand's memory though their schema does not say so.
_VIEWS = {aten._unsafe_view.default, aten.lift_fresh.default}


@dataclass(frozen=True)
class Added:
    """What a node does besides what its graph says: ``reads`` more, needs ``scratch`` bytes while it runs, and leaves
    ``kept`` bytes alive until the end."""

    reads: tuple[Node, ...] = ()
    scratch: int = 0
    kept: int = 0

    def plus(self, other: Added) -> Added:
        """One after the other at the same node."""
        return Added((*self.reads, *other.reads), max(self.scratch, other.scratch), self.kept + other.kept)


@dataclass
class Profile:
    """Bytes alive: ``before`` and ``during`` each node, inputs excepted."""

    before: dict[Node, int] = field(default_factory=dict)
    during: dict[Node, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The most at any node."""
        return max(self.during.values(), default=0)


def profile(
    graph_module: GraphModule,
    batch: int,
    added: Mapping[Node, Added] | None = None,
    kept: Sequence[Node] | None = None,
    freed: Collection[Node] = (),
) -> Profile:
    """Follow allocations and last uses, as generated code frees at the last use; symbolic sizes at ``batch``.

    kept: what is alive at the end, by default all that the graph returns. freed: placeholders that count, until their
    last use.
    """
    added = added or {}
    held = storages(graph_module)
    last: dict[Storage, Node] = {}
    for node in graph_module.graph.nodes:
        if node.op != "output":
            reads = (node, *node.all_input_nodes, *added.get(node, Added()).reads)
            last |= dict.fromkeys((s for read in reads for s in held[read]), node)
    for node in results(graph_module) if kept is None else kept:
        for storage in held[node] if isinstance(node, Node) else ():
            last.pop(storage, None)
    return _walk(graph_module, batch, added, held, last, freed)


def _walk(
    graph_module: GraphModule,
    batch: int,
    added: Mapping[Node, Added],
    held: Mapping[Node, list[Storage]],
    last: Mapping[Storage, Node],
    freed: Collection[Node],
) -> Profile:
    found = Profile()
    alive = sum(nbytes(storage, batch) for node in freed for storage in held[node])
    dying: dict[Node, list[Storage]] = {}
    for storage, node in last.items():
        dying.setdefault(node, []).append(storage)
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        more = added.get(node, Added())
        found.before[node] = alive
        alive += sum(nbytes(s, batch) for s in held[node] if s[0] is node) + more.kept
        found.during[node] = alive + more.scratch
        alive -= sum(nbytes(s, batch) for s in dying.get(node, ()) if s[0].op != "placeholder" or s[0] in freed)
    return found


def nbytes(storage: Storage, batch: int) -> int:
    """What the device's allocator gives out for a tensor that a node makes."""
    node, index = storage
    held = value(node)
    tensor = held[index] if isinstance(held, (tuple, list)) else held
    size = int(tensor.dtype.itemsize * math.prod(evaluated(size, batch) for size in tensor.shape))
    return allocated(size, tensor.device)


def touched(node: Node, batch: int) -> int:
    """The bytes that a node reads and writes; none for one that only looks at its operand's memory."""
    if node.target is operator.getitem or is_view(node):
        return 0
    return sum(map(_all_bytes, (node, *node.all_input_nodes), itertools.repeat(batch)))


def _all_bytes(node: Node, batch: int) -> int:
    """Of all tensors that a node makes."""
    made = node.meta.get("val")
    outputs = made if isinstance(made, (tuple, list)) else [made]
    return sum(nbytes((node, index), batch) for index, one in enumerate(outputs) if isinstance(one, Tensor))


def storages(graph_module: GraphModule) -> dict[Node, list[Storage]]:
    """The memory that each node's value lives in."""
    held: dict[Node, list[Storage]] = {}
    for node in graph_module.graph.nodes:
        if node.op == "output":
            continue
        if node.target is operator.getitem:
            source, index = arguments(node)
            held[node] = [s for s in held[source] if s[0] is not source or s[1] == index]
        elif is_view(node):
            held[node] = list(held[node.all_input_nodes[0]])
        else:
            made = node.meta.get("val")
            outputs = list(made) if isinstance(made, (tuple, list)) else [made]
            held[node] = [(node, index) for index, one in enumerate(outputs) if isinstance(one, Tensor)]
    return held


def is_view(node: Node) -> bool:
    """Whether a node returns its operand's memory."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    if node.target is aten.clone.default and node.all_input_nodes[0].op == "placeholder" and not node.kwargs:
        # A clone that tells uses apart; it is gone from the lowered graph.
        return True
    returns = node.target._schema.returns
    return node.target in _VIEWS or (bool(returns) and returns[0].alias_info is not None)
