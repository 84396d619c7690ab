"""The forward graph with the cotangent of every use; no weight gradient is computed.

The joint graph is traced once with one cotangent of the objectives and cut where nodes start to depend on it. The
part behind the cut is linear in the cotangent: it is repeated, by ``vmap`` or by a loop, for as many as are needed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from gramfx.errors import UnsupportedError, VerificationError
from gramfx.graph import dependents, inline, mark, named, placeholders, rename, results, value, where
from gramfx.provenance import is_random
from gramfx.torch_compat import contiguous, fake_mode_of, is_symbolic, pytree, repeated, trace
from gramfx.uses import Rows

#: ``vmap`` may fix a symbolic batch; up to so many cotangents are pulled back one by one instead.
MOST_UNROLLED = 16


@dataclass
class Joint:
    """The joint graph and where to find things in it, by name.

    ``single`` and ``full`` map tapped forward nodes to their cotangents, one per objective of a sample or one per
    objective of all; ``forward`` maps forward nodes to joint nodes. ``mutated`` counts the outputs after the
    objectives; ``random`` names the forward nodes that were drawn; ``gradients`` maps placeholders to their gradients,
    ``None`` where they have none. ``plain`` is the forward and backward with one
    cotangent; ``plain_forward`` and ``tapped`` map forward nodes, and tapped ones to their cotangents, to its nodes;
    ``returned`` names the forward nodes that are results.
    """

    graph_module: GraphModule
    rows: Rows
    single: dict[str, str] = field(default_factory=dict)
    full: dict[str, str] = field(default_factory=dict)
    forward: dict[str, str] = field(default_factory=dict)
    mutated: int = 0
    random: list[str] = field(default_factory=list)
    gradients: dict[str, str | None] = field(default_factory=dict)
    plain: GraphModule = field(default_factory=lambda: GraphModule(torch.nn.Module(), Graph()))
    plain_forward: dict[str, str] = field(default_factory=dict)
    tapped: dict[str, str] = field(default_factory=dict)
    returned: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Seeded:
    """Gradients to take beside the cotangents: of the placeholders ``wanted``, from the nodes ``returned`` with the
    placeholders ``seeds`` for their cotangents."""

    returned: tuple[Node, ...] = ()
    seeds: tuple[Node, ...] = ()
    wanted: tuple[Node, ...] = ()


def differentiate(
    graph_module: GraphModule,
    rows: Rows,
    single: Sequence[Node],
    full: Sequence[Node],
    needed: Sequence[Node],
    seeded: Seeded = Seeded(),
) -> Joint:
    """Add the cotangents of the nodes ``single`` and ``full``; keep the forward values ``needed``.

    single: nodes that one backward pass per objective of a sample serves, cotangents ``[K, *shape]`` (``K = before *
    after``; no leading dim where it is 1). full: nodes that need one pass per objective, cotangents ``[m, *shape]``.
    Nodes that no gradient reaches have no entry in the result. seeded: gradients to take as well. Exact up to the order
    of summation.
    """
    taps = list(dict.fromkeys([*single, *full]))
    draws = [node for node in graph_module.graph.nodes if is_random(node)]
    keep = list(dict.fromkeys([*results(graph_module), *needed, *_drawn(draws), *seeded.returned]))
    # The fused attention has no batching rule for its backward.
    several = bool(full) or rows.before * rows.after > 1
    with sdpa_kernel(SDPBackend.MATH) if several else contextlib.nullcontext():
        traced, reached, graded = _trace_once(graph_module, taps, keep, seeded)
    tangent = placeholders(traced)[-1]
    behind = dependents(traced, [tangent])
    returned = results(traced)
    ends = len(keep) + len(reached)
    tapped = dict(zip(reached, returned[len(keep) : ends], strict=True))
    graph, mapping = _forward_half(traced, behind, tangent)
    joint = Joint(GraphModule(torch.nn.Module(), graph), rows, random=[node.name for node in _drawn(draws)])
    joint.plain = traced
    joint.plain_forward = {n.name: at.name for n, at in zip(keep, returned, strict=False) if isinstance(at, Node)}
    joint.tapped = {node.name: cotangent.name for node, cotangent in tapped.items()}
    joint.returned = [node.name for node in (*results(graph_module), *_drawn(draws))]
    joint.forward = _named_as_before(keep, joint.plain_forward, named(traced), mapping)
    joint.gradients = dict.fromkeys(node.name for node in seeded.wanted)
    joint.gradients |= {node.name: mapping[made].name for node, made in zip(graded, returned[ends:], strict=True)}
    joint.mutated = len(results(graph_module)) - 1
    objectives = value(results(graph_module)[0])
    outputs = [named(joint.graph_module)[joint.forward[node.name]] for node in results(graph_module)]
    for part, nodes, store in (("single", single, joint.single), ("full", full, joint.full)):
        wanted = [node for node in nodes if node in tapped]
        if wanted:
            back = _backward_half(traced, behind, tangent, [tapped[node] for node in wanted])
            seeds = _seeds(rows if part == "single" else Rows(math.prod(objectives.shape), 1, False))
            outputs += _append(joint.graph_module, back, mapping, seeds, wanted, store, outputs[0])
    kept = [
        named(joint.graph_module)[name] for name in (*joint.forward.values(), *filter(None, joint.gradients.values()))
    ]
    joint.graph_module.graph.output((*outputs, *kept))
    joint.graph_module.graph.eliminate_dead_code()
    joint.graph_module.recompile()
    return joint


def _named_as_before(
    keep: Sequence[Node], places: dict[str, str], traced: dict[str, Node], mapping: dict[Node, Node]
) -> dict[str, str]:
    """Give joint nodes the names and axes of the forward nodes that they stand for; where each of these is."""
    for node in keep:
        if node.name in places:
            mapping[traced[places[node.name]]].meta["axes"] = node.meta.get("axes")
    for name, place in reversed(places.items()):
        # Without the stops two forward nodes may be one node here: it has the name of the first.
        if mapping[traced[place]].op == "call_function":
            rename(mapping[traced[place]], name)
    return {name: mapping[traced[place]].name for name, place in places.items()}


def _drawn(draws: Sequence[Node]) -> list[Node]:
    """The tensors that random ops drew: the nodes themselves, or the items read of those with several outputs."""
    return [item for node in draws for item in (node.users if isinstance(value(node), (tuple, list)) else [node])]


class _Tapped(Interpreter):
    """Runs the forward; the values of taps become leaves or stay, so that their cotangents can be asked for."""

    def __init__(self, graph_module: GraphModule, taps: Sequence[Node], keep: Sequence[Node]) -> None:
        super().__init__(graph_module)
        self.taps, self.keep = set(taps), set(keep)
        self.values: dict[Node, Any] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.linear.default and args[0].dim() > 2:
            return _folded_linear(*args)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if is_random(n) and any(isinstance(r, Tensor) and r.requires_grad for r in pytree.tree_leaves(result)):
            raise UnsupportedError(
                "an op draws random numbers and passes a gradient at once, so its draw cannot be kept apart",
                where=where(n),
                remedy="draw first, then compute with what was drawn",
            )
        if n in self.taps and not result.requires_grad:
            result = result.detach().requires_grad_()
        if n in self.taps or n in self.keep:
            self.values[n] = result
        return result


def _folded_linear(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One product instead of one for each leading index, which is what torch does where no weight gradient is asked."""
    flat = torch.ops.aten.linear.default(source.reshape(-1, source.shape[-1]), weight, bias)
    return flat.reshape(*source.shape[:-1], *weight.shape[:-1])


def _trace_once(
    graph_module: GraphModule, taps: list[Node], keep: list[Node], seeded: Seeded
) -> tuple[GraphModule, list[Node], list[Node]]:
    """``(*inputs, tangent) -> (*kept values, *cotangents of the taps that a gradient reaches, *gradients)``.

    Also which taps, and which of the placeholders wanted, a gradient reaches.
    """
    inputs = placeholders(graph_module)
    fakes = [contiguous(value(node)) for node in inputs]
    reached: list[Node] = []
    graded: list[Node] = []

    def run(*arguments: Any) -> tuple[Any, ...]:
        *given, tangent = arguments
        held = dict(zip(inputs, map(_constant, given), strict=True))
        for node in seeded.wanted:
            held[node].requires_grad_()
        with torch.enable_grad():
            tapped = _Tapped(graph_module, taps, keep)
            tapped.run(*held.values())
            found = _cotangents([tapped.values[keep[0]]], [tapped.values[node] for node in taps], [tangent])
            returned, seeds = [tapped.values[node] for node in seeded.returned], [held[node] for node in seeded.seeds]
            gradients = _cotangents(returned, [held[node] for node in seeded.wanted], seeds)
        reached[:] = [node for node, cotangent in zip(taps, found, strict=True) if cotangent is not None]
        graded[:] = [node for node, made in zip(seeded.wanted, gradients, strict=True) if made is not None]
        kept = [pytree.tree_map(_constant, tapped.values[node]) for node in keep]
        return (*kept, *(made for made in (*found, *gradients) if made is not None))

    with fake_mode_of(graph_module):
        seed = torch.ones_like(value(keep[0]).detach())
    traced = _without_stops(trace(run, [*fakes, seed]))
    for node, source in zip(placeholders(traced), inputs, strict=False):
        rename(node, source.name)
        node.target = node.name
        node.meta.update({key: held for key, held in source.meta.items() if key != "val"})
    return traced, reached, graded


def _without_stops(traced: GraphModule) -> GraphModule:
    """Nothing is differentiated after this, so no gradient needs to be stopped."""
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    return traced


def _cotangents(
    outputs: Sequence[Tensor], tensors: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    pairs = [(out, tangent) for out, tangent in zip(outputs, tangents, strict=True) if out.requires_grad]
    if not pairs or not tensors:
        return [None] * len(tensors)
    outs, seeds = zip(*pairs, strict=True)
    return torch.autograd.grad(outs, tensors, seeds, retain_graph=True, allow_unused=True)


def _constant(held: Any) -> Any:
    return held.detach() if isinstance(held, Tensor) else held


def _forward_half(traced: GraphModule, behind: set[Node], tangent: Node) -> tuple[Graph, dict[Node, Node]]:
    graph = Graph()
    mapping: dict[Node, Node] = {}
    for node in traced.graph.nodes:
        if node not in behind and node.op != "output":
            mapping[node] = graph.node_copy(node, lambda argument: mapping[argument])
    return graph, mapping


def _backward_half(
    traced: GraphModule, behind: set[Node], tangent: Node, wanted: Sequence[Node]
) -> tuple[GraphModule, list[Node]]:
    """``(tangent, *residuals) -> wanted``, and the residuals as nodes of ``traced``."""
    needed = _ancestors(wanted) & behind
    ordered = [node for node in traced.graph.nodes if node in needed]
    read = {source for node in ordered for source in node.all_input_nodes} | (set(wanted) - behind)
    residuals = [node for node in traced.graph.nodes if node in read - behind]
    graph = Graph()
    mapping = {tangent: graph.placeholder("tangent")}
    for node in residuals:
        mapping[node] = graph.placeholder(node.name)
    for node in ordered:
        if node is not tangent:
            mapping[node] = graph.node_copy(node, lambda argument: mapping[argument])
    graph.output(tuple(mapping[node] for node in wanted))
    return GraphModule(torch.nn.Module(), graph), residuals


def _ancestors(nodes: Sequence[Node]) -> set[Node]:
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


Seeds = Callable[[Tensor], Tensor]


def _seeds(rows: Rows) -> Seeds:
    """From objectives to the cotangents to pull back, ``[K, *objectives.shape]``: ones at one objective a sample."""

    def make(objectives: Tensor) -> Tensor:
        count = rows.before * rows.after
        unit = torch.eye(count, dtype=objectives.dtype, device=objectives.device)
        if not rows.batched:
            return unit.reshape(count, *objectives.shape)
        batch = objectives.numel() // count
        unit = unit.reshape(count, rows.before, 1, rows.after)
        return unit.expand(count, rows.before, batch, rows.after).reshape(count, *objectives.shape)

    return make


def _append(
    joint: GraphModule,
    back: tuple[GraphModule, list[Node]],
    mapping: dict[Node, Node],
    seeds: Seeds,
    wanted: Sequence[Node],
    store: dict[str, str],
    objectives: Node,
) -> list[Node]:
    """Trace the backward half for all seeds and put it behind the forward one."""
    half, residuals = back
    symbolic = any(is_symbolic(size) for node in joint.graph.nodes for size in _sizes(node))
    inputs = [objectives, *(mapping[node] for node in residuals)]

    def run(values: Tensor, *held: Any) -> Sequence[Tensor]:
        tangents = seeds(values)
        if tangents.shape[0] == 1:
            return half(tangents[0], *held)
        if symbolic and len(tangents) <= MOST_UNROLLED:
            each = [half(tangent, *held) for tangent in tangents.unbind()]
            return [torch.stack(one) for one in zip(*each, strict=True)]
        ops = (node.target for node in half.graph.nodes)
        return list(repeated(half, ops, (0, *(None for _ in held)))(tangents, *held))

    with torch.no_grad():
        inner = trace(run, [value(node) for node in inputs])
    mark(inner, "backward")
    made = inline(joint.graph, inner, inputs)
    for node, cotangent in zip(wanted, made, strict=True):
        # One cotangent may serve several uses, and may be a value of the forward graph.
        if cotangent not in mapping.values() and not cotangent.name.endswith("_cotangent"):
            rename(cotangent, f"{node.name}_cotangent")
            cotangent.meta |= {"role": ("cotangent", node.name), "axes": node.meta.get("axes")}
        store[node.name] = cotangent.name
    return made


def _sizes(node: Node) -> list[Any]:
    return [
        size for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor) for size in leaf.shape
    ]


def verify_joint(joint: Joint) -> None:
    """Raise :class:`VerificationError` where a cotangent lost its node or a symbolic batch its symbol."""
    nodes = named(joint.graph_module)
    for name in (*joint.single.values(), *joint.full.values(), *joint.forward.values()):
        if name not in nodes:
            raise VerificationError("the joint graph lost a node", got=name)
