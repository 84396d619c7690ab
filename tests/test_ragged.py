"""Jagged nested tensors: exact against autograd on the same nested model, one cotangent where samples are apart."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramfx
from gramfx.errors import (
    BatchSizeError,
    CaptureMismatchError,
    CoupledObjectivesWarning,
    InputError,
    ObjectiveError,
    StaticBatchWarning,
    UnsupportedError,
)
from tests import reference

# Torch says of itself that nested tensors are a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

LENGTHS = (2, 5, 1)
Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """The layers that the forwards below choose from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(3, 4), nn.Linear(4, 1), nn.LayerNorm(4)
        self.embedding = nn.Embedding(10, 3, padding_idx=0)
        self.heads = nn.ModuleList([nn.Linear(3, 8) for _ in range(3)])
        self.scale, self.samples = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3, 1, 4))
        self.rows = nn.Parameter(torch.randn(8, 4))
        self.batch_norm = nn.BatchNorm1d(4)

    def hidden(self, rows: Tensor) -> Tensor:
        """``[samples, rows, 4]``."""
        return self.first(rows).tanh()

    def attended(self, rows: Tensor, **options: Any) -> Tensor:
        """Self-attention of two heads: ``[samples, rows, 8]``."""
        heads = [head(rows).unflatten(-1, (2, 4)).transpose(1, 2) for head in self.heads]
        return F.scaled_dot_product_attention(*heads, **options).transpose(1, 2).flatten(-2)


def nested(*shape: int, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Samples of two, five and one row."""
    return torch.nested.nested_tensor([torch.randn(n, *shape).double() for n in lengths], layout=torch.jagged)


def ids() -> Tensor:
    """A sequence of ids for each sample."""
    return torch.nested.nested_tensor([torch.randint(10, (n,)) for n in LENGTHS], layout=torch.jagged)


def offsets(rows: Any) -> Tensor:
    """Where each sample's rows begin, and the last ones end."""
    found: Tensor = rows.offsets()
    return found


def known(rows: Any) -> set[str]:
    """What a nested tensor remembers of its lengths."""
    return set(rows._metadata_cache)


def pooled(rows: Tensor) -> Tensor:
    """``[samples, …]``."""
    return torch.nested.to_padded_tensor(rows, 0.0).sum(1)


def of_values(change: Callable[[Model, Tensor], Tensor]) -> Forward:
    """A forward that changes the rows of all samples as one tensor, and makes them nested again."""

    def forward(model: Model, rows: Tensor) -> Tensor:
        made = change(model, model.hidden(rows).values())
        found = torch.nested.nested_tensor_from_jagged(made, offsets(rows), min_seqlen=1, max_seqlen=5)
        return pooled(found).square().sum(1)

    return forward


def model_of(seed: int = 0) -> Model:
    """In double precision."""
    torch.manual_seed(seed)
    return Model().double()


def check(
    forward: Callable[..., Tensor],
    *inputs: Tensor,
    like: Callable[..., Tensor] | None = None,
    **options: Any,
) -> gramfx.Step:
    """Asserts that Gramian and gradient are autograd's. like: the same model as autograd can differentiate it."""
    model = model_of()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: Tensor) -> Tensor:
            return forward(model, *given)

    wanted = reference.trainable(model)
    jacobian = reference.jacobian((like or forward)(model, *inputs), wanted)
    step = gramfx.transform(Net(), **{"compile": False, **options})
    objectives, gramian = step(*inputs)
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-10
    weights = torch.linspace(-1.0, 2.0, objectives.numel()).double()
    objectives.backward(weights.reshape(objectives.shape))
    got = torch.cat([reference.flat(parameter.grad, parameter) for parameter in wanted])
    assert reference.relative_error(got, weights @ jacobian) <= 1e-10
    return step


def coupled(step: gramfx.Step) -> int:
    """How many uses need a cotangent for each objective."""
    return sum(use.coupled for use in step.lowering.uses)


APART: dict[str, Forward] = {
    "the issue's model": lambda m, x: pooled(m.second(m.hidden(x))).squeeze(1),
    "residual, norm": lambda m, x: pooled(m.second(torch.relu(m.norm(m.first(x)) + m.first(x)))).squeeze(1),
    "unsqueezed": lambda m, x: pooled(m.hidden(x.unsqueeze(-2))).flatten(1).square().sum(1),
    "squeezed again": lambda m, x: pooled(m.hidden(x.unsqueeze(-2)).squeeze(-2)).square().sum(1),
    "several objectives a sample": lambda m, x: pooled(m.hidden(x)),
    "largest": lambda m, x: torch.nested.to_padded_tensor(m.first(x), -1e9).amax(1).sum(1),
    "largest, by torch": lambda m, x: m.first(x).amax(1).sum(1),
    "softmax over features": lambda m, x: pooled(m.first(x).softmax(-1) * m.first(x)).sum(1),
    "joined": lambda m, x: pooled(torch.cat([m.first(x), m.norm(m.first(x))], -1)).square().sum(1),
    "mean by lengths": lambda m, x: pooled(m.hidden(x)).sum(1) / offsets(x).diff(),
    "scaled": lambda m, x: pooled(m.norm(m.first(x) * m.scale)).sum(1),
    "detached": lambda m, x: pooled(m.hidden(x) * m.first(x).detach()).sum(1),
    "transposed": lambda m, x: pooled(m.first(x.transpose(1, 2).tanh().transpose(1, 2)).tanh()).sum(1),
    "segments": lambda m, x: torch.segment_reduce(m.hidden(x).values(), "sum", offsets=offsets(x)).sum(1),
    "attention": lambda m, x: pooled(m.attended(x)).square().sum(1),
    "values, row by row": of_values(lambda m, v: (v.reshape(8, 2, 2) @ v.reshape(8, 2, 2)).reshape(8, 4)),
    "values, every second": of_values(lambda m, v: v.repeat_interleave(2, 0)[1::2]),
}


@pytest.mark.parametrize("name", APART)
def test_samples_apart(name: str) -> None:
    """One cotangent serves all samples, and nothing warns."""
    assert coupled(check(APART[name], nested(3))) == 0


def test_rows_of_two_tokens() -> None:
    """Each row is itself a matrix."""
    step = check(lambda m, x: pooled(m.hidden(x)).flatten(1).square().sum(1), nested(2, 3))
    assert coupled(step) == 0


def test_ids() -> None:
    """An embedding of ragged ids."""
    assert coupled(check(lambda m, i: pooled(m.hidden(m.embedding(i))).sum(1), ids())) == 0


TOGETHER: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "running sum": lambda m, v: v.cumsum(0),
    "shifted": lambda m, v: v.roll(1, 0),
    "neighbours": lambda m, v: torch.cat([v[:-1] + v[1:], v[:1]]),
    "in equal blocks": lambda m, v: v.view(4, 2, 4).sum(1, keepdim=True).expand(4, 2, 4).reshape(8, 4),
    "attention of all": lambda m, v: (v @ v.T).softmax(-1) @ v,
    "batch norm": lambda m, v: F.batch_norm(v, None, None, m.scale, training=True),
    "half and half": lambda m, v: torch.cat(v.chunk(2)[::-1]),
    "permuted": lambda m, v: v[torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_rows_of_other_samples(name: str) -> None:
    """Coupled and said so where rows of several samples meet."""
    with pytest.warns(CoupledObjectivesWarning):
        step = check(of_values(TOGETHER[name]), nested(3))
    assert coupled(step) > 0


def test_offsets_of_another_input() -> None:
    """Samples cut by offsets that are not their own."""
    other = nested(3, lengths=(3, 1, 4))

    def forward(m: Model, x: Tensor, y: Tensor) -> Tensor:
        return torch.segment_reduce(m.hidden(x).values(), "sum", offsets=offsets(y)).sum(1)

    with pytest.warns(CoupledObjectivesWarning):
        check(forward, nested(3), other)


def test_a_parameter_with_a_dim_of_rows() -> None:
    """And one with a dim of samples: each of their rows belongs to one sample."""
    check(of_values(lambda m, v: v + m.rows), nested(3))
    check(lambda m, x: pooled(m.hidden(x) * m.samples).sum(1), nested(3))


def test_several_inputs() -> None:
    """With the same offsets, with others, with a dense one, and one twice."""
    x, dense = nested(3), torch.randn(3, 4).double()
    alike = torch.nested.nested_tensor_from_jagged(torch.randn(8, 3).double(), offsets(x))
    assert coupled(check(lambda m, a, b: pooled((m.first(a) * m.first(b)).tanh()).sum(1), x, alike)) == 0
    assert coupled(check(lambda m, a, b: pooled((m.first(a) * m.first(b)).tanh()).sum(1), x, x)) == 0
    other = nested(3, lengths=(3, 1, 4))
    assert coupled(check(lambda m, a, b: (pooled(m.hidden(a)) * pooled(m.hidden(b))).sum(1), x, other)) == 0
    check(lambda m, a, d: pooled(m.hidden(a) * d.unsqueeze(1)).sum(1) * m.second(d)[:, 0], x, dense)


@pytest.mark.parametrize("lengths", [(4, 0, 2), (4, 4, 4), (1, 1, 1), (4,), (0, 0, 0), (0, 3)])
def test_lengths(lengths: tuple[int, ...]) -> None:
    """Empty samples, equal ones, as many rows as samples, one sample."""
    check(lambda m, x: pooled(m.hidden(x)).square().sum(1), nested(3, lengths=lengths))


def test_longest_as_told() -> None:
    """A nested tensor may be padded further than its longest sample, by values that count."""
    x = nested(3)
    told = torch.nested.nested_tensor_from_jagged(x.values(), offsets(x), min_seqlen=0, max_seqlen=9)
    check(lambda m, x: torch.nested.to_padded_tensor(m.hidden(x), 1.0).sum(1).square().sum(1), told)


def test_without_samples() -> None:
    """``in_dims=None``, and objectives that are rows."""
    check(lambda m, x: pooled(m.hidden(x)).sum(1), nested(3), in_dims=None)
    check(lambda m, x: m.hidden(x).values().sum(1), nested(3))


REDUCED: dict[str, tuple[Forward, Forward]] = {
    "sum": (lambda m, x: m.hidden(x).sum(1).square().sum(1), lambda m, x: pooled(m.hidden(x)).square().sum(1)),
    "kept sum": (
        lambda m, x: m.hidden(x).sum(dim=1, keepdim=True).square().sum((1, 2)),
        lambda m, x: pooled(m.hidden(x)).square().sum(1),
    ),
    "sum of features": (lambda m, x: pooled(m.hidden(x).sum(-1)), lambda m, x: pooled(m.hidden(x)).sum(1)),
    "mean": (
        lambda m, x: m.hidden(x).mean(1).square().sum(1),
        lambda m, x: (pooled(m.hidden(x)) / offsets(x).diff()[:, None]).square().sum(1),
    ),
}


@pytest.mark.parametrize("name", REDUCED)
def test_reductions_that_torch_does_not_differentiate(name: str) -> None:
    """Pooling by ``sum`` or ``mean``: the model without them is what autograd can do."""
    forward, like = REDUCED[name]
    with pytest.raises(RuntimeError):
        forward(model_of(), nested(3)).sum().backward()
    assert coupled(check(forward, nested(3), like=like)) == 0


def test_other_numbers_and_other_lengths() -> None:
    """A capture serves batches of as many rows with the same extremes; others get their own."""
    model = model_of()
    step = gramfx.transform(lambda x: pooled(model.hidden(x)).square().sum(1), compile=False)
    for number, lengths in enumerate([LENGTHS, (5, 1, 2), (4, 4, 1), (5, 2, 1), (2, 3, 3)]):
        x = nested(3, lengths=lengths)
        jacobian = reference.jacobian(pooled(model.hidden(x)).square().sum(1), reference.trainable(model))
        assert reference.relative_error(step(x)[1], jacobian @ jacobian.T) <= 1e-10
        assert step.captures == (1, 1, 2, 2, 3)[number]


def test_what_is_the_users_stays() -> None:
    """The input's rows, offsets and what it knows of its lengths; its gradient is a nested tensor."""
    x = nested(3).detach().requires_grad_()
    before = (x.detach().values().clone(), offsets(x).clone(), known(x))
    model = model_of()
    objectives, _ = gramfx.transform(lambda x: pooled(model.hidden(x)).square().sum(1), compile=False)(x)
    objectives.sum().backward()
    assert x.grad is not None
    got = x.grad.values()
    again = x.detach().requires_grad_()
    pooled(model.hidden(again)).square().sum().backward()
    assert again.grad is not None
    assert reference.relative_error(got, again.grad.values()) <= 1e-12
    assert torch.equal(x.detach().values(), before[0])
    assert torch.equal(offsets(x), before[1])
    assert known(x) == before[2]


def test_compiled() -> None:
    """By Inductor."""
    check(lambda m, x: pooled(m.norm(m.hidden(x))).square(), nested(3), compile=True)


def test_on_fake_tensors_alone() -> None:
    """Without trying the capture."""
    model = model_of()
    step = gramfx.transform(lambda x: pooled(model.hidden(x)).square().sum(1), compile=False)
    step.trial = False
    assert step.capture(nested(3)).plan.batch == 3


def test_dynamic_is_static() -> None:
    """Asked for one graph for all sizes, it says that there is one for each."""
    with pytest.warns(StaticBatchWarning, match="rows is baked in"):
        check(lambda m, x: pooled(m.hidden(x)).sum(1), nested(3), dynamic=True)


def narrowed() -> Tensor:
    """A jagged tensor with rows that belong to no sample."""
    start, length = torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1])
    return torch.nested.narrow(torch.randn(3, 6, 3).double(), 1, start, length, layout=torch.jagged)


def strided() -> Tensor:
    """A nested tensor of the older layout."""
    return torch.nested.nested_tensor([torch.randn(n, 3).double() for n in LENGTHS])


REFUSED: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]], type[Exception], str]] = {
    "strided": (lambda m, x: pooled(m.hidden(x)).sum(1), lambda: (strided(),), UnsupportedError, "layout=torch.jagged"),
    "holes": (lambda m, x: pooled(m.hidden(x)).sum(1), lambda: (narrowed(),), UnsupportedError, "contiguous"),
    "nested objectives": (lambda m, x: m.first(x), lambda: (nested(3),), ObjectiveError, "to_padded_tensor"),
    "no derivative in torch": (
        lambda m, x: m.first(x).max(1)[0].sum(1),
        lambda: (nested(3),),
        UnsupportedError,
        "to_padded_tensor",
    ),
    # Its gradient in torch 2.13 sums over features: what autograd says is not the derivative.
    "wrong in torch": (
        lambda m, x: pooled(m.first(x).softmax(1) * m.first(x)).sum(1),
        lambda: (nested(3),),
        CaptureMismatchError,
        "disagree",
    ),
    "other sizes": (
        lambda m, x, d: pooled(m.hidden(x)).sum(1),
        lambda: (nested(3), torch.randn(4, 3).double()),
        BatchSizeError,
        "in_dims",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """By an error that says what to do."""
    forward, inputs, kind, text = REFUSED[name]
    model = model_of()
    with pytest.raises(kind, match=text):
        gramfx.transform(lambda *given: forward(model, *given), compile=False)(*inputs())


def test_refused_in_dims() -> None:
    with pytest.raises(InputError, match="0 or None"):
        gramfx.transform(model_of().first, in_dims=1, compile=False)(nested(3))


def test_refused_closed_over() -> None:
    """A nested tensor that a trace would freeze."""
    model, held = model_of(), nested(3)
    factor = torch.nested.nested_tensor_from_jagged(torch.randn(8, 4).double(), offsets(held))
    with pytest.raises(UnsupportedError, match="not given"):
        gramfx.transform(lambda x: pooled(model.hidden(x) * factor).sum(1), compile=False)(held)


@pytest.mark.filterwarnings("ignore::gramfx.errors.DenseJacobianWarning")
@pytest.mark.filterwarnings("ignore::gramfx.errors.EagerRegionWarning")
@pytest.mark.parametrize("batch_dim", [0, None])
def test_engine_runs_eagerly(batch_dim: int | None) -> None:
    """What Dynamo hands over is not compiled; exact all the same."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()

        def forward(self, x: Tensor) -> Tensor:
            return pooled(self.model.hidden(x)).square().sum(1)

    net, x = Net(), nested(3)
    wanted = list(net.model.first.parameters())
    jacobian = reference.jacobian(net(x), wanted)
    engine = gramfx.Engine(net.model.first, batch_dim=batch_dim, compile=False)
    gramian = engine.compute_gramian(net(x))
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-10


MEMORY = """
import sys, torch, warnings
warnings.simplefilter("ignore")
from torch import nn
import gramfx
torch.manual_seed(0)
linear = nn.Linear(512, 512)
lengths = [100, *torch.randint(1, 101, (63,)).tolist()]
x = torch.nested.nested_tensor([torch.randn(n, 512) for n in lengths], layout=torch.jagged)
def loss(x):
    return torch.nested.to_padded_tensor(linear(x.unsqueeze(-2)).squeeze(-2), 0.0).sum(1).square().mean(1)
if sys.argv[1] == "plain":
    loss(x).sum().backward()
else:
    objectives, gramian = gramfx.transform(loss, compile=False)(x)
    objectives.backward(1 / gramian.diagonal().sqrt())
# Not ru_maxrss, which starts from that of the process that this one was forked from.
print(next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_peak_memory() -> None:
    """In MiB, of whole processes: 64 samples of up to 100 rows, ``Linear(512, 512)``."""
    peaks = [
        int(subprocess.run([sys.executable, "-c", MEMORY, kind], check=True, capture_output=True).stdout)
        for kind in ("plain", "gramian")
    ]
    assert peaks[1] < 1024
    # Both with torch itself; ours with what it takes to capture.
    assert peaks[1] < peaks[0] + 256
