"""Captured graphs differentiate as the eager model does, or are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramfx
from gramfx import capture as capturing
from gramfx import torch_compat
from gramfx.capture import capture
from gramfx.errors import CaptureMismatchError
from gramfx.export import by_export
from gramfx.program import Program, read_call
from gramfx.tracing import by_tracing
from tests import reference
from tests.architectures import ARCHITECTURES, Architecture, load, parameters

CHOSEN = [a for a in ARCHITECTURES if not a.slow and not a.random and torch.float64 in a.dtypes][::9]


class Function(nn.Module):
    """Two layers and a function of them and the input."""

    function: Any

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(3, 4), nn.Linear(4, 2), function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def target_without_gradient(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = net.second(net.first(x)) * 2
    return (net.second(net.first(x)) - target).square()


def nested_regions(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = net.first(x).sum(1, keepdim=True)
        with torch.enable_grad():
            inner = net.first(x)
    return net.second(inner * scale.cos())


def detached(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.second(h * h.detach())


def residual(net: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    y = net.second(torch.tanh(net.first(x)))
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def penalised_by_its_own_gradient(net: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    y = net.second(torch.tanh(net.first(x)))
    (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return y * slope.sum(1, keepdim=True)


def forward_of_vmap(net: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: net.second(torch.tanh(net.first(row))))(x)


def jacobian_inside(net: Any, x: Tensor) -> Tensor:
    return torch.vmap(torch.func.jacrev(lambda row: torch.tanh(net.first(row)).sum()))(x)


FUNCTIONS = [
    target_without_gradient,
    nested_regions,
    detached,
    residual,
    penalised_by_its_own_gradient,
    forward_of_vmap,
    jacobian_inside,
]


def agrees(program: Program, args: tuple[object, ...], *, method: Callable[..., object] | None = None) -> None:
    """Asserts that captured and eager gradients of three random combinations agree."""
    call = read_call(args, {}, (), 0)
    captured = capture(program, call, dynamic=False) if method is None else None
    if captured is None:
        program.call, program.loose = call, ()
        captured = by_tracing(program, call, False)
    learned = reference.trainable(program)
    objectives = captured.graph_module(*captured.fetch(program, [*call.tensors, *program.loose]))[0]
    eager = program(*call.tensors, *program.loose)
    assert reference.relative_error(objectives, eager) <= 1e-12
    for seed in range(3):
        weights = torch.rand(eager.numel(), generator=torch.Generator().manual_seed(seed)).to(eager)
        got = reference.weighted_gradient(objectives, learned, weights)
        assert reference.relative_error(got, reference.weighted_gradient(eager, learned, weights)) <= 1e-10


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions(function: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    agrees(Program(Function(function), None), (torch.rand(4, 3, dtype=torch.float64),))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_by_tracing(function: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    agrees(Program(Function(function), None), (torch.rand(4, 3, dtype=torch.float64),), method=by_tracing)


@pytest.mark.parametrize("architecture", parameters([a for a in CHOSEN if not a.keywords and a.targets is None]))
def test_architectures(architecture: Architecture) -> None:
    loaded = load(architecture, torch.float64)
    program = Program(loaded.model, loaded.objective)
    call = read_call(loaded.args, {}, (), architecture.in_dims)
    captured = capture(program, call, dynamic=False)
    objectives = captured.graph_module(*captured.fetch(program, [*call.tensors, *program.loose]))[0]
    weights = torch.linspace(0.5, 1.5, objectives.numel()).to(objectives)
    got = reference.weighted_gradient(objectives, reference.trainable(loaded.model), weights)
    eager = load(architecture, torch.float64)
    want = reference.weighted_gradient(eager.objectives(), reference.trainable(eager.model), weights)
    assert reference.relative_error(got, want) <= 1e-10


def test_a_capture_that_differentiates_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compat, "_keep_stop_gradients", lambda graph_module: None)
    monkeypatch.setattr(capturing, "by_tracing", by_export)
    program = Program(Function(target_without_gradient), None)
    with pytest.raises(CaptureMismatchError, match=r"first\.weight"):
        capture(program, read_call((torch.rand(4, 3, dtype=torch.float64),), {}, (), 0), dynamic=False)


def test_closed_over_tensors_are_read_anew() -> None:
    scale = torch.full((2,), 2.0, dtype=torch.float64)
    program = Program(Function(lambda net, x: net.second(net.first(x)) * scale), None)
    call = read_call((torch.rand(4, 3, dtype=torch.float64),), {}, (), 0)
    captured = capture(program, call, dynamic=False)
    scale.mul_(3)
    got = captured.graph_module(*captured.fetch(program, [*call.tensors, *program.loose]))[0]
    assert reference.relative_error(got, program(*call.tensors, *program.loose)) <= 1e-12


def test_a_trace_holds_tensors_made_from_numbers() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_exporting():
                raise RuntimeError("not by export")
            return self.layer(x) * torch.tensor(3.0) + torch.tensor([1.0, 2.0])

    model = Scaled().double()
    source = torch.randn(4, 3, dtype=torch.float64)
    step = gramfx.transform(model, lambda out: out.square().sum(1), compile=False)
    _, gramian = step(source)
    jacobian = reference.jacobian(model(source).square().sum(1), reference.trainable(model))
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-12


def test_gradients_of_rounding_alone_are_no_mismatch() -> None:
    """The mean of a softmax is constant, so that its derivative is what rounding leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Softmax(-1)).double()
    source = torch.randn(3, 4, dtype=torch.float64)
    _, gramian = gramfx.transform(model, lambda out: out.mean(1), compile=False)(source)
    assert gramian.abs().max() < 1e-25
