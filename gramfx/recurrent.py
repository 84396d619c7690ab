"""Recurrent cells as functional torch ops, and layers of them over packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramfx.errors import DataDependentError, UnsupportedError
from gramfx.recurrence import recurrence

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
CELLS: dict[Any, Callable[..., Any]] = {
    aten.lstm_cell.default: lstm_cell,
    aten.gru_cell.default: gru_cell,
    aten.rnn_tanh_cell.default: tanh_cell,
    aten.rnn_relu_cell.default: relu_cell,
}


class _Longest(int):
    """A number of steps that the lengths of one batch made."""


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

    def size(self, dim: int) -> int:
        """The number of steps that ``pad_packed_sequence`` makes where it is asked for no other."""
        return _Longest(self.steps)

    def __getitem__(self, step: int) -> int:
        if step != 0:
            raise DataDependentError(
                "the model reads how many sequences of a packed batch are left at a step",
                remedy="work with padded sequences and a mask",
            )
        return self.batch


@torch.library.custom_op("gramfx::packed_lengths", mutates_args=())
def packed_lengths(lengths: Tensor, steps: int) -> Tensor:
    """A copy: marks where the lengths of a packed sequence, padded to ``steps``, enter a graph."""
    return lengths.clone()


@packed_lengths.register_fake
def _(lengths: Tensor, steps: int) -> Tensor:
    return torch.empty_like(lengths)


def shortened(lengths: Tensor, longest: bool) -> Tensor:
    """Other lengths that fit into the same padding, down to 1 for the last sample: rows are missing in between.

    What is in falling order stays so. longest: whether to shorten the longest too, the first of several.
    """
    count = lengths.shape[0]
    place = torch.arange(count, device=lengths.device)
    less = 1 + (lengths - 1) * (count - 1 - place) // (count if longest else max(count - 1, 1))
    return less if longest else torch.where(place == lengths.argmax(), lengths, less)


def pack(source: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, PaddedSizes]:
    """Time-major rows of all steps, padding included, which is zero: whatever was in it has no gradient."""
    source = source.transpose(0, 1) if batch_first else source
    steps, batch = source.shape[:2]
    sizes = PaddedSizes(packed_lengths(lengths.to(source.device), int(steps)), int(steps), batch)
    alive = _alive(sizes).reshape(steps, batch, *(1,) * (source.dim() - 2))
    source = torch.where(alive, source, torch.zeros((), dtype=source.dtype, device=source.device))
    return source.reshape(steps * batch, *source.shape[2:]), sizes


def unpack(
    data: Tensor, sizes: PaddedSizes, batch_first: bool, padding: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """The padded sequences again, ``total_length`` steps of them; as many as the longest has where none is given."""
    rows, alive = data.reshape(sizes.steps, sizes.batch, -1), _alive(sizes).unsqueeze(-1)
    if isinstance(total_length, _Longest) or total_length < sizes.steps:
        # Only a capture that follows what the model reads goes on from here, for sequences as long as these.
        longest = int(sizes.lengths.max())
        steps = longest if isinstance(total_length, _Longest) else total_length
        rows, alive, total_length = rows[:steps], alive[:steps], steps
    rows = torch.where(alive, rows, torch.full((), padding, dtype=data.dtype, device=data.device))
    rows = F.pad(rows, (0, 0, 0, 0, 0, total_length - rows.shape[0]), value=padding)
    return rows.transpose(0, 1) if batch_first else rows, sizes.lengths


def _alive(sizes: PaddedSizes) -> Tensor:
    return torch.arange(sizes.steps, device=sizes.lengths.device).unsqueeze(1) < sizes.lengths


def run(kind: str, data: Any, sizes: Any, *rest: Any) -> Any:
    """A recurrent layer over a padded packed sequence; ``NotImplemented`` for any other input."""
    if not isinstance(sizes, PaddedSizes):
        return NotImplemented
    state, weights, has_biases, layers, dropout, training, bidirectional = rest
    if dropout and training and layers > 1:
        raise UnsupportedError(
            "dropout between the layers of a packed recurrent layer draws a mask for rows that padding does not have",
            remedy="set dropout=0, or run the layers on padded sequences",
        )
    rows, alive = data.reshape(sizes.steps, sizes.batch, -1), _alive(sizes)
    states = list(state) if kind == "lstm" else [state]
    rows, *ends = _layers(kind, rows, alive, states, weights, has_biases, layers, 0.0, bidirectional)
    return (rows.reshape(sizes.steps * sizes.batch, -1), *ends)


def _whole_layers(kind: str) -> Callable[..., Any]:
    """What ``aten.{kind}.input`` computes, a product with all inputs and one op for each layer and direction."""

    def layers(
        source: Tensor,
        state: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        count: int,
        dropout: float,
        training: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        rows = source.transpose(0, 1) if batch_first else source
        states = list(state) if kind == "lstm" else [state]
        dropped = dropout if training else 0.0
        out, *ends = _layers(kind, rows, None, states, weights, has_biases, count, dropped, bidirectional)
        return (out.transpose(0, 1) if batch_first else out, *ends)

    return layers


#: What a capture runs for torch's recurrent layers.
LAYERS: dict[Any, Callable[..., Any]] = {
    op.input: _whole_layers(kind)
    for kind, op in (
        ("lstm", aten.lstm),
        ("gru", aten.gru),
        ("rnn_tanh", aten.rnn_tanh),
        ("rnn_relu", aten.rnn_relu),
    )
}


def _layers(
    kind: str,
    rows: Tensor,
    alive: Tensor | None,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    count: int,
    dropout: float,
    bidirectional: bool,
) -> list[Tensor]:
    """``rows [T, B, inputs]`` through all layers: the last one's outputs, and the final states ``[layers, B, ·]``."""
    directions = 2 if bidirectional else 1
    each = len(weights) // (count * directions)
    last: list[list[Tensor]] = []
    for layer in range(count):
        made = []
        for number in range(layer * directions, (layer + 1) * directions):
            own = weights[number * each : (number + 1) * each]
            start = [one[number] for one in states]
            out, *ends = _one_direction(kind, rows, alive, start, own, has_biases, number % directions == 1)
            made.append(out)
            last.append(ends)
        rows = torch.cat(made, -1) if bidirectional else made[0]
        if dropout and layer < count - 1:
            rows = torch.dropout(rows, dropout, train=True)
    return [rows, *(torch.stack(one) for one in zip(*last, strict=True))]


def _one_direction(
    kind: str,
    rows: Tensor,
    alive: Tensor | None,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    backward: bool,
) -> list[Tensor]:
    """The outputs, and the state or states after the last step."""
    bias_in, bias = weights[2:4] if has_biases else (None, None)
    projection = weights[4 if has_biases else 2 :]
    seen = F.linear(rows, weights[0], bias_in)
    start, cell = states if kind == "lstm" else (states[0], None)
    probe_out = _zeros(seen, start.shape[-1]) if projection else None
    projected = projection[0] if projection else None
    inputs = (seen, start, cell, weights[1], bias, projected, alive, _zeros(seen, seen.shape[-1]), probe_out)
    out, *ends = recurrence(kind, *inputs, backward)[:3]
    return [out, *ends[: len(states)]]


def _zeros(like: Tensor, width: int) -> Tensor:
    """``[T, B, width]`` of zeros that take no memory, and have a cotangent of their own."""
    return like.new_zeros(1).expand(*like.shape[:-1], width)
