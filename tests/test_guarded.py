"""Models that read tensor values: captures by following one call, and what they are held against later."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gramfx
from gramfx import kept
from gramfx.errors import (
    CoupledObjectivesWarning,
    DataDependentError,
    RecaptureWarning,
    StaticBatchWarning,
    UnsupportedError,
)
from tests.reference import differences, flat, jacobian, relative_error, snapshot, trainable

Inputs = Sequence[Any]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    """Float64 throughout, and what couples may."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoupledObjectivesWarning)
        yield
    torch.set_default_dtype(before)


class Model(nn.Module):
    """A forward written in a test."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(3, 4), nn.Linear(4, 2), function

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self, *inputs)


def check(step: gramfx.Step, model: nn.Module, inputs: Inputs, seed: int = 7) -> None:
    """One call against autograd: objectives, Gramian, gradient, and the state of everything the user owns."""
    parameters = list(model.parameters())
    start = {name: held.clone() for name, held in model.state_dict().items()}
    torch.manual_seed(seed)
    wanted = model(*inputs)
    rows = jacobian(wanted, parameters)
    after = snapshot(model)
    model.load_state_dict(start)
    torch.manual_seed(seed)
    objectives, gramian = step(*inputs)
    assert differences(after, snapshot(model)) == []
    weights = torch.linspace(-1, 2, len(rows))
    assert relative_error(objectives, wanted) < 1e-12
    assert relative_error(gramian, rows @ rows.T) < 1e-10
    objectives.backward(weights.reshape(objectives.shape))
    got = torch.cat([flat(parameter.grad, parameter) for parameter in parameters])
    assert relative_error(got, weights @ rows) < 1e-10
    model.zero_grad()


def branches(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    return m.last(hidden if x.sum() > 0 else hidden.tanh()).sum(1)


def settles(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    while hidden.norm().item() > 1.0:
        hidden = hidden * 0.7
    return m.last(hidden).sum(1)


def converges(m: Any, x: Tensor) -> Tensor:
    hidden, before = m.first(x).tanh(), float("inf")
    for _ in range(20):
        hidden = (hidden * 0.5 + m.first(x) * 0.1).tanh()
        now = hidden.norm().item()
        if abs(before - now) / max(now, 1e-9) < 1e-2:
            break
        before = now
    return m.last(hidden).sum(1)


def clamped(m: Any, x: Tensor) -> Tensor:
    top = x.abs().max().item()
    return m.last(m.first(x).clamp(max=top)).sum(1) * (2 if top > 1 else 3)


def printed(m: Any, x: Tensor) -> Tensor:
    return m.last(m.first(x)).sum(1) * len(f"{x.abs().max().item():.2f}")


def pooled(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([m.last(m.first(one)[seen].sum(0)).sum() for one, seen in zip(x, mask, strict=True)])


def by_lengths(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    rows = m.first(x)
    return torch.stack([m.last(row[:n].mean(0)).sum() for row, n in zip(rows, lengths.tolist(), strict=True)])


def grouped(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    groups, place, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    summed = torch.zeros(len(groups), 4).index_add(0, place, m.first(x))
    return m.last(summed / counts[:, None]).sum(1) * (1 + groups)


def runs(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    groups, place = torch.unique_consecutive(ids, return_inverse=True)
    return m.last(torch.zeros(len(groups), 4).index_add(0, place, m.first(x))).sum(1)


def written(m: Any, x: Tensor) -> Tensor:
    hidden, mask = m.first(x), x[:, 0] > 0
    out = hidden.clone()
    out[mask] = m.last(hidden[mask]).repeat(1, 2)
    return out.sum(1)


def differentiated(m: Any, x: Tensor) -> Tensor:
    x, mask = x.detach().requires_grad_(), x[:, 0] > 0
    (gradient,) = torch.autograd.grad(m.last(m.first(x).tanh())[mask].pow(2).sum(), x, create_graph=True)
    return gradient.pow(2).sum(1)


def outside_torch(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return m.last(m.first(x)).sum(1) * torch.from_numpy(ids.numpy() + 1)


def in_range(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Rows that would be out of range, were they read before it is known which table they are of."""
    rows = m.first(x)
    return m.last((rows[:4] if ids.max() < 4 else torch.cat([rows, rows]))[ids]).sum(1)


X = torch.linspace(-1, 1.3, 15, dtype=torch.float64).reshape(5, 3).sin()
UP, DOWN = X.abs(), -X.abs()
IDS = torch.tensor([3, 1, 3, 0, 1])
MASK = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]]).bool()
ROWS = torch.linspace(-2, 2, 36, dtype=torch.float64).reshape(3, 4, 3).cos()
LENGTHS = torch.tensor([1, 2, 4])

# A model, calls, and how many captures there are after each.
READS: dict[str, tuple[Callable[..., Tensor], list[Inputs], list[int]]] = {
    "branches": (branches, [(UP,), (DOWN,), (2 * UP,), (3 * DOWN,), (UP,)], [1, 2, 2, 2, 2]),
    "loop": (settles, [(UP,), (1.001 * UP,), (3 * UP,), (UP,)], [1, 1, 2, 2]),
    "numbers compared with each other": (converges, [(X,), (1.001 * X,)], [1, 1]),
    "number used": (clamped, [(2 * X,), (2.002 * X,), (2 * X,)], [1, 2, 2]),
    "number printed": (printed, [(X,), (1.001 * X,), (X,)], [1, 2, 2]),
    "mask": (lambda m, x: m.last(m.first(x))[x[:, 0] > 0].sum(1), [(X,), (X.flip(0),), (UP,), (DOWN,)], [1, 1, 2, 3]),
    "masked select": (lambda m, x: m.last(m.first(x)).masked_select(x[:, :1] > 0), [(X,), (X.flip(0),)], [1, 1]),
    "masks of samples": (pooled, [(ROWS, MASK), (ROWS, MASK.flip(1)), (ROWS, MASK.flip(0))], [1, 1, 2]),
    "lengths": (by_lengths, [(ROWS, LENGTHS), (2 * ROWS, LENGTHS), (ROWS, LENGTHS.flip(0))], [1, 1, 2]),
    "unique": (grouped, [(X, IDS), (X, IDS + (IDS == 3)), (X, IDS * 0)], [1, 1, 2]),
    "unique consecutive": (runs, [(X, IDS), (X, IDS.flip(0)), (X, IDS * 0)], [1, 1, 2]),
    "repeated": (
        lambda m, x, n: m.last(m.first(x).repeat_interleave(n, 0)).sum(1),
        [(X, IDS), (X, IDS.flip(0)), (X, IDS * 2)],
        [1, 1, 2],
    ),
    "counted": (
        lambda m, x, n: m.last(m.first(x)).sum(1) * n.bincount()[n],
        [(X, IDS), (X, IDS.flip(0)), (X, IDS * 2)],
        [1, 1, 2],
    ),
    "one hot": (
        lambda m, x, n: m.last(m.first(x)).sum(1) * F.one_hot(n).to(x)[:, 1],
        [(X, IDS), (X, IDS * 2)],
        [1, 2],
    ),
    "equal": (lambda m, x, y: m.last(m.first(x)).sum(1) * (2 if x.equal(y) else 3), [(X, X.clone()), (X, UP)], [1, 2]),
    "in range": (in_range, [(X, IDS), (X, 2 * IDS), (X, IDS.flip(0))], [1, 2, 2]),
    "written": (written, [(X,), (X.flip(0),)], [1, 1]),
    "inner gradient": (differentiated, [(X,), (X.flip(0),)], [1, 1]),
    "outside torch": (outside_torch, [(X, IDS), (X, IDS.flip(0)), (X, IDS)], [1, 2, 2]),
}


@pytest.mark.parametrize(("function", "calls", "captures"), READS.values(), ids=READS)
def test_what_is_read_decides_the_capture(
    function: Callable[..., Tensor], calls: list[Inputs], captures: list[int]
) -> None:
    model = Model(function)
    step = gramfx.transform(model, compile=False)
    for inputs, count in zip(calls, captures, strict=True):
        check(step, model, inputs)
        assert step.captures == count


class Experts(nn.Module):
    """A mixture of experts: a loop over those that were hit, each on its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.dropout = nn.Linear(4, 4), nn.Dropout(0.3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out.sum(1)


class Skipping(nn.Module):
    """Layers that are left out by chance, as in LayerDrop, with dropout and a batch norm in between."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.dropout = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        for layer in self.layers:
            if torch.rand([]) > 0.4:
                x = self.dropout(layer(x)).tanh()
        return self.norm(self.layers[0](x)).pow(2).sum(1) * (1 if self.calls.item() < 4 else 2)


class Packed(nn.Module):
    """A packed sequence that is unpacked to as many steps as its longest has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(out).pow(2).mean((1, 2))


@pytest.mark.parametrize(("build", "width"), [(Experts, 4), (Skipping, 3)], ids=["experts", "skipped layers"])
def test_draws_and_buffers_are_those_of_one_call(build: Callable[[], nn.Module], width: int) -> None:
    """Also where captures were tried that do not serve the call."""
    model = build()
    step = gramfx.transform(model, compile=False)
    for seed in range(6):
        check(step, model, (torch.randn(4, width),), seed)


def test_packed_sequences_as_long_as_their_longest() -> None:
    model = Packed()
    step = gramfx.transform(model, compile=False)
    for lengths, count in (([2, 4, 1], 1), ([4, 4, 3], 1), ([1, 2, 3], 2), ([4, 1, 1], 2)):
        check(step, model, (ROWS, torch.tensor(lengths)))
        assert step.captures == count


def test_samples_of_a_nested_tensor_one_by_one() -> None:
    """Their numbers of rows are read."""
    model = Model(lambda m, x: torch.stack([m.last(one).tanh().sum() for one in m.first(x).unbind()]))
    step = gramfx.transform(model, compile=False)
    for lengths, count in (([2, 1, 3], 1), ([3, 2, 1], 2), ([2, 1, 3], 2)):
        rows = torch.nested.nested_tensor(list(torch.randn(6, 3).split(lengths)), layout=torch.jagged)
        check(step, model, (rows,))
        assert step.captures == count


def test_batches_of_one_and_of_many() -> None:
    """One capture for each batch size and reading, also where one for all sizes was asked for."""
    model = Model(branches)
    step = gramfx.transform(model, compile=False, dynamic=True)
    with pytest.warns(StaticBatchWarning, match="tensor values"):
        check(step, model, (UP,))
    for x in (UP[:1], DOWN[:1], UP[:3], UP):
        check(step, model, (x,))
    assert step.captures == 4


def test_separate_uses_are_captured_too() -> None:
    model = Model(settles)
    step = gramfx.transform(model, compile=False, reuse="separate")
    objectives, _ = step(UP)
    assert relative_error(objectives, model(UP)) < 1e-12
    assert step.captures == 1


def test_captures_are_bounded_and_many_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_CAPTURES", 3)
    monkeypatch.setattr(kept, "MANY_CAPTURES", 2)
    model = Model(clamped)
    step = gramfx.transform(model, compile=False)
    check(step, model, (UP,))
    with pytest.warns(RecaptureWarning, match="values that it reads"):
        check(step, model, (2 * UP,))
    for scale in (3, 4, 2):
        check(step, model, (scale * UP,))
        assert step.captures == 3


def test_capture_and_stages_are_those_of_the_reading() -> None:
    step = gramfx.transform(Model(branches), compile=False).capture(UP)
    assert "tanh" not in str(step.stage("captured"))
    assert step.capture(DOWN).captures == 2
    assert "tanh" in str(step.stage("captured"))
    assert step.capture(2 * UP).captures == 2
    assert "tanh" not in str(step.stage("captured"))


def test_fake_tensors_have_no_values_to_read() -> None:
    step = gramfx.transform(Model(branches), compile=False)
    step.trial = False
    with pytest.raises(DataDependentError):
        step.capture(UP)


def test_statistics_advance_once_where_only_a_trace_succeeds() -> None:
    """Torch's op for them does not say that it changes them."""

    class Sensitive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.norm(self.first(x)).pow(3).sum(), x, create_graph=True)
            return gradient.pow(2).sum(1)

    model = Sensitive()
    step = gramfx.transform(model, compile=False)
    check(step, model, (X,))
    check(step, model, (UP,))
    assert step.captures == 1


class Counting(nn.Module):
    """Changes with the number of its calls, which it keeps in a number and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.seen = nn.Linear(3, 2).double(), 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return self.layer(x).tanh().sum(1) * (1 if self.calls < 3 else 2) * len(self.seen)


def test_what_a_forward_leaves_behind_is_left_once_a_call() -> None:
    torch.manual_seed(0)
    model, plain = Counting(), Counting()
    plain.load_state_dict(model.state_dict())
    step = gramfx.transform(model, compile=False)
    for batch in (4, 4, 5, 5):
        x = torch.randn(batch, 3, dtype=torch.float64)
        rows = jacobian(plain(x), trainable(plain))
        assert relative_error(step(x)[1], rows @ rows.T) <= 1e-12
        assert (model.calls, model.seen) == (plain.calls, plain.seen)
    assert step.captures == 0


def test_what_a_forward_makes_anew_does_not_last() -> None:
    class Storing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.features = nn.Linear(3, 2).double(), list[Tensor]()
            self.size: tuple[int, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            self.features, self.size = [], tuple(x.shape)
            self.features.append(self.layer(x))
            return self.features[0].sum(1)

    step = gramfx.transform(Storing(), compile=False)
    for _ in range(4):
        step(torch.randn(4, 3, dtype=torch.float64))
    # The first leaves another size than it finds.
    assert step.captures == 1


def test_what_a_forward_leaves_behind_is_plain() -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 2).double(), 0.0

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            self.norm = hidden.norm().item()
            return hidden.sum(1) * (2 if self.norm > 1 else 1)

    model, x = Noting(), torch.randn(4, 3, dtype=torch.float64)
    gramfx.transform(model, compile=False)(x)
    assert type(model.norm) is float and model.norm == pytest.approx(model.layer(x).norm().item())


def test_a_tensor_carried_over_is_refused() -> None:
    class Carrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(3, 2).double(), torch.ones(2, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            out, self.last = (hidden * self.last).sum(1), hidden.detach().mean(0)
            return out

    model = Carrying()
    with pytest.raises(UnsupportedError, match="carries a tensor"):
        gramfx.transform(model, compile=False)(torch.randn(4, 3, dtype=torch.float64))


def test_a_comparison_counts_where_the_model_made_it() -> None:
    """What was read first is compared only where what was read second lets it."""

    def forward(x: Tensor, y: Tensor) -> Tensor:
        first, second = x.sum().item(), y.sum().item()
        return x * (2 if second > 0 and 1 / first > 0.1 else 1)

    layer = nn.Linear(1, 1).double()
    step = gramfx.transform(lambda x, y: forward(layer(x) * 0 + x + layer(x), y).sum(1), compile=False)
    for parameter in layer.parameters():
        parameter.data.zero_()
    one = torch.ones(2, 1, dtype=torch.float64)
    for x, y in ((one, one), (0 * one, -one), (one, -one)):
        rows = jacobian(forward(layer(x) * 0 + x + layer(x), y).sum(1), trainable(layer))
        assert relative_error(step(x, y)[1], rows @ rows.T) <= 1e-12


def test_the_sign_of_zero_is_read() -> None:
    layer = nn.Linear(1, 1).double()
    step = gramfx.transform(
        lambda x, sign: (layer(x) * (1 + 0.5 * math.copysign(1.0, sign.item()))).sum(1),
        in_dims=(0, None),
        compile=False,
    )
    x = torch.ones(2, 1, dtype=torch.float64)
    factors = [step(x, torch.tensor(zero, dtype=torch.float64))[0].sum().item() for zero in (0.0, -0.0)]
    assert factors[0] == pytest.approx(3 * factors[1])
