"""``Jᵀ w``: from the cotangents that the step had anyway, or by another forward and backward pass.

Kept: each cotangent is scaled by its objective's weight, and the op of each use gives its weight gradient from that:

    Jᵀ w = Σ_uses VJP_use( Σ_objectives w · cotangent )

Replayed: the program is run and differentiated anew, with the random draws of the first run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from gramfx.fallback import outputs_of
from gramfx.forms import Form
from gramfx.graph import named, placeholders, results, value
from gramfx.memory import Storage, nbytes, profile, storages
from gramfx.passes.differentiate import Joint
from gramfx.ragged import owners
from gramfx.torch_compat import contiguous, fake_mode_of, trace
from gramfx.uses import Rows, Runs, Use, first_value, runs_of

Runnable = Callable[..., Any]


@dataclass(frozen=True)
class KeptGradient:
    """``graph_module(*slots, *saved, weights)`` gives ``Jᵀ weights`` for each slot of ``wanted_slots``.

    ``saved`` names nodes of the forward and Gramian graph whose values it takes.
    """

    graph_module: GraphModule
    saved: tuple[str, ...]

    def peak(self, step: GraphModule, batch: int) -> int:
        """Bytes alive above parameters and inputs while it runs, gradients included, after a ``step`` that returns what
        is saved last; that is freed as it is used."""
        inputs = placeholders(self.graph_module)
        freed = inputs[len(inputs) - 1 - len(self.saved) : -1]
        counted = [node for node, own in zip(freed, self._own(step), strict=True) if own]
        return profile(self.graph_module, batch, freed=counted).peak

    def kept(self, step: GraphModule, batch: int) -> int:
        """Bytes that stay alive between the step and its backward."""
        return sum(nbytes(storage, batch) for storages_of in self._own(step) for storage in storages_of)

    def _own(self, step: GraphModule) -> list[list[Storage]]:
        """The memory of what is saved, each only once, and none of the inputs'."""
        held, seen = storages(step), set[Storage]()
        found = []
        for node in results(step)[len(results(step)) - len(self.saved) :]:
            found.append([one for one in held[node] if one[0].op != "placeholder" and one not in seen])
            seen |= set(found[-1])
        return found


def wanted_slots(graph_module: GraphModule) -> list[int]:
    """The placeholders whose gradient is asked for: trainable parameters, and inputs that require grad."""
    inputs = placeholders(graph_module)
    return [i for i, node in enumerate(inputs) if "parameter" in node.meta or node.meta.get("requires_grad")]


def kept_gradient(
    graph_module: GraphModule, joint: Joint, uses: Sequence[Use], rows: Rows, batch_size: int | torch.SymInt
) -> KeptGradient | None:
    """From a separated graph with its uses, and the joint graph with their cotangents.

    ``None`` where an input asks for its gradient, which no use has.
    """
    inputs = placeholders(graph_module)
    wanted = wanted_slots(graph_module)
    if any("parameter" not in inputs[index].meta for index in wanted):
        return None
    work = _Weighted(joint, uses, rows, batch_size)
    groups = work.grouped()
    names = list(dict.fromkeys(name for group in groups for name in work.reads(group)))
    nodes = named(joint.graph_module)
    fakes = [contiguous(value(node)) for node in inputs] + [contiguous(value(nodes[name])) for name in names]
    with fake_mode_of(graph_module):
        weights = torch.empty_like(value(results(graph_module)[0]), memory_format=torch.contiguous_format)

    def run(*tensors: Any) -> list[Tensor]:
        *given, seed = tensors
        slots = [_leaf(tensor, index in wanted) for index, tensor in enumerate(given[: len(inputs)])]
        held = dict(zip(names, given[len(inputs) :], strict=True))
        leaves = [slots[index] for index in wanted]
        values = _Values(dict(zip(inputs, slots, strict=True)), held, joint.forward)
        total: list[Tensor | None] = [None] * len(leaves)
        work.scales.clear()
        # One after the other, so that no more than one use's scaled cotangents are alive.
        for group in groups:
            with torch.enable_grad():
                found = _gradients(work.pairs(group, values, seed), leaves)
            total = [_sum(before, one) for before, one in zip(total, found, strict=True)]
        return [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(total, leaves, strict=True)]

    traced = trace(run, [*fakes, weights])
    return _trimmed(traced, len(inputs), names)


def _leaf(held: Any, wanted: bool) -> Any:
    return held.detach().requires_grad_() if wanted else held


def _gradients(pairs: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of the leaves, from outputs and their cotangents."""
    reached = [(out, cotangent) for out, cotangent in pairs if out.requires_grad]
    if not reached:
        return [None] * len(leaves)
    outs, cotangents = zip(*reached, strict=True)
    return torch.autograd.grad(outs, leaves, cotangents, retain_graph=True, allow_unused=True)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _trimmed(traced: GraphModule, slots: int, names: Sequence[str]) -> KeptGradient:
    """Without the placeholders that nothing reads."""
    traced.graph.eliminate_dead_code()
    saved = []
    for name, node in zip(names, placeholders(traced)[slots:-1], strict=True):
        if node.users:
            saved.append(name)
        else:
            traced.graph.erase_node(node)
    traced.recompile()
    return KeptGradient(traced, tuple(saved))


Group = list[Use]


class _Weighted:
    """Outputs of ops that read parameters, as functions of the parameters alone, and their weighted cotangents."""

    def __init__(self, joint: Joint, uses: Sequence[Use], rows: Rows, batch_size: int | torch.SymInt) -> None:
        self.joint, self.uses, self.rows, self.batch_size = joint, uses, rows, batch_size
        self.own = {node for use in uses for node in (use.clone, use.operand)}
        self.scales: dict[Any, Tensor] = {}

    def grouped(self) -> list[Group]:
        """Uses that one differentiation serves: those that read one op and need the same cotangents."""
        groups: dict[Any, Group] = {}
        for use in self.uses:
            if any(tap.name in self._store(use) for tap in use.taps):
                groups.setdefault((use.op, use.taps, use.coupled), []).append(use)
        return list(groups.values())

    def _store(self, use: Use) -> dict[str, str]:
        return self.joint.full if use.coupled else self.joint.single

    def reads(self, group: Group) -> list[str]:
        """The joint graph's names of cotangents, and of forward values that the op reads."""
        first, store = group[0], self._store(group[0])
        cotangents = [store[tap.name] for tap in first.taps if tap.name in store]
        needed = [node for use in group for node in (*use.needed, *use.op.all_input_nodes)]
        return cotangents + [self.joint.forward[node.name] for node in needed if self._is_data(node)]

    def _is_data(self, node: Node) -> bool:
        """Whether a value has to be kept: it is no input, and no parameter's."""
        return node.op != "placeholder" and node not in self.own and isinstance(value(node), Tensor)

    def pairs(self, group: Group, values: _Values, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each tapped output with the cotangent of ``(weights * objectives).sum()``."""
        first, store = group[0], self._store(group[0])
        found = []
        for tap, out in zip(first.taps, self._outs(group, values), strict=True):
            if tap.name in store:
                cotangent = values.held[store[tap.name]]
                found.append((out, self._weighted(first, tap, cotangent, weights, values).to(out.dtype)))
        return found

    def _outs(self, group: Group, values: _Values) -> Sequence[Tensor]:
        first = group[0]
        live = {use.operand: values.live(use.operand) for use in group}
        if first.taps == (first.operand,):
            return [live[first.operand]]
        if first.form is not None and isinstance(first.form.tap, Node):
            added = [_at_probe(use.form, live[use.operand], values) for use in group if use.form is not None]
            return [functools.reduce(torch.add, added)]
        inputs = {node: live[node] if node in live else values.constant(node) for node in first.op.all_input_nodes}
        return outputs_of(first, inputs)

    def _weighted(self, use: Use, tap: Node, cotangent: Tensor, weights: Tensor, values: _Values) -> Tensor:
        lead = cotangent if cotangent.dim() > value(tap).dim() else cotangent.unsqueeze(0)
        if use.coupled:
            return torch.tensordot(weights.reshape(-1).to(lead.dtype), lead, 1)
        count = lead.shape[0]
        runs = runs_of(use)
        dim, inner = self._place(use, tap, runs)
        size = lead.shape[dim + 1]
        each = self._along_rows(weights, count, runs, values) if runs else self._along(weights, count, size, inner)
        along = each.reshape(count, *(1,) * dim, size, *(1,) * (lead.dim() - dim - 2))
        return (lead * along).sum(0) if count > 1 else lead[0] * along[0]

    def _along(self, weights: Tensor, count: int, size: Any, inner: int) -> Tensor:
        """The weights of ``count`` objectives a sample, as often as a sample has entries along a dim."""
        key = (count, size.node.expr if isinstance(size, torch.SymInt) else size, inner)
        if key not in self.scales:
            each = weights.reshape(self.rows.before, -1, self.rows.after).transpose(1, 2).reshape(count, 1, -1, 1)
            outer = size // (each.shape[2] * inner)
            self.scales[key] = each.expand(count, outer, each.shape[2], inner).reshape(count, size)
        return self.scales[key]

    def _along_rows(self, weights: Tensor, count: int, runs: Runs, values: _Values) -> Tensor:
        """The weights of ``count`` objectives a sample, at each row of a ragged batch."""
        key = (count, runs.offsets, runs.entries)
        if key not in self.scales:
            each = weights.reshape(self.rows.before, -1, self.rows.after).transpose(1, 2).reshape(count, -1)
            each = each.index_select(1, owners(values.constant(runs.offsets), runs.rows))
            self.scales[key] = each.unsqueeze(2).expand(-1, -1, runs.entries)
        return self.scales[key]

    def _place(self, use: Use, tap: Node, runs: Runs | None) -> tuple[int, int]:
        """The dim of a cotangent that holds the samples, and how many entries each has in a row there."""
        if runs is not None and use.form is not None:
            return use.form.cotangent.dims.index(runs.label), runs.entries
        if use.form is None or use.form.tap == "output":
            return tap.meta["axes"].batch.dim, int(tap.meta["axes"].batch.inner)
        batch = first_value(use.op).batch
        assert batch is not None
        return use.form.cotangent.dims.index(use.form.output[batch.dim]), int(batch.inner)


def _at_probe(form: Form, operand: Tensor, values: _Values) -> Tensor:
    """What the operand adds to the value that the form's probe stands for."""
    given = [factor for factor in form.factors if factor.node is not None]
    if not given:
        assert isinstance(form.tap, Node)
        return operand.expand_as(values.constant(form.tap))
    labels = dict.fromkeys(label for dims in (*(f.dims for f in given), form.parameter, form.output) for label in dims)
    letter = dict(zip(labels, "abcdefghijklmnopqrstuvwxyz", strict=False))
    terms = ["".join(letter[label] for label in dims) for dims in (*(f.dims for f in given), form.parameter)]
    known = [values.constant(factor.node) for factor in given if factor.node is not None]
    return torch.einsum(f"{','.join(terms)}->{''.join(letter[label] for label in form.output)}", *known, operand)


class _Values:
    """Values of the forward graph: those of parameters alone computed anew, all others as they were kept."""

    def __init__(self, slots: dict[Node, Any], held: dict[str, Any], forward: dict[str, str]) -> None:
        self.slots, self.held, self.forward = slots, held, forward
        self.made: dict[Node, Any] = {}

    def live(self, node: Node) -> Any:
        """A value that gradients pass through."""
        if node in self.slots:
            return self.slots[node]
        if not isinstance(value(node), (Tensor, tuple, list)):
            return value(node)
        if node not in self.made:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.live)
            self.made[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.made[node]

    def constant(self, node: Node) -> Any:
        """A value that they do not."""
        kept = self.forward.get(node.name)
        found = self.held[kept] if kept in self.held else self.live(node)
        return found.detach() if isinstance(found, Tensor) else found


# ---------------------------------------------------------------- replayed


class _Replayed(Interpreter):
    """Runs a graph with some of its nodes' values given."""

    def __init__(self, graph_module: GraphModule, given: dict[Node, Any]) -> None:
        super().__init__(graph_module)
        self.given = given

    def run_node(self, n: Node) -> Any:
        return self.given[n] if n in self.given else super().run_node(n)


def replayed_gradient(graph_module: GraphModule, draws: Sequence[str]) -> tuple[Runnable, list[Any]]:
    """``(*slots, *random draws, weights) -> Jᵀ weights`` for each of ``wanted_slots``, and fakes to trace it with."""
    inputs = placeholders(graph_module)
    wanted = wanted_slots(graph_module)
    drawn = [named(graph_module)[name] for name in draws]
    fakes = [contiguous(value(node)) for node in (*inputs, *drawn)]
    with fake_mode_of(graph_module):
        weights = torch.empty_like(value(results(graph_module)[0]), memory_format=torch.contiguous_format)

    def run(*tensors: Tensor) -> list[Tensor]:
        *given, seed = tensors
        leaves = [_leaf(t.detach(), index in wanted) for index, t in enumerate(given[: len(inputs)])]
        with torch.enable_grad():
            replay = _Replayed(graph_module, dict(zip(drawn, given[len(inputs) :], strict=True)))
            objectives = replay.run(*leaves)[0]
            found = _gradients([(objectives, seed)], [leaves[index] for index in wanted])
        return [torch.zeros_like(leaves[i]) if g is None else g for g, i in zip(found, wanted, strict=True)]

    return run, [*fakes, weights]
