"""Recurrent cells as functional torch ops, and layers of them over packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramfx.errors import DataDependentError, UnsupportedError

aten = torch.ops.aten


def lstm_cell(x: Tensor, state: list[Tensor], w_x: Tensor, w_h: Tensor, b_x: Any = None, b_h: Any = None) -> Any:
    """``(h, c)`` after one step; gates in the order in, forget, new, out."""
    gates = F.linear(x, w_x, b_x) + F.linear(state[0], w_h, b_h)
    enter, forget, new, leave = gates.chunk(4, -1)
    cell = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def gru_cell(x: Tensor, state: Tensor, w_x: Tensor, w_h: Tensor, b_x: Any = None, b_h: Any = None) -> Tensor:
    """``h`` after one step; gates in the order reset, update, new."""
    reset, update, new = F.linear(x, w_x, b_x).chunk(3, -1)
    own_reset, own_update, own_new = F.linear(state, w_h, b_h).chunk(3, -1)
    candidate = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return candidate + (update + own_update).sigmoid() * (state - candidate)


def tanh_cell(x: Tensor, state: Tensor, w_x: Tensor, w_h: Tensor, b_x: Any = None, b_h: Any = None) -> Tensor:
    """``h`` after one step."""
    return (F.linear(x, w_x, b_x) + F.linear(state, w_h, b_h)).tanh()


def relu_cell(x: Tensor, state: Tensor, w_x: Tensor, w_h: Tensor, b_x: Any = None, b_h: Any = None) -> Tensor:
    """``h`` after one step."""
    return (F.linear(x, w_x, b_x) + F.linear(state, w_h, b_h)).relu()


#: The cells' own kernels work in place, where parameters cannot be followed.
CELLS = {
    aten.lstm_cell.default: lstm_cell,
    aten.gru_cell.default: gru_cell,
    aten.rnn_tanh_cell.default: tanh_cell,
    aten.rnn_relu_cell.default: relu_cell,
}


@dataclass(frozen=True)
class PaddedSizes:
    """Stands for the batch sizes of a packed sequence that stays padded: row ``t * batch + b`` is step t of b."""

    lengths: Tensor
    steps: int
    batch: int

    @property
    def device(self) -> torch.device:
        """Where torch wants batch sizes to be."""
        return torch.device("cpu")

    def __getitem__(self, step: int) -> int:
        if step != 0:
            raise DataDependentError(
                "the model reads how many sequences of a packed batch are left at a step",
                remedy="work with padded sequences and a mask",
            )
        return self.batch


def pack(source: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, PaddedSizes]:
    """Time-major rows of all steps, padding included."""
    source = source.transpose(0, 1) if batch_first else source
    steps, batch = source.shape[:2]
    return source.reshape(steps * batch, -1), PaddedSizes(lengths.to(source.device), int(steps), batch)


def unpack(
    data: Tensor, sizes: PaddedSizes, batch_first: bool, padding: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """The padded sequences again, ``total_length`` steps of them; raises where that is left to the lengths."""
    if total_length < sizes.steps:
        raise DataDependentError(
            "the number of steps of an unpacked sequence depends on the lengths",
            expected=f"pad_packed_sequence(..., total_length=n) with n of at least {sizes.steps}",
            got="no total_length" if total_length < 0 else f"total_length={total_length}",
            remedy="pass total_length",
        )
    rows = data.reshape(sizes.steps, sizes.batch, -1)
    alive = _alive(sizes).unsqueeze(-1)
    rows = torch.where(alive, rows, torch.full((), padding, dtype=data.dtype, device=data.device))
    rows = F.pad(rows, (0, 0, 0, 0, 0, total_length - sizes.steps), value=padding)
    return rows.transpose(0, 1) if batch_first else rows, sizes.lengths


def _alive(sizes: PaddedSizes) -> Tensor:
    return torch.arange(sizes.steps, device=sizes.lengths.device).unsqueeze(1) < sizes.lengths


_STEPS: dict[str, Callable[..., Any]] = {
    "lstm": lstm_cell,
    "gru": gru_cell,
    "rnn_tanh": tanh_cell,
    "rnn_relu": relu_cell,
}


def run(kind: str, data: Any, sizes: Any, *rest: Any) -> Any:
    """A recurrent layer over a padded packed sequence; ``NotImplemented`` for any other input.

    A sample's state stands still at steps beyond its length, so both directions see its own steps alone.
    """
    if not isinstance(sizes, PaddedSizes):
        return NotImplemented
    state, weights, has_biases, layers, dropout, training, bidirectional = rest
    if dropout and training and layers > 1:
        raise UnsupportedError(
            "dropout between the layers of a packed recurrent layer draws a mask for rows that padding does not have",
            remedy="set dropout=0, or run the layers on padded sequences",
        )
    several = kind == "lstm"
    states = list(state) if several else [state]
    directions = 2 if bidirectional else 1
    per_cell = len(weights) // (layers * directions)
    rows, alive = data.reshape(sizes.steps, sizes.batch, -1), _alive(sizes).unsqueeze(-1)
    last: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        made = []
        for number in range(layer * directions, (layer + 1) * directions):
            own = weights[number * per_cell : (number + 1) * per_cell]
            start = tuple(one[number] for one in states)
            out, end = _one_direction(kind, rows, alive, start, own, has_biases, backward=number % directions == 1)
            made.append(out)
            last.append(end)
        rows = torch.cat(made, -1)
    ends = [torch.stack(one) for one in zip(*last, strict=True)]
    return (rows.reshape(sizes.steps * sizes.batch, -1), *ends)


def _one_direction(
    kind: str,
    rows: Tensor,
    alive: Tensor,
    state: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    has_biases: bool,
    *,
    backward: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    biases = weights[2:4] if has_biases else (None, None)
    projection = list(weights[4 if has_biases else 2 :])
    outputs: list[Tensor] = [rows] * rows.shape[0]
    for step in reversed(range(rows.shape[0])) if backward else range(rows.shape[0]):
        given: Any = list(state) if kind == "lstm" else state[0]
        new = _STEPS[kind](rows[step], given, weights[0], weights[1], *biases)
        new = new if isinstance(new, tuple) else (new,)
        new = (F.linear(new[0], projection[0]), *new[1:]) if projection else new
        outputs[step] = torch.where(alive[step], new[0], torch.zeros_like(new[0]))
        state = tuple(torch.where(alive[step], after, before) for after, before in zip(new, state, strict=True))
    return torch.stack(outputs), state
