"""Hand-written autograd Functions: the author's backward counts, and is looked into for what it couples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gramfx
from gramfx.errors import CoupledObjectivesWarning, CustomFunctionError
from tests import reference


class Quantised(torch.autograd.Function):
    """Straight through, with a learned scale; written as one did before ``setup_context``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.round(x / scale) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        inside = (x / scale).abs() < 4
        return gradient * inside, (gradient * (torch.round(x / scale) - x / scale)).sum().reshape(scale.shape)


class Reversed(torch.autograd.Function):
    """The identity, with its gradient turned around; a plain number is an argument too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


class Circle(torch.autograd.Function):
    """Two outputs, in the new style, with a backward that is not the derivative."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return x.sin() * factor, x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * ctx.factor * first * x.cos() - second * x.sin(), None


class Centred(torch.autograd.Function):
    """Keeps samples apart forward, and mixes their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class Scaled(torch.autograd.Function):
    """Divides by a maximum over the batch, which its backward takes for a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.largest = x.abs().max()
        return x / ctx.largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / ctx.largest


#: As modules keep them; from torch 2.14 on these are the engine's own entry.
quantised, circle = Quantised.apply, Circle.apply


class Model(nn.Module):
    """Two layers, and what happens to them."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.scale = nn.Linear(4, 3), nn.Linear(3, 2), nn.Parameter(torch.tensor(0.4))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def inner_gradient(m: Any, x: Tensor) -> Tensor:
    """Differentiates through a Function inside the forward, as a physics-informed net does."""
    x = x.detach().requires_grad_(True)
    value = m.second(Circle.apply(m.first(x), 2.0)[0]).sum()
    return torch.autograd.grad(value, x, create_graph=True)[0]


def reentrant(m: Any, x: Tensor) -> Tensor:
    hidden = checkpoint(lambda z: m.first(z).tanh(), x.detach().requires_grad_(True), use_reentrant=True)
    return m.second(hidden)


class Sized(torch.autograd.Function):
    """Returns a number, and as many tensors, that follow from sizes; takes a keyword."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float = 1.0) -> Any:
        ctx.factor = factor
        return (factor * x, *x.unbind(1), x.shape[0])

    @staticmethod
    def backward(ctx: Any, whole: Tensor, *rest: Any) -> Any:
        return ctx.factor * whole + torch.stack(rest[:-1], 1), None


class Outer(torch.autograd.Function):
    """Runs another Function in its forward, and differentiates through it in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return Reversed.apply(x, 0.5).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(Reversed.apply(x, 0.5).tanh(), x, gradient)


class Chosen(torch.autograd.Function):
    """Gives numbers of entries alone, which have no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        chosen = x.argmax(1)
        ctx.mark_non_differentiable(chosen)
        return chosen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


Named: Any = type("réversed-1[int]", (Outer,), {})


kept_sized = Sized.apply


def sized(m: Any, x: Tensor, kept: bool = False) -> Tensor:
    whole, first, *_, count = (kept_sized if kept else Sized.apply)(m.first(x), factor=2.0)
    return m.second(whole + first.unsqueeze(1)) / count


MODELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "activation": lambda m, x: m.second(Quantised.apply(m.first(x), m.scale)).tanh(),
    "weight": lambda m, x: m.second(F.linear(x, quantised(m.first.weight, m.scale), m.first.bias).tanh()),
    "reversed": lambda m, x: m.second(Reversed.apply(m.first(x).tanh(), 0.3)),
    "two_outputs": lambda m, x: m.second(sum(Circle.apply(m.first(x), 2.0))),
    "kept_new_style": lambda m, x: m.second(sum(circle(m.first(x), 2.0))),
    "one_of_two_outputs": lambda m, x: m.second(Circle.apply(m.first(x), 2.0)[1]),
    "twice": lambda m, x: m.second(Reversed.apply(Reversed.apply(m.first(x), 0.5), 2.0)),
    "tokens": lambda m, x: m.second(Quantised.apply(m.first(x.repeat(3, 1, 1)), m.scale)).sum(0),
    "inner_gradient": inner_gradient,
    "reentrant_checkpoint": reentrant,
    "scaled": lambda m, x: m.second(Scaled.apply(m.first(x))),
    "centred": lambda m, x: m.second(Centred.apply(m.first(x).tanh())),
    "sized": sized,
    "kept_sized": lambda m, x: sized(m, x, kept=True),
    "whole_numbers": lambda m, x: m.second(m.first(x)) * Chosen.apply(m.first(x)).unsqueeze(1),
    "nested": lambda m, x: m.second(Outer.apply(m.first(x))),
    "checkpointed": lambda m, x: m.second(checkpoint(lambda z: Outer.apply(m.first(z)), x, use_reentrant=False)),
    "odd_name": lambda m, x: m.second(Named.apply(m.first(x))),
}
COUPLED = {"centred"}
#: Those that run with a symbolic batch too: of each kind of argument and output one.
SYMBOLIC = ("weight", "two_outputs", "kept_new_style", "tokens", "reentrant_checkpoint", "scaled", "checkpointed")


def jacobian(model: nn.Module, source: Tensor) -> Tensor:
    """By ``backward``, the only way through a reentrant checkpoint."""
    rows = []
    for index in range(model(source).numel()):
        model.zero_grad()
        model(source).flatten()[index].backward()
        rows.append(torch.cat([reference.flat(p.grad, p) for p in reference.trainable(model)]))
    model.zero_grad()
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in MODELS), *((name, True) for name in SYMBOLIC)]
)
def test_the_authors_backward_counts(name: str, dynamic: bool) -> None:
    model = Model(MODELS[name]).double()
    step = gramfx.transform(model, compile=False, dynamic=dynamic or None)
    for batch in (5, 3):
        source = torch.randn(batch, 4, dtype=torch.float64)
        wanted = jacobian(model, source)
        if name in COUPLED:
            with pytest.warns(CoupledObjectivesWarning, match="mean"):
                objectives, gramian = step(source)
        else:
            objectives, gramian = step(source)
        assert reference.relative_error(gramian, wanted @ wanted.T) <= 1e-12
        weights = torch.randn_like(objectives)
        objectives.backward(weights)
        got = torch.cat([reference.flat(p.grad, p) for p in reference.trainable(model)])
        assert reference.relative_error(got, weights.flatten() @ wanted) <= 1e-12
        model.zero_grad()


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


noisy = Noisy.apply


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Hidden(torch.autograd.Function):
    """Runs a layer that it is given as an object, as reversible layers do; no graph knows of its parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            ctx.layer(leaf).backward(gradient)
        assert leaf.grad is not None
        return leaf.grad, None


def identity(backward: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A model with an identity of this backward inside."""
    kernels = {"forward": staticmethod(lambda ctx, x: x.clone()), "backward": staticmethod(lambda ctx, g: backward(g))}
    made: Any = type("Identity", (torch.autograd.Function,), kernels)
    return lambda m, x: m.second(made.apply(m.first(x)))


OUTSIDE = torch.randn(3, dtype=torch.float64)

REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "random_backward": (identity(lambda g: g * torch.rand_like(g)), "random"),
    "strange_backward": (identity(lambda g: g * OUTSIDE), "not given"),
    "numpy_backward": (identity(lambda g: torch.from_numpy(g.numpy())), "fails on tensors without numbers"),
    "clipped": (identity(lambda g: g.clamp(-1e3, 1e3)), "not linear"),
    "sign": (identity(torch.sign), "not linear"),
    "normalised": (identity(lambda g: g / g.norm(dim=1, keepdim=True)), "not linear"),
    "by_the_sum": (identity(lambda g: torch.where(g.sum(0) > 0, g, 2 * g)), "not linear"),
    "affine": (identity(lambda g: g + 1), "not linear"),
    "random": (lambda m, x: m.second(Noisy.apply(m.first(x))), "random"),
    "kept_random": (lambda m, x: m.second(noisy(m.first(x))), "random"),
    "in_place": (lambda m, x: m.second(InPlace.apply(m.first(x))), "in place"),
    "strangers": (lambda m, x: Hidden.apply(m.first(x), m.second), "not given"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    run, words = REFUSED[name]
    step = gramfx.transform(Model(run).double(), compile=False)
    with pytest.raises(CustomFunctionError, match=words) as raised:
        step(torch.randn(5, 4, dtype=torch.float64))
    assert "test_functions.py" in str(raised.value.where) and raised.value.remedy


class Flagged(torch.autograd.Function):
    """Its backward mixes samples where a class attribute says so, and scales by another."""

    mixes, strength = False, 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Flagged.strength * (gradient - gradient.mean(0) if Flagged.mixes else gradient)


@pytest.mark.filterwarnings("ignore::gramfx.errors.CoupledObjectivesWarning")
@pytest.mark.parametrize("anew", [False, True])
def test_class_attributes_are_read_anew(monkeypatch: pytest.MonkeyPatch, anew: bool) -> None:
    model = Model(lambda m, x: m.second(Flagged.apply(m.first(x)).tanh())).double()
    source = torch.randn(5, 4, dtype=torch.float64)
    step = gramfx.transform(model, compile=False)
    for name, value in (("mixes", False), ("mixes", True), ("strength", 3.0)):
        monkeypatch.setattr(Flagged, name, value)
        step = gramfx.transform(model, compile=False) if anew else step
        wanted = jacobian(model, source)
        assert reference.relative_error(step(source)[1], wanted @ wanted.T) <= 1e-12


class Cast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


def test_under_the_autocast_of_the_call() -> None:
    model = Model(lambda m, x: m.second(Cast.apply(m.first(x), m.second.weight.T @ m.second.weight)))
    source = torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(source)
        objectives, gramian = gramfx.transform(model, compile=False)(source)
    assert torch.equal(objectives, wanted) and objectives.dtype is torch.bfloat16
    rows = reference.jacobian(wanted, reference.trainable(model))
    assert reference.relative_error(gramian, rows @ rows.T) <= 2e-2
