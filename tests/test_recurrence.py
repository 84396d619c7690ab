"""Recurrent layers as one op a direction: against torch's own, padded and ragged, forward, backward and under vmap."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gramfx
from gramfx.errors import DataDependentError
from gramfx.recurrence import recurrence
from gramfx.recurrent import LAYERS, PaddedSizes, run
from tests import reference

MAKE: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *given, **named: nn.RNN(*given, nonlinearity="relu", **named),
}
STEPS, BATCH = 6, 5
CASES = [
    (kind, {"num_layers": layers, "bidirectional": both, "bias": bias, **({"proj_size": 2} if projected else {})})
    for kind, layers, both, bias, projected in itertools.product(MAKE, (1, 2), (False, True), (True, False), (0, 2))
    if not projected or kind == "lstm"
]


def made(kind: str, options: dict[str, Any]) -> tuple[Any, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    layer = MAKE[kind](3, 4, **options).double()
    source = torch.randn(STEPS, BATCH, 3, dtype=torch.float64, requires_grad=True)
    count = options["num_layers"] * (2 if options["bidirectional"] else 1)
    widths = (options.get("proj_size", 4), 4)[: 2 if kind == "lstm" else 1]
    return layer, source, [torch.randn(count, BATCH, w, dtype=torch.float64, requires_grad=True) for w in widths]


def assert_same_gradients(found: list[Tensor], wanted: list[Tensor], leaves: list[Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    weights = [torch.randn_like(one) for one in wanted]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, weights), torch.autograd.grad(wanted, leaves, weights), rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_layers_are_torchs(kind: str, options: dict[str, Any]) -> None:
    layer, source, states = made(kind, options)
    given: Any = tuple(states) if kind == "lstm" else states[0]
    out, last = layer(source, given)
    rest = (layer._flat_weights, layer.bias, layer.num_layers, 0.0, True, layer.bidirectional, False)
    found = LAYERS[getattr(torch.ops.aten, kind).input](source, states if kind == "lstm" else states[0], *rest)
    wanted = [out, *(last if isinstance(last, tuple) else (last,))]
    assert_same_gradients(list(found), wanted, [source, *states, *layer.parameters()])


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_ragged_layers_are_torchs(kind: str, options: dict[str, Any]) -> None:
    layer, source, states = made(kind, options)
    lengths = torch.tensor([2, 6, 1, 4, 6])
    packed = pack_padded_sequence(source, lengths, enforce_sorted=False)
    given: Any = tuple(states) if kind == "lstm" else states[0]
    out, last = layer(packed, given)
    rows = source.reshape(STEPS * BATCH, -1)
    rest = (layer._flat_weights, layer.bias, layer.num_layers, 0.0, True, layer.bidirectional)
    found = run(kind, rows, PaddedSizes(lengths, STEPS, BATCH), states if kind == "lstm" else states[0], *rest)
    wanted = [pad_packed_sequence(out)[0], *(last if isinstance(last, tuple) else (last,))]
    assert_same_gradients(
        [found[0].reshape(STEPS, BATCH, -1), *found[1:]], wanted, [source, *states, *layer.parameters()]
    )


@pytest.mark.parametrize("kind", MAKE)
def test_backward_under_vmap_is_the_backward_of_each(kind: str) -> None:
    torch.manual_seed(0)
    width = 4 * {"lstm": 4, "gru": 3}.get(kind, 1)
    sizes = [(STEPS, BATCH, width), (BATCH, 4), (BATCH, 4), (width, 4), (width,)]
    rows, start, cell, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes)
    held: Any = (rows, start, cell if kind == "lstm" else None, weight, bias)
    probe = torch.zeros_like(rows)
    out = recurrence(kind, *held, None, None, probe, None, False)[0]
    cotangents = torch.randn(3, *out.shape, dtype=torch.float64)

    def pulled(cotangent: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (rows, start, weight, bias), cotangent, retain_graph=True)

    each = [torch.stack(one) for one in zip(*map(pulled, cotangents), strict=True)]
    torch.testing.assert_close(list(torch.vmap(pulled)(cotangents)), each)


def test_time_is_no_part_of_the_graph() -> None:
    sizes = []
    for steps in (3, 40):
        model = nn.Sequential(nn.LSTM(3, 4, batch_first=True)).double()
        step = gramfx.transform(model, lambda out: out[0].sum((1, 2)), compile=False)
        step.capture(torch.randn(5, steps, 3, dtype=torch.float64))
        sizes.append(len(step.stage("lowered").graph_module.graph.nodes))
    assert sizes[0] == sizes[1]


def test_plain_calls_in_between_do_not_capture_anew() -> None:
    layer = nn.LSTM(3, 4, batch_first=True).double()
    references = layer._flat_weight_refs
    step = gramfx.transform(layer, lambda out: out[0].sum((1, 2)), compile=False)
    source = torch.randn(5, 3, 3, dtype=torch.float64)
    step(source)
    assert all(layer._flat_weights[i] is weight for i, weight in enumerate(layer.parameters()))
    assert all(one is other for one, other in zip(layer._flat_weight_refs, references, strict=True))
    layer(source)[0].sum().backward()
    step(source)
    assert step.captures == 1


@pytest.mark.parametrize("kind", MAKE)
def test_one_capture_for_all_batch_sizes(kind: str) -> None:
    torch.manual_seed(0)
    model = MAKE[kind](3, 4, num_layers=2, bidirectional=True, batch_first=True).double()
    step = gramfx.transform(model, lambda out: out[0].square().sum((1, 2)), compile=False, dynamic=True)
    for batch in (5, 2, 9):
        source = torch.randn(batch, 3, 3, dtype=torch.float64)
        objectives, gramian = step(source)
        jacobian = reference.jacobian(model(source)[0].square().sum((1, 2)), reference.trainable(model))
        assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-12
        objectives.sum().backward()
        got = torch.cat([reference.flat(p.grad, p) for p in reference.trainable(model)])
        assert reference.relative_error(got, jacobian.sum(0)) <= 1e-12
        model.zero_grad()
    assert step.captures == 1


class Packed(nn.Module):
    """Reads a packed sequence; ``counted`` is done to its rows, and is more than row by row."""

    def __init__(self, counted: Any, total: bool = True, ordered: bool = True) -> None:
        super().__init__()
        self.layer, self.counted = nn.GRU(3, 4, batch_first=True).double(), counted
        self.total, self.ordered = total, ordered

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out, _ = self.layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.ordered))
        if self.counted is not None:
            out = out._replace(data=self.counted(out.data))
        padded, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1] if self.total else None)
        return padded.square().sum((1, 2))


def test_what_padding_holds_does_not_matter() -> None:
    torch.manual_seed(0)
    model, lengths = Packed(None), torch.tensor([5, 4, 1])
    step = gramfx.transform(model, compile=False)
    source = torch.randn(3, 5, 3, dtype=torch.float64)
    wanted = step(source, lengths)[1]
    source[1, 4:], source[2, 1:] = torch.nan, torch.inf
    assert torch.equal(step(source, lengths)[1], wanted)
    assert step.captures == 1


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("total", [False, True])
def test_packed_lengths_change(total: bool, ordered: bool) -> None:
    torch.manual_seed(0)
    model = Packed(None, total, ordered)
    step = gramfx.transform(model, compile=False)
    for lengths in ([5, 5, 5], [5, 4, 1], [4, 4, 2]):
        given = torch.randn(3, 5, 3, dtype=torch.float64), torch.tensor(lengths)
        rows = reference.jacobian(model(*given), reference.trainable(model))
        assert reference.relative_error(step(*given)[1], rows @ rows.T) <= 1e-12
    assert step.captures == (1 if total else 2)


COUNTED: dict[str, Any] = {
    "mean": lambda rows: rows / rows.abs().mean(),
    "place": lambda rows: rows * rows[5],
    "first": lambda rows: rows * rows[:6].mean(),
    "dropout": lambda rows: nn.functional.dropout(rows),
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("total", [False, True])
def test_rows_of_padding_that_are_counted_are_refused(total: bool, name: str) -> None:
    """Also where the first batch has no padding, and nothing shows on it."""
    torch.manual_seed(0)
    with pytest.raises(DataDependentError, match="how many rows") as raised:
        gramfx.transform(Packed(COUNTED[name], total), compile=False)(
            torch.randn(3, 5, 3, dtype=torch.float64), torch.tensor([5, 5, 5])
        )
    assert "test_recurrence.py" in str(raised.value.where) and "total_length" in str(raised.value.remedy)
