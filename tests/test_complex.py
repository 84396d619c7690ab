"""Complex parameters: columns of the Jacobian as ``view_as_real`` gives them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramfx
from tests import reference

Run = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """A function of an input and of parameters of these shapes, real where their name begins with r."""

    def __init__(self, run: Run, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.run = run
        for name, shape in shapes.items():
            dtype = torch.float64 if name.startswith("r") else torch.complex128
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def parts(z: Tensor) -> Tensor:
    """Real and imaginary parts, a row a sample."""
    return torch.view_as_real(z.resolve_conj()).flatten(1)


REAL, COMPLEX = (lambda: torch.randn(5, 4, dtype=torch.float64)), (lambda: torch.randn(5, 4, dtype=torch.complex128))
MODELS: dict[str, tuple[Run, dict[str, tuple[int, ...]], Callable[[], Tensor]]] = {
    "linear": (lambda m, x: F.linear(x.to(m.w.dtype), m.w, m.b).abs().square(), {"w": (3, 4), "b": (3,)}, REAL),
    "complex_input": (lambda m, x: parts(F.linear(x, m.w, m.b)), {"w": (3, 4), "b": (3,)}, COMPLEX),
    "scale_and_shift": (lambda m, x: (x * m.w + m.b).abs(), {"w": (4,), "b": (4,)}, REAL),
    "conjugated": (lambda m, x: parts(torch.exp(x @ m.w.conj())), {"w": (4, 3)}, COMPLEX),
    "used_twice": (lambda m, x: (torch.tanh(x @ m.w) @ m.w.mH).abs(), {"w": (4, 3)}, COMPLEX),
    "tokens": (lambda m, x: (x.unsqueeze(1) * m.t @ m.w).abs().sum(1), {"w": (4, 3), "t": (6, 4)}, COMPLEX),
    "real_and_imaginary": (lambda m, x: torch.tanh(x @ m.w.real + (x @ m.w.imag) ** 2), {"w": (4, 3)}, REAL),
    "convolution": (lambda m, x: F.conv1d(x.unsqueeze(1), m.w).abs().sum(2), {"w": (2, 1, 2)}, COMPLEX),
    "rows_by_ids": (
        lambda m, x: parts(m.w[(x * 3).long().abs() % 7] * m.r_v).square(),
        {"w": (7, 3), "r_v": (3,)},
        REAL,
    ),
    "spectrum": (lambda m, x: torch.fft.ifft(torch.fft.fft(x) * m.w).real.tanh(), {"w": (4,)}, REAL),
    "beside_real": (
        lambda m, x: parts(torch.polar(F.linear(x, m.r_w), x @ m.r_w.T) * m.w),
        {"r_w": (3, 4), "w": (3,)},
        REAL,
    ),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::gramfx.errors.StaticBatchWarning")
def test_exact(name: str, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    run, shapes, make = MODELS[name]
    model, source = Model(run, shapes), make()
    jacobian = reference.jacobian(model(source), reference.trainable(model))
    objectives, gramian = gramfx.transform(model, compile=False, dynamic=dynamic)(source)
    assert gramian.dtype == torch.float64
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-12
    weights = torch.randn_like(objectives)
    objectives.backward(weights)
    got = torch.cat([reference.flat(parameter.grad, parameter) for parameter in reference.trainable(model)])
    assert reference.relative_error(got, weights.flatten() @ jacobian) <= 1e-12


def test_layers_of_torchs_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64), nn.Tanh(), nn.Linear(3, 2, dtype=torch.complex64))
    source = torch.randn(5, 4, dtype=torch.complex64)
    jacobian = reference.jacobian(parts(model(source)), reference.trainable(model))
    _, gramian = gramfx.transform(model, parts, compile=False)(source)
    assert gramian.dtype == torch.float32
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-5


def test_tied_complex_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, dtype=torch.complex128), nn.Tanh(), nn.Linear(3, 3, dtype=torch.complex128))
    model[2].weight = model[0].weight
    source = torch.randn(5, 3, dtype=torch.complex128)
    jacobian = reference.jacobian(parts(model(source)), reference.trainable(model))
    _, gramian = gramfx.transform(model, parts, compile=False)(source)
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-12


def test_conjugates_of_leaves() -> None:
    """A parameter and an input that torch holds as lazy conjugates, whose numbers have no real view."""
    model = Model(lambda m, x: (x @ m.w).abs(), {})
    model.w = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128).conj())
    assert model.w.is_conj()
    source = torch.randn(5, 4, dtype=torch.complex128).conj().requires_grad_()
    objectives, gramian = gramfx.transform(model, compile=False)(source)
    rows = reference.jacobian(model(source), [model.w])
    assert reference.relative_error(gramian, rows @ rows.T) <= 1e-12
    (wanted,) = torch.autograd.grad(model(source).sum(), source)
    (got,) = torch.autograd.grad(objectives.sum(), source)
    torch.testing.assert_close(got, wanted)


def test_gradient_of_a_complex_input() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.complex128)
    source = torch.randn(5, 4, dtype=torch.complex128, requires_grad=True)
    objectives, _ = gramfx.transform(model, parts, compile=False)(source)
    weights = torch.randn_like(objectives)
    (wanted,) = torch.autograd.grad(parts(model(source)), source, weights)
    objectives.backward(weights)
    assert source.grad is not None
    torch.testing.assert_close(source.grad, wanted)


class Polar(nn.Module):
    """Real parameters and a complex output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(self.a(x.real), self.b(x.imag)).tanh()


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "complex_parameters": lambda: nn.Sequential(nn.Linear(4, 3, dtype=torch.complex128), nn.Tanh()),
    "complex_output": Polar,
}


@pytest.mark.parametrize("criterion", [parts, lambda z: z.abs().sum(1), lambda z: z.abs().mean().reshape(1)])
@pytest.mark.parametrize("build", BUILDS.values(), ids=list(BUILDS))
@pytest.mark.filterwarnings("ignore::gramfx.errors.CoupledObjectivesWarning")
def test_compiled_as_a_backend(build: Callable[[], nn.Module], criterion: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, source = build(), torch.randn(5, 4, dtype=torch.complex128)
    jacobian = reference.jacobian(criterion(model(source)), reference.trainable(model))
    compiled = torch.compile(model, backend="gramfx", options={"compile": False})
    losses = criterion(compiled(source))
    assert reference.relative_error(gramfx.gramian(losses), jacobian @ jacobian.T) <= 1e-12
    losses.sum().backward()
    got = torch.cat([reference.flat(parameter.grad, parameter) for parameter in reference.trainable(model)])
    assert reference.relative_error(got, jacobian.sum(0)) <= 1e-12


def test_a_complex_parameter_read_outside_of_the_region() -> None:
    torch.manual_seed(0)
    model, source = nn.Linear(4, 3, dtype=torch.complex128), torch.randn(5, 4, dtype=torch.complex128)
    compiled = torch.compile(model, backend="gramfx", options={"compile": False})

    def losses(layer: Any) -> Tensor:
        return (layer(source) + model.bias.square()).abs().sum(1)

    jacobian = reference.jacobian(losses(model), reference.trainable(model))
    with pytest.warns(gramfx.errors.DenseJacobianWarning):
        gramian = gramfx.gramian(losses(compiled))
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-12
