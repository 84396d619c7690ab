"""``torch.compile(model, backend="gramfx")``: plain training as ever, and Gramians with the criterion outside."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramfx
from gramfx.errors import CoupledObjectivesError, DenseJacobianWarning, InputError
from tests import reference
from tests.architectures import ARCHITECTURES, FIXED, Architecture, load, load_resized, parameters
from tests.architectures.base import SEED_FORWARD, apply_objective
from tests.checks import untouched

FLOAT64 = [a for a in ARCHITECTURES if torch.float64 in a.dtypes]
#: Every ninth, so that the run stays short; all of them are run with the slow tests.
SOME = FLOAT64[::9]
#: Dynamo leaves recurrent layers to eager code, where their parameters' rows are formed one by one.
RECURRENT = ("rnn", "gru", "lstm")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No graph of another test, and no error of a backend taken for a reason to run eagerly."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch._dynamo.reset()


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(model, backend="gramfx", options={"compile": False, **options})
    return made


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def net(*, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def data(batch: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, 3, dtype=torch.float64, generator=generator), torch.arange(batch) % 4


def agrees(objectives: Tensor, gramian: Tensor, plain: Tensor, ours: nn.Module, other: nn.Module) -> None:
    """The Gramian and a combined gradient of one model against dense autograd of its twin."""
    jacobian = reference.jacobian(plain, reference.trainable(other))
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-10
    assert gramian.dtype == objectives.dtype
    assert not gramian.requires_grad
    weights = torch.linspace(-1.0, 2.0, len(jacobian)).to(jacobian)
    objectives.backward(weights.reshape(objectives.shape))
    got = torch.cat([reference.flat(parameter.grad, parameter) for parameter in reference.trainable(ours)])
    assert reference.relative_error(got, weights @ jacobian) <= 1e-10


def check(architecture: Architecture) -> None:
    plain = load(architecture, torch.float64)
    with architecture.context():
        jacobian = reference.jacobian(plain.objectives(), reference.trainable(plain.model))
    ours = load(architecture, torch.float64)
    before = reference.snapshot(ours.model)
    with architecture.context(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(SEED_FORWARD)
        output = compiled(ours.model)(*ours.args, **ours.kwargs)
        untouched(before, reference.snapshot(plain.model), reference.snapshot(ours.model))
        objectives = apply_objective(ours.objective, output, ours.targets)
        gramian = gramfx.gramian(objectives)
    ways = {one.category for one in caught} & {gramfx.errors.EagerRegionWarning, DenseJacobianWarning}
    assert not ways or architecture.name.startswith(RECURRENT)
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= architecture.tolerance(torch.float64)
    weights = torch.linspace(-1.0, 2.0, len(jacobian)).to(jacobian)
    objectives.backward(weights.reshape(objectives.shape).to(objectives))
    got = torch.cat([reference.flat(p.grad, p) for p in reference.trainable(ours.model)])
    assert reference.relative_error(got, weights @ jacobian) <= architecture.tolerance(torch.float64)


@pytest.mark.parametrize("architecture", parameters([a for a in SOME if not a.slow], always=2))
def test_some_architectures(architecture: Architecture) -> None:
    check(architecture)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_all_architectures(part: int) -> None:
    failed = {}
    for architecture in [a for a in FLOAT64 if not a.slow][part::8]:
        torch._dynamo.reset()
        try:
            check(architecture)
        except Exception as problem:
            failed[architecture.name] = repr(problem)
    assert not failed


def conv() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (2, 4)), layer, nn.Flatten())


def coupled() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4))


@pytest.mark.parametrize("make", [net, conv, attention, coupled])
def test_few_recompiles_over_batch_sizes(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    ours = make().double()
    torch.manual_seed(0)
    other = make().double()
    run = compiled(ours)
    for batch in (4, 7, 12, 12, 4):
        inputs, targets = data(batch)
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gramfx.errors.CoupledObjectivesWarning)
            losses = F.cross_entropy(run(inputs), targets, reduction="none")
            gramian = gramfx.gramian(losses)
        torch.manual_seed(1)
        ours.zero_grad()
        agrees(losses, gramian, F.cross_entropy(other(inputs), targets, reduction="none"), ours, other)
    assert graphs() - 1 <= 2


@pytest.mark.parametrize("criterion", [lambda o: o.mean(), lambda o: o[:, 0] - o[:, 0].mean(), lambda o: o])
def test_criteria_over_batch_sizes(criterion: Callable[[Tensor], Tensor]) -> None:
    ours, other = net(), net()
    run = compiled(ours)
    for batch in (4, 7, 12, 12, 4):
        objectives = criterion(run(data(batch)[0]))
        gramian = gramfx.gramian(objectives)
        ours.zero_grad()
        agrees(objectives, gramian, criterion(other(data(batch)[0])), ours, other)
    assert graphs() - 1 <= 2


def over_batch_sizes(architecture: Architecture) -> None:
    """Batches of 4, 7, 12, 12 and 4 through one compiled model, against autograd, with two recompiles at most."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours = load_resized(architecture, 4).model
    run, first = compiled(ours), 0
    for count in (4, 7, 12, 12, 4):
        plain, other = load_resized(architecture, count), copy.deepcopy(ours)
        with architecture.context(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            torch.manual_seed(SEED_FORWARD)
            want = apply_objective(plain.objective, other(*plain.args, **plain.kwargs), plain.targets)
            jacobian = reference.jacobian(want, reference.trainable(other))
            torch.manual_seed(SEED_FORWARD)
            objectives = apply_objective(plain.objective, run(*plain.args, **plain.kwargs), plain.targets)
            gramian = gramfx.gramian(objectives)
        assert reference.relative_error(gramian, jacobian @ jacobian.T) <= architecture.tolerance(torch.float64)
        first = first or graphs()
    assert graphs() - first <= 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_few_recompiles_on_all_architectures(part: int) -> None:
    failed = {}
    for architecture in [a for a in FLOAT64 if not a.slow and a.batch_size and a.name not in FIXED][part::8]:
        try:
            over_batch_sizes(architecture)
        except Exception as problem:
            failed[architecture.name] = repr(problem)
    assert not failed


@pytest.mark.parametrize(
    ("criterion", "coupled"),
    [
        (lambda o: o.square().sum(1), False),
        (lambda o: o.relu_().sum(1), False),
        (lambda o: o, False),
        (lambda o: o.T.contiguous(), False),
        (lambda o: o.reshape(-1), False),
        (lambda o: o[:, 0] - o[:, 0].mean(), True),
        (lambda o: o.flip(0).exp().sum(1), True),
        (lambda o: torch.stack([o.mean(), o.square().mean()]), True),
        (lambda o: o.square().mean(), True),
        (lambda o: o[1], True),
    ],
)
def test_any_criterion(criterion: Callable[[Tensor], Tensor], coupled: bool) -> None:
    ours, other = net(), net()
    objectives = criterion(compiled(ours)(data()[0]))
    if coupled:
        with pytest.raises(CoupledObjectivesError, match="one sample's rows"):
            gramfx.gramian(objectives, coupled="error")
    agrees(objectives, gramfx.gramian(objectives), criterion(other(data()[0])), ours, other)


def test_coupling_inside_the_model_is_said() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    objectives = compiled(model)(data()[0]).square().sum(1)
    with pytest.warns(gramfx.errors.CoupledObjectivesWarning, match="batch"):
        gramfx.gramian(objectives)


class Broken(nn.Module):
    """Graph breaks between layers; ``again`` uses one layer on both sides of a break."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.first, self.second, self.third = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        torch._dynamo.graph_break()
        hidden = self.second(hidden).tanh()
        torch._dynamo.graph_break()
        return self.third(self.second(hidden).tanh() if self.again else hidden)


@pytest.mark.parametrize("again", [False, True])
def test_graph_breaks_add_up(again: bool) -> None:
    torch.manual_seed(0)
    ours = Broken(again).double()
    torch.manual_seed(0)
    other = Broken(again).double()
    objectives = compiled(ours)(data()[0]).square().sum(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gramian = gramfx.gramian(objectives)
    assert graphs() == 3
    assert [one.category for one in caught] == [DenseJacobianWarning] * again
    agrees(objectives, gramian, other(data()[0]).square().sum(1), ours, other)


def test_a_region_called_twice_is_exact() -> None:
    ours, other = net(), net()
    run, inputs = compiled(ours), data()[0]
    objectives = (run(inputs) * run(inputs.flip(1))).sum(1)
    with pytest.warns(DenseJacobianWarning, match="several compiled regions"):
        gramian = gramfx.gramian(objectives)
    agrees(objectives, gramian, (other(inputs) * other(inputs.flip(1))).sum(1), ours, other)


def test_parameters_of_eager_code_count_too() -> None:
    ours, other = net(), net()
    head, twin = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
    twin.load_state_dict(head.state_dict())
    objectives = head(compiled(ours)(data()[0])).sum(1)
    with pytest.warns(DenseJacobianWarning):
        gramian = gramfx.gramian(objectives)
    agrees(
        objectives, gramian, twin(other(data()[0])).sum(1), nn.ModuleList([ours, head]), nn.ModuleList([other, twin])
    )
    only = reference.gramian(twin(other(data()[0])).sum(1), list(other.parameters()))
    objectives = head(compiled(ours)(data()[0])).sum(1)
    assert reference.relative_error(gramfx.gramian(objectives, list(ours.parameters())), only) <= 1e-10


def test_a_wrong_gramian_is_noticed_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from gramfx.regions import CompiledRegion

    made = CompiledRegion._runnable
    monkeypatch.setattr(
        CompiledRegion,
        "_runnable",
        lambda region, graph: (
            (lambda *given: [2 * one for one in made(region, graph)(*given)])
            if graph is not region.forward_graph and graph is not region.gradient_graph
            else made(region, graph)
        ),
    )
    objectives = compiled(net())(data()[0]).square().sum(1)
    for _ in range(2):
        with pytest.raises(gramfx.errors.VerificationError, match="does not fit the model's own gradient"):
            gramfx.gramian(objectives)


def test_plain_use_is_as_ever() -> None:
    ours, other = net(), net()
    run, (inputs, targets) = compiled(ours), data()
    inputs.requires_grad_()
    F.cross_entropy(run(inputs), targets).backward()
    found = [reference.flat(inputs.grad, inputs), *(reference.flat(p.grad, p) for p in ours.parameters())]
    inputs.grad = None
    F.cross_entropy(other(inputs), targets).backward()
    wanted = [reference.flat(inputs.grad, inputs), *(reference.flat(p.grad, p) for p in other.parameters())]
    assert reference.relative_error(torch.cat(found), torch.cat(wanted)) <= 1e-12
    with torch.no_grad():
        assert not run(inputs).requires_grad
        assert torch.allclose(run(inputs), other(inputs))
    ours.eval()
    assert torch.allclose(run(inputs), other(inputs))
    ours.requires_grad_(False)
    assert torch.allclose(run(inputs), other(inputs))


def test_a_gramian_inside_a_function_compiled_as_a_whole() -> None:
    ours, other = net(), net()

    @torch.compile(backend="gramfx", options={"compile": False}, fullgraph=True)
    def whole(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        losses = F.cross_entropy(ours(inputs), targets, reduction="none")
        gramian = gramfx.gramian(losses)
        weights = 1 / gramian.diagonal().sqrt()
        return gramian, weights, (weights * losses).sum()

    for batch in (4, 7, 12):
        inputs, targets = data(batch)
        gramian, weights, total = whole(inputs, targets)
        jacobian = reference.jacobian(
            F.cross_entropy(other(inputs), targets, reduction="none"), list(other.parameters())
        )
        assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-10
        ours.zero_grad()
        total.backward()
        got = torch.cat([reference.flat(p.grad, p) for p in ours.parameters()])
        assert reference.relative_error(got, weights @ jacobian) <= 1e-10
    assert graphs() == 2


def test_parameters_named_inside_a_compiled_function_are_refused() -> None:
    model = net()

    @torch.compile(backend="gramfx", options={"compile": False})
    def chosen(inputs: Tensor) -> Tensor:
        return gramfx.gramian(model(inputs).square().sum(1), [model[0].weight])  # type: ignore[list-item]

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="told of parameters"):
        chosen(data()[0])


def test_objectives_that_depend_on_a_gramian_are_refused() -> None:
    model = net()

    @torch.compile(backend="gramfx", options={"compile": False})
    def nested(inputs: Tensor) -> Tensor:
        losses = model(inputs).square().sum(1)
        return gramfx.gramian(losses * gramfx.gramian(losses).diagonal())

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="depend on a Gramian"):
        nested(data()[0])


def test_what_torch_knows_of_it() -> None:
    assert "gramfx" in torch._dynamo.list_backends()


@pytest.mark.parametrize(
    ("given", "message"), [({"options": {"budget": 3}}, "no such option"), ({"mode": "max-autotune"}, "mode")]
)
def test_unknown_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as raised:
        torch.compile(net(), backend="gramfx", **given)(data()[0])
    assert isinstance(raised.value.inner_exception, InputError)


def test_objectives_without_a_graph_are_refused() -> None:
    with pytest.raises(InputError, match="no graph behind"):
        gramfx.gramian(torch.ones(3))
    with pytest.raises(InputError, match="no parameter"):
        gramfx.gramian(torch.ones(3, requires_grad=True) * 2)


class Straight(torch.autograd.Function):
    """A gradient written by hand."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class HandWritten(nn.Module):
    """A layer, then a hand-written function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        """Signs whose gradient is passed straight through."""
        result: Tensor = Straight.apply(self.layer(inputs))
        return result


def test_what_cannot_be_captured_runs_eagerly_and_exactly() -> None:
    torch.manual_seed(0)
    ours = HandWritten().double()
    torch.manual_seed(0)
    other = HandWritten().double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        objectives = (compiled(ours)(data()[0]) * torch.arange(4)).sum(1)
        gramian = gramfx.gramian(objectives)
    assert {gramfx.errors.EagerRegionWarning, DenseJacobianWarning} <= {one.category for one in caught}
    agrees(objectives, gramian, (other(data()[0]) * torch.arange(4)).sum(1), ours, other)


def test_the_random_test_tells_any_two_samples_apart() -> None:
    from gramfx.jacobian import _scales

    for batch, dtype in ((2, torch.float16), (70, torch.float32), (1500, torch.float64)):
        codes = torch.stack(list(_scales(batch, dtype)))
        assert len(set(map(tuple, codes.T.tolist()))) == batch
        assert bool(torch.isfinite(codes.to(dtype)).all())


def test_inductor_end_to_end() -> None:
    torch.manual_seed(0)
    ours, other = net().float(), net().float()
    run = torch.compile(ours, backend="gramfx")
    for batch in (4, 7, 12):
        inputs, targets = data(batch)
        losses = F.cross_entropy(run(inputs.float()), targets, reduction="none")
        gramian = gramfx.gramian(losses)
        ours.zero_grad()
        losses.sum().backward()
        plain = F.cross_entropy(other(inputs.float()), targets, reduction="none")
        jacobian = reference.jacobian(plain, reference.trainable(other))
        assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-4
        got = torch.cat([reference.flat(p.grad, p) for p in reference.trainable(ours)])
        assert reference.relative_error(got, jacobian.sum(0)) <= 1e-4
    assert graphs() == 2
