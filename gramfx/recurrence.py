"""One direction of a recurrent layer as one op, forward and backward; its loop over time never enters a graph.

``gramfx::recurrence`` is what captures hold. Where it is differentiated it runs ``recurrence_forward`` and
``recurrence_backward``, so that a joint graph holds these. With ``h`` the state before each step and ``a`` what the
gates see of it, ``a = h Wᵀ + b``, the gradients by ``W`` and ``b`` are ``Σ_t ȧ_tᵀ h_t`` and ``Σ_t ȧ_t``: one product
over all steps, which the op leaves to whoever wants it by giving ``ȧ`` as the cotangent of a ``probe`` of zeros.

Gates are in torch's order: LSTM in, forget, new, out; GRU reset, update, new.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gramfx.torch_compat import below_autograd, function_applied

#: Rows of gates for each unit.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

OUT, LAST, LAST_CELL, BEFORE, HIDDEN = range(5)
_OUTPUTS = "(Tensor out, Tensor last, Tensor last_cell, Tensor before, Tensor hidden, Tensor gates, Tensor cells)"
_INPUTS = (
    "Tensor rows, Tensor start, Tensor? start_cell, Tensor weight, Tensor? bias, Tensor? projection, Tensor? alive"
)

_library = torch.library.Library("gramfx", "FRAGMENT")
_library.define(f"recurrence(str kind, {_INPUTS}, Tensor probe, Tensor? probe_out, bool reverse) -> {_OUTPUTS}")
_library.define(f"recurrence_forward(str kind, {_INPUTS}, bool reverse) -> {_OUTPUTS}")
_library.define(
    "recurrence_backward(str kind, Tensor d_out, Tensor d_last, Tensor d_last_cell, Tensor weight, Tensor? projection, "
    "Tensor? alive, Tensor? start_cell, Tensor before, Tensor gates, Tensor cells, bool reverse) "
    "-> (Tensor d_seen, Tensor d_rows, Tensor d_start, Tensor d_start_cell, Tensor d_projected)"
)
recurrence = torch.ops.gramfx.recurrence.default
_forward_op = torch.ops.gramfx.recurrence_forward.default
_backward_op = torch.ops.gramfx.recurrence_backward.default


def _order(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)


# ---------------------------------------------------------------- forward


@torch.no_grad()
def _forward(
    kind: str,
    rows: Tensor,
    start: Tensor,
    start_cell: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    alive: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, ...]:
    steps, batch, width = rows.shape
    units = width // GATES[kind]
    out, before = rows.new_empty(steps, batch, start.shape[-1]), rows.new_empty(steps, batch, start.shape[-1])
    hidden = out if projection is None else rows.new_empty(steps, batch, units)
    cells = rows.new_empty(steps, batch, units) if kind in ("lstm", "gru") else rows.new_empty(0)
    step = _STEPS[kind](rows, weight, bias, cells, hidden)
    state, cell = start, start_cell
    for t in _order(steps, reverse):
        before[t] = state
        step.advance(t, state, cell)
        if projection is not None:
            torch.mm(hidden[t], projection.t(), out=out[t])
        if alive is not None:
            # A sample's state stands still at steps beyond its length; its output is zero there.
            state = torch.where(alive[t].unsqueeze(-1), out[t], state)
            out[t].masked_fill_(~alive[t].unsqueeze(-1), 0)
            if cell is not None:
                torch.where(alive[t].unsqueeze(-1), cells[t], cell, out=cells[t])
        else:
            state = out[t]
        cell = None if cell is None else cells[t]
    last_cell = rows.new_empty(0) if cell is None else cell.clone()
    return out, state.clone(), last_cell, before, rows.new_empty(0) if hidden is out else hidden, step.gates, cells


class _Lstm:
    """Keeps the gates, and the cells after each step."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, cells: Tensor, hidden: Tensor) -> None:
        self.gates = rows.clone() if bias is None else rows + bias
        self.weight, self.cells, self.hidden = weight.t(), cells, hidden
        self.each = [one.unbind(0) for one in self.gates.chunk(4, -1)]
        units = cells.shape[-1]
        self.soft = self.gates[..., : 2 * units].unbind(0)
        self.bent = torch.empty_like(cells[0])

    def advance(self, t: int, state: Tensor, cell: Tensor) -> None:
        self.gates[t].addmm_(state, self.weight)
        self.soft[t].sigmoid_()
        enter, forget, new, leave = (one[t] for one in self.each)
        new.tanh_()
        leave.sigmoid_()
        torch.mul(forget, cell, out=self.cells[t]).addcmul_(enter, new)
        torch.mul(torch.tanh(self.cells[t], out=self.bent), leave, out=self.hidden[t])


class _Gru:
    """Keeps the gates, and in ``cells`` what the candidate sees of the state."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, cells: Tensor, hidden: Tensor) -> None:
        self.gates, self.cells, self.hidden = rows.clone(), cells, hidden
        self.weight, self.bias = weight.t(), weight.new_zeros(weight.shape[0]) if bias is None else bias

    def advance(self, t: int, state: Tensor, cell: Tensor | None) -> None:
        units = state.shape[-1]
        seen = torch.addmm(self.bias, state, self.weight)
        self.cells[t] = seen[:, 2 * units :]
        reset_update = self.gates[t, :, : 2 * units].add_(seen[:, : 2 * units]).sigmoid_()
        new = self.gates[t, :, 2 * units :].addcmul_(reset_update[:, :units], self.cells[t]).tanh_()
        torch.lerp(new, state, reset_update[:, units:], out=self.hidden[t])


class _Elman:
    """Keeps the states after each step."""

    bend: Callable[[Tensor], Tensor] = staticmethod(torch.tanh_)

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, cells: Tensor, hidden: Tensor) -> None:
        self.gates = rows.clone() if bias is None else rows + bias
        self.weight, self.hidden = weight.t(), hidden

    def advance(self, t: int, state: Tensor, cell: Tensor | None) -> None:
        self.hidden[t] = self.bend(self.gates[t].addmm_(state, self.weight))


class _Rectified(_Elman):
    bend = staticmethod(torch.relu_)


_STEPS: dict[str, Any] = {"lstm": _Lstm, "gru": _Gru, "rnn_tanh": _Elman, "rnn_relu": _Rectified}


# ---------------------------------------------------------------- backward


@dataclass
class _Slopes:
    """What a step's backward multiplies by, for all steps at once.

    ``seen``: ``[T, B, gates, H]``, from the cotangent of the state to those of the gates; of an LSTM without the last
    gate, and from the cotangent of the cell. ``through``: from it to the one before. Of an LSTM, ``leave`` and ``cell``
    lead from the state to the last gate and to the cell. Of a GRU, ``rows`` leads to what the candidate sees of the
    input. What a kind does not have is empty.
    """

    seen: Tensor
    through: Tensor
    leave: Tensor
    cell: Tensor
    rows: Tensor


def _slopes(
    kind: str, start_cell: Tensor | None, before: Tensor, gates: Tensor, cells: Tensor, reverse: bool
) -> _Slopes:
    none = gates.new_empty(0)
    if kind == "lstm":
        assert start_cell is not None
        enter, forget, new, leave = gates.chunk(4, -1)
        first = start_cell.unsqueeze(0)
        previous = torch.cat([cells[1:], first]) if reverse else torch.cat([first, cells[:-1]])
        bent = cells.tanh()
        inner = [new * enter * (1 - enter), previous * forget * (1 - forget), enter * (1 - new * new)]
        return _Slopes(torch.stack(inner, 2), forget, bent * leave * (1 - leave), leave * (1 - bent * bent), none)
    if kind == "gru":
        reset, update, new = gates.chunk(3, -1)
        candidate = (1 - update) * (1 - new * new)
        inner = [candidate * cells * reset * (1 - reset), (before - new) * update * (1 - update), candidate * reset]
        return _Slopes(torch.stack(inner, 2), update, none, none, candidate)
    slope = 1 - gates * gates if kind == "rnn_tanh" else (gates > 0).to(gates)
    return _Slopes(slope.unsqueeze(2), none, none, none, none)


@torch.no_grad()
def _backward(
    kind: str,
    d_out: Tensor,
    d_last: Tensor,
    d_last_cell: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    alive: Tensor | None,
    start_cell: Tensor | None,
    before: Tensor,
    gates: Tensor,
    cells: Tensor,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Cotangents may have leading dims, one pass for each index; what the forward kept has none."""
    slopes = _slopes(kind, start_cell, before, gates, cells, reverse)
    units = slopes.seen.shape[-1]
    seen, whole = d_out.new_empty(*d_out.shape[:-1], gates.shape[-1]), d_out.new_empty(d_out.shape)
    d_state, d_cell = d_last, d_last_cell
    for t in _order(d_out.shape[-3], not reverse):
        still = None if alive is None else ~alive[t].unsqueeze(-1)
        d_full = torch.add(d_state, d_out.select(-3, t), out=whole.select(-3, t))
        if still is not None:
            d_full.masked_fill_(still, 0)
        d_hidden = d_full if projection is None else d_full @ projection
        here = seen.select(-3, t)
        spread = here.unflatten(-1, (-1, units))
        if kind == "lstm":
            d_new = torch.addcmul(d_cell, d_hidden, slopes.cell[t])
            if still is not None:
                d_new.masked_fill_(still, 0)
            torch.mul(d_new.unsqueeze(-2), slopes.seen[t], out=spread[..., :3, :])
            torch.mul(d_hidden, slopes.leave[t], out=spread[..., 3, :])
            d_cell = _stand(still, d_cell, d_new.mul_(slopes.through[t]))
        else:
            torch.mul(d_hidden.unsqueeze(-2), slopes.seen[t], out=spread)
        d_before = here @ weight
        if kind == "gru":
            d_before.addcmul_(d_full, slopes.through[t])
        d_state = _stand(still, d_state, d_before)
    none = d_out.new_empty(0)
    d_rows = none
    if kind == "gru":
        d_rows = seen.clone()
        torch.mul(whole, slopes.rows, out=d_rows[..., 2 * units :])
    d_start_cell = d_cell.clone() if kind == "lstm" else none
    return seen, d_rows, d_state.clone(), d_start_cell, none if projection is None else whole


def _stand(still: Tensor | None, kept: Tensor, new: Tensor) -> Tensor:
    """``new``, but for the samples whose state stands still."""
    return new if still is None else torch.where(still, kept, new)


# ---------------------------------------------------------------- the ops


def _shapes(
    kind: str,
    rows: Tensor,
    start: Tensor,
    start_cell: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    steps, batch, width = rows.shape
    units, of = width // GATES[kind], rows.new_empty
    state = of(steps, batch, start.shape[-1])
    hidden = of(0) if projection is None else of(steps, batch, units)
    cells = of(steps, batch, units) if kind in ("lstm", "gru") else of(0)
    last_cell = of(batch, units) if kind == "lstm" else of(0)
    return state, torch.empty_like(start), last_cell, torch.empty_like(state), hidden, of(steps, batch, width), cells


def _shapes_backward(
    kind: str,
    d_out: Tensor,
    d_last: Tensor,
    d_last_cell: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    alive: Tensor | None,
    start_cell: Tensor | None,
    before: Tensor,
    gates: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    lead, of = d_out.shape[:-3], d_out.new_empty
    seen = of(*lead, *gates.shape)
    d_rows = torch.empty_like(seen) if kind == "gru" else of(0)
    d_projected = of(0) if projection is None else of(*d_out.shape)
    d_start_cell = of(*d_last_cell.shape) if kind == "lstm" else of(0)
    return seen, d_rows, of(*d_last.shape), d_start_cell, d_projected


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, *given: Any) -> Any:
        *inputs, _, _, reverse = given
        made = _forward_op(kind, *inputs, reverse)
        ctx.kind, ctx.reverse = kind, reverse
        ctx.save_for_backward(*inputs, *made[BEFORE:])
        ctx.mark_non_differentiable(*made[BEFORE:])
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        rows, start, start_cell, weight, _, projection, alive, before, hidden, gates, cells = ctx.saved_tensors
        d_out = rows.new_zeros(before.shape) if cotangents[OUT] is None else cotangents[OUT]
        d_last = torch.zeros_like(start) if cotangents[LAST] is None else cotangents[LAST]
        d_cell = cotangents[LAST_CELL]
        d_cell = (
            (rows.new_zeros(0) if start_cell is None else torch.zeros_like(start_cell)) if d_cell is None else d_cell
        )
        held = (weight, projection, alive, start_cell, before, gates, cells, ctx.reverse)
        seen, d_rows, d_start, d_start_cell, d_projected = _backward_op(ctx.kind, d_out, d_last, d_cell, *held)
        wanted = ctx.needs_input_grad
        return (
            None,
            d_rows if ctx.kind == "gru" else seen,
            d_start,
            None if start_cell is None else d_start_cell,
            seen.flatten(0, 1).t() @ before.flatten(0, 1) if wanted[4] else None,
            seen.sum((0, 1)) if wanted[5] else None,
            d_projected.flatten(0, 1).t() @ hidden.flatten(0, 1) if wanted[6] else None,
            None,
            seen,
            None if projection is None else d_projected,
            None,
        )


def _autograd(*arguments: Any) -> Any:
    """What stays one op in a capture, which has no gradients, is looked into where it is differentiated."""
    needed = any(isinstance(one, Tensor) and one.requires_grad for one in arguments)
    if torch.is_grad_enabled() and needed:
        return function_applied(_Differentiated, *arguments)
    with below_autograd():
        return recurrence(*arguments)


def _whole(kind: str, *given: Any) -> Any:
    *inputs, _, _, reverse = given
    return _forward_op(kind, *inputs, reverse)


def _several(info: Any, in_dims: tuple[Any, ...], kind: str, *given: Any) -> Any:
    """Cotangents under ``vmap``: one more leading dim."""
    cotangents, held = given[:3], given[3:]
    if any(dim is not None for dim in in_dims[4:]):
        raise NotImplementedError("batching rule of recurrence_backward for what the forward kept")
    lead = [
        one.movedim(dim, 0) if dim is not None else one.expand(info.batch_size, *one.shape)
        for one, dim in zip(cotangents, in_dims[1:4], strict=True)
    ]
    made = _backward_op(kind, *lead, *held)
    return made, tuple(None if one.dim() == 1 else 0 for one in made)


def _numel(shape: Any) -> Any:
    return 0 if shape is None else math.prod(shape)


for _name, _kernel in (("recurrence", _whole), ("recurrence_forward", _forward), ("recurrence_backward", _backward)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
_library.impl("recurrence", _autograd, "Autograd")
torch.library.register_fake("gramfx::recurrence", _shapes, lib=_library)
torch.library.register_fake("gramfx::recurrence_forward", _shapes, lib=_library)
torch.library.register_fake("gramfx::recurrence_backward", _shapes_backward, lib=_library)
torch.library.register_vmap("gramfx::recurrence_backward", _several, lib=_library)


# Sizes may be symbols, which a number made of them would fix.
@register_flop_formula(torch.ops.gramfx.recurrence_forward)
def _(kind: str, rows: Any, start: Any, cell: Any, weight: Any, bias: Any, projection: Any, *_: Any, **__: Any) -> Any:
    """One product with the recurrent weight a step, and one with the projection."""
    return 2 * math.prod(rows[:2]) * (_numel(weight) + _numel(projection))


@register_flop_formula(torch.ops.gramfx.recurrence_backward)
def _(kind: str, d_out: Any, last: Any, cell: Any, weight: Any, projection: Any, *_: Any, **__: Any) -> Any:
    """The same for each cotangent."""
    return 2 * math.prod(d_out[:-1]) * (_numel(weight) + _numel(projection))
