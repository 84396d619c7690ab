"""Inner derivatives, detached branches, custom backward passes and complex outputs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.base import Case, Columns, used, zero


class WaveResidual(nn.Module):
    """The residual u_tt - 4 u_xx of a network, and u_t."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()

        def slope(values: Tensor) -> Tensor:
            return torch.autograd.grad(values.sum(), points, create_graph=True)[0]

        first = slope(self.u(points))
        by_x, by_t = slope(first[:, 0])[:, 0], slope(first[:, 1])[:, 1]
        return torch.stack([by_t - 4.0 * by_x, first[:, 1]], 1)


def check_wave(rows: Tensor, cols: Columns) -> None:
    """Derivatives by the inputs do not see the last bias."""
    zero(cols("u.4.bias"))
    used(cols("u.0.bias"))


class PolicyLoss(nn.Module):
    """The ratio to a detached copy of itself has the value one and the gradient of the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, state: Tensor, action: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        scores = self.head(self.body(state).tanh()).log_softmax(-1)
        chosen = scores.gather(-1, action[..., None])[..., 0]
        change = chosen - chosen.detach()
        gain = change.exp() * advantage[:, None] - 0.04 * ((-change).exp() + change - 1)
        return -(gain * mask).sum(1) / mask.sum(1)


def rollouts() -> tuple[Tensor, ...]:
    """States, actions, advantages, and which steps count."""
    mask = (torch.arange(3) < torch.tensor([[3], [1], [2], [3]])).long()
    return torch.randn(4, 3, 4), torch.randint(0, 3, (4, 3)), torch.randn(4), mask


class StraightThrough(torch.autograd.Function):
    """Rounds to multiples of a scale; the backward pass is the author's. Old style: no setup_context, no vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor]:
        (cotangent,) = cotangents
        x, scale = ctx.saved_tensors
        ratio = x / scale
        by_scale = (cotangent * (ratio.round() - ratio)).sum()
        return cotangent * (ratio.abs() < 4), by_scale.reshape(scale.shape)


class QuantisedLinear(nn.Module):
    """Rounds activations and weights, with a learned scale for each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.for_data, self.for_weight = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([0.4]))
        nn.init.normal_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = StraightThrough.apply(self.linear.weight, self.for_weight)
        return F.linear(StraightThrough.apply(x, self.for_data), weight, self.linear.bias)


class WaveFunction(nn.Module):
    """Real parameters, a complex logarithm of the amplitude: one network each for modulus and phase."""

    def __init__(self) -> None:
        super().__init__()
        self.modulus, self.phase = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, spins: Tensor) -> Tensor:
        parts = [layer(spins) for layer in (self.modulus, self.phase)]
        return torch.complex(*(torch.logaddexp(part, -part).sum(1) for part in parts))


def check_wave_function(rows: Tensor, cols: Columns) -> None:
    """Modulus and phase have columns of their own."""
    zero(cols("modulus")[1::2])
    zero(cols("phase")[0::2])
    used(rows)


def spins() -> tuple[Tensor]:
    """Configurations of plus and minus one."""
    return (torch.randint(0, 2, (5, 5)).to(torch.get_default_dtype()) * 2 - 1,)


DERIVATIVES = [
    Case(
        name="c25_wave_residual",
        situation="Objectives hold second derivatives by the inputs: rows are derivatives of the residuals themselves.",
        build=WaveResidual,
        inputs=lambda: (torch.rand(4, 2),),
        zero=("u.4.bias",),
        claims=check_wave,
    ),
    Case(
        name="c26_policy_loss_with_detach",
        situation="exp(x - x.detach()) has a constant value and a gradient; detached branches stay constant.",
        build=PolicyLoss,
        inputs=rollouts,
        differentiable=False,
    ),
    Case(
        name="c27_custom_backward",
        situation="The author's backward counts, on a parameter and on activations, whose scale sums within a sample.",
        build=lambda: nn.Sequential(QuantisedLinear(), nn.Tanh(), nn.Linear(3, 1)),
        inputs=lambda: (torch.randn(4, 4),),
        objective=lambda output: output.square()[:, 0],
        differentiable=False,
    ),
    Case(
        name="x01_complex_output_as_real",
        situation="Real and imaginary parts of the output are the objectives; modulus and phase have disjoint columns.",
        build=WaveFunction,
        inputs=spins,
        objective=torch.view_as_real,
        batch_size=5,
        claims=check_wave_function,
    ),
    Case(
        name="x02_complex_objective",
        situation="A complex objective has no real gradient: an error that asks for real and imaginary parts.",
        build=WaveFunction,
        inputs=spins,
        batch_size=5,
        expect="complex_objective",
    ),
]
