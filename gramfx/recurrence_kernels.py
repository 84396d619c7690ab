"""Forward and backward of one direction of a recurrent layer, as loops over time.

Gates are in torch's order: LSTM in, forget, new, out; GRU reset, update, new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Rows of gates for each unit.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _order(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)


# ---------------------------------------------------------------- forward


@torch.no_grad()
def forward(
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
    """``(out [T, B, P], last [B, P], last_cell [B, H], before [T, B, P], hidden, gates [T, B, gates * H], cells)``.

    rows: ``[T, B, gates * H]``, what the gates see of the input. start: ``[B, P]``, ``P`` being ``H`` without a
    projection ``[P, H]``. weight: ``[gates * H, P]``. alive: ``[T, B]``, false at steps beyond a sample's length.
    ``before`` holds the state before each step, ``hidden`` what is projected; what a kind does not have is empty.
    Equations: the documentation of ``torch.nn.LSTM``, ``GRU`` and ``RNN``.
    """
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
def backward(
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
