"""Recurrent layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.architectures.formulas import formula, randn, wired

FIRST, SECOND = randn((4, 5, 3)), randn((5, 4, 3))


def head(layer: nn.Module, width: int = 4) -> dict[str, nn.Module]:
    """A recurrent layer and a linear head."""
    return {"rnn": layer, "head": nn.Linear(width, 2)}


def last_step(m: Any, x: Tensor) -> Tensor:
    """Objectives from the last step of a batch-first layer."""
    return m.head(m.rnn(x)[0][:, -1])


def all_steps(m: Any, x: Tensor) -> Tensor:
    """Objectives from every step of a time-first layer."""
    return m.head(m.rnn(x)[0]).tanh().sum(0)


def final_state(m: Any, x: Tensor) -> Tensor:
    """Objectives from the final state of a time-first layer."""
    state = m.rnn(x)[1]
    state = state[0] if isinstance(state, tuple) else state
    return m.head(state[-1])


def with_state(m: Any, x: Tensor, h: Tensor) -> Tensor:
    """Starts from a given state."""
    return m.head(m.rnn(x, h)[0][:, -1])


def learned_state(m: Any, x: Tensor) -> Tensor:
    """Starts from a state made of a parameter."""
    return m.head(m.rnn(x, m.start.weight.unsqueeze(1).expand(-1, x.shape[0], -1).contiguous())[0][:, -1])


def ragged(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Packed, and unpacked to as many steps as there were."""
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, found = pad_packed_sequence(m.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
    return m.head(torch.tanh(out).sum(1)) / found.unsqueeze(1)


def cells(m: Any, x: Tensor) -> Tensor:
    """Unrolled by hand."""
    h = c = x.new_zeros(x.shape[0], 4)
    for step in x.unbind(1):
        h, c = m.cell(step, (h, c))
    return m.head(h)


def gru_cells(m: Any, x: Tensor) -> Tensor:
    """Unrolled by hand, one state."""
    h = x.new_zeros(x.shape[0], 4)
    for step in x.unbind(1):
        h = m.cell(step, h)
    return m.head(h)


def linear_recurrence(p: Any, x: Tensor) -> Tensor:
    """A state-space model with a diagonal transition."""
    h = x.new_zeros(x.shape[0], 3)
    for step in x.unbind(1):
        h = torch.sigmoid(p.a) * h + step * p.b
    return h @ p.c


RECURRENT = [
    wired("rnn_tanh", lambda: head(nn.RNN(3, 4, batch_first=True)), last_step, FIRST),
    wired("rnn_relu", lambda: head(nn.RNN(3, 4, nonlinearity="relu")), all_steps, SECOND, in_dims=1),
    wired("rnn_two_layers", lambda: head(nn.RNN(3, 4, num_layers=2)), final_state, SECOND, in_dims=1),
    wired("gru", lambda: head(nn.GRU(3, 4, batch_first=True)), last_step, FIRST),
    wired("gru_bidirectional", lambda: head(nn.GRU(3, 4, bidirectional=True), 8), all_steps, SECOND, in_dims=1),
    wired("gru_without_bias", lambda: head(nn.GRU(3, 4, bias=False)), all_steps, SECOND, in_dims=1),
    wired("lstm", lambda: head(nn.LSTM(3, 4, batch_first=True)), last_step, FIRST),
    wired(
        "lstm_two_layers_bidirectional",
        lambda: head(nn.LSTM(3, 4, num_layers=2, bidirectional=True), 8),
        all_steps,
        SECOND,
        in_dims=1,
    ),
    wired("lstm_final_state", lambda: head(nn.LSTM(3, 4)), final_state, SECOND, in_dims=1),
    wired("lstm_projected", lambda: head(nn.LSTM(3, 4, proj_size=2, batch_first=True), 2), last_step, FIRST),
    wired(
        "rnn_given_state",
        lambda: head(nn.RNN(3, 4, batch_first=True)),
        with_state,
        randn((4, 5, 3), (1, 4, 4)),
        in_dims=(0, 1),
    ),
    wired(
        "gru_learned_state",
        lambda: head(nn.GRU(3, 4, batch_first=True)) | {"start": nn.Embedding(1, 4)},
        learned_state,
        FIRST,
    ),
    wired("lstm_cells", lambda: {"cell": nn.LSTMCell(3, 4), "head": nn.Linear(4, 2)}, cells, FIRST),
    wired("gru_cells", lambda: {"cell": nn.GRUCell(3, 4), "head": nn.Linear(4, 2)}, gru_cells, FIRST),
    formula("linear_recurrence", {"a": (3,), "b": (3,), "c": (3, 2)}, linear_recurrence, FIRST),
    wired(
        "gru_packed_and_unpacked",
        lambda: head(nn.GRU(3, 4, batch_first=True, bidirectional=True), 8),
        ragged,
        lambda: (torch.randn(4, 5, 3), torch.tensor([2, 5, 1, 3])),
    ),
]
