"""Functions of parameters alone, and pointwise or unusual ops that read a parameter beside data."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.architectures.formulas import formula, per_sample_mean, plain, randn, wired

X, TOKENS, IMAGE = randn((4, 3)), randn((4, 5, 3)), randn((4, 2, 4, 4))


class LowRank(nn.Module):
    """A frozen weight with a trainable low-rank correction."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(3, 4), merged
        self.base.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(1, 3)), nn.Parameter(torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return torch.tanh(F.linear(x, self.base.weight + 2.0 * self.up @ self.down, self.base.bias))
        return torch.tanh(self.base(x) + 2.0 * (x @ self.down.t()) @ self.up.t())


class Symmetric(nn.Module):
    """A parametrisation by the upper triangle."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


def symmetric() -> nn.Module:
    """A layer whose weight is kept symmetric."""
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def weight_normed_convs() -> nn.Module:
    """Two weight-normed convolutions, one normed along its inputs."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(2, 3, 2)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.Conv2d(3, 2, 2), dim=1),
    )


def spectral_chain() -> nn.Module:
    """Spectral norm around two layers, in training: each forward iterates once."""
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), parametrizations.spectral_norm(nn.Linear(4, 2))
    )


def used_twice_after_norm(p: Any, x: Tensor) -> Tensor:
    """One computed weight in two uses."""
    weight = F.normalize(p.w, dim=0)
    return torch.tanh(x @ weight) + (x * x) @ weight


def raw_and_computed(p: Any, x: Tensor) -> Tensor:
    """A parameter used as it is, and inside a function of two parameters."""
    return torch.tanh(x @ p.w) + x @ (p.w * p.s.exp())


def routed(p: Any, x: Tensor) -> Tensor:
    """A learned mixture of constant transforms."""
    options = torch.stack([x, x.sin(), x.relu()], 1)
    return (p.alpha.softmax(0)[None, :, None] * options).sum(1)


COMPUTED = [
    plain(
        "weight_norm",
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)),
        X,
    ),
    plain("weight_norm_conv", weight_normed_convs, IMAGE, objective=per_sample_mean),
    plain("spectral_norm_training", spectral_chain, X),
    plain("spectral_norm_eval", lambda: spectral_chain().eval(), X),
    plain("symmetric_parametrisation", symmetric, X),
    plain(
        "orthogonal_parametrisation", lambda: parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley"), X
    ),
    plain("lora_merged", lambda: LowRank(merged=True), X),
    plain("lora_branch", lambda: LowRank(merged=False), X),
    formula("low_rank_sum", {"w": (3, 4), "b": (3, 1), "a": (1, 4)}, lambda p, x: torch.tanh(x @ (p.w + p.b @ p.a)), X),
    formula("computed_weight_used_twice", {"w": (3, 2)}, used_twice_after_norm, X),
    formula("parameter_raw_and_computed", {"w": (3, 2), "s": (2,)}, raw_and_computed, X),
    formula("softmax_of_parameter", {"alpha": (3,)}, routed, X),
    formula("product_of_parameters", {"a": (3, 3), "b": (3, 3)}, lambda p, x: torch.tanh(x @ (p.a @ p.b)), X),
    formula("kronecker_weight", {"a": (1, 2), "b": (3, 1)}, lambda p, x: torch.tanh(x @ torch.kron(p.a, p.b)), X),
    formula("matrix_exponential", {"a": (3, 3)}, lambda p, x: torch.tanh(x @ torch.matrix_exp(p.a - p.a.t())), X),
    formula(
        "inverse_of_parameter",
        {"a": (3, 3)},
        lambda p, x: torch.linalg.solve(p.a + 4 * torch.eye(3, dtype=x.dtype, device=x.device), x.t()).t(),
        X,
    ),
    formula("cumsum_of_parameter", {"s": (3,)}, lambda p, x: torch.tanh(x * p.s.cumsum(0)), X),
    formula("fft_of_parameter", {"s": (3,)}, lambda p, x: torch.tanh(x * torch.fft.fft(p.s).abs()), X),
    formula("sorted_parameter", {"s": (3,)}, lambda p, x: torch.tanh(x * p.s.sort().values), X),
    formula("one_plus_parameter", {"s": (3,)}, lambda p, x: torch.tanh(x * (1 + p.s)), X),
    formula("parameter_less_one", {"s": (3,)}, lambda p, x: torch.tanh(x * (p.s - 1.0)), X),
    formula("constant_plus_weight", {"w": (2, 3)}, lambda p, x: x @ (torch.ones_like(p.w) + p.w).t(), X),
    formula("parameter_broadcast_by_sum", {"s": (3,)}, lambda p, x: x @ (torch.zeros(2, 3).to(x) + p.s).t(), X),
    formula("sum_of_two_uses", {"s": (3,)}, lambda p, x: torch.tanh(x * (p.s + 2 * p.s) + (1 + p.s)), X),
    formula("parameter_cast", {"s": (3,)}, lambda p, x: (x.float() * (1 + p.s.float())).to(x.dtype), X, tol=1e-5),
    formula("exp_of_parameter", {"s": (3,)}, lambda p, x: x * torch.exp(-p.s), X),
    formula("weight_penalty_added", {"w": (3, 2)}, lambda p, x: torch.tanh(x @ p.w) + p.w.square().sum(), X),
    formula("quantised_straight_through", {"w": (3, 2)}, lambda p, x: x @ (p.w + (p.w.round() - p.w).detach()), X),
    formula(
        "real_weight_as_complex",
        {"w": (3, 2, 2)},
        lambda p, x: (x.to(torch.view_as_complex(p.w).dtype) @ torch.view_as_complex(p.w)).abs(),
        X,
    ),
]

POINTWISE = [
    formula("softplus_scale", {"v": (3,)}, lambda p, x: x / F.softplus(p.v), X),
    formula("where_parameter", {"v": (3,)}, lambda p, x: torch.where(x > 0.3, p.v, x), X),
    formula("power_of_data", {"v": (3,)}, lambda p, x: (x.abs() + 0.5) ** p.v, X),
    formula("data_as_power", {"v": (3,)}, lambda p, x: (p.v.abs() + 0.5) ** x, X),
    formula("maximum_with_parameter", {"v": (3,)}, lambda p, x: torch.maximum(x, p.v), X),
    formula(
        "clamped_by_parameters", {"low": (3,), "high": (3,)}, lambda p, x: torch.clamp(x, p.low - 1, p.high + 1), X
    ),
    formula("atan2_with_parameter", {"v": (3,)}, lambda p, x: torch.atan2(x, p.v), X),
    formula("lerp_by_parameter", {"v": (3,)}, lambda p, x, y: torch.lerp(x, y, p.v), randn((4, 3), (4, 3))),
    formula("hypot_tokens", {"v": (5, 1)}, lambda p, x: torch.hypot(x, p.v).sum(1), TOKENS),
    formula("logaddexp_with_parameter", {"v": ()}, lambda p, x: torch.logaddexp(x, p.v), X),
    formula(
        "radial_basis",
        {"c": (2, 3), "g": (2,)},
        lambda p, x: torch.exp(-p.g.square() * (x[:, None] - p.c).square().sum(2)),
        X,
    ),
    formula("distances_to_prototypes", {"c": (2, 3)}, lambda p, x: torch.cdist(x, p.c), X),
    formula(
        "generalised_mean_pool", {"v": ()}, lambda p, x: (x.abs() + 0.1).pow(p.v + 2).mean(1).pow(1 / (p.v + 2)), TOKENS
    ),
    formula("snake_activation", {"v": (3,)}, lambda p, x: x + torch.sin(p.v * x).square() / (p.v.square() + 0.1), X),
    formula(
        "learned_quantile_loss", {"v": (3,)}, lambda p, x: F.smooth_l1_loss(p.v.expand_as(x), x, reduction="none"), X
    ),
    formula(
        "masked_fill_with_parameter",
        {"v": ()},
        lambda p, x: x.masked_fill(x < 0, 0.0) + x.new_zeros(()).where(x > 0, p.v),
        X,
    ),
]

OTHER = [
    formula(
        "learned_attention_bias",
        {"bias": (2, 5, 5)},
        lambda p, x: F.scaled_dot_product_attention(x, x, x, attn_mask=p.bias).square().sum((1, 2, 3)),
        randn((4, 2, 5, 3)),
    ),
    formula(
        "learned_queries",
        {"q": (1, 2, 3)},
        lambda p, x: F.scaled_dot_product_attention(p.q.expand(x.shape[0], 2, 3), x, x).square().sum(2),
        TOKENS,
    ),
    formula(
        "learned_keys",
        {"k": (4, 3), "v": (4, 2)},
        lambda p, x: ((x @ p.k.t()).softmax(-1) @ p.v).square().sum(1),
        TOKENS,
    ),
    formula("softmax_with_parameter", {"v": (3,)}, lambda p, x: (x * p.v).softmax(1), X),
    formula("sort_of_data_and_parameter", {"v": (3,)}, lambda p, x: (x + p.v).sort(1).values * x, X),
    formula("cumulative_product_along_tokens", {"v": (3,)}, lambda p, x: (x * p.v).cumprod(1).sum(1), TOKENS),
    formula(
        "fourier_filter",
        {"v": (3, 3)},
        lambda p, x: (
            torch.fft.irfft(
                torch.fft.rfft(x, dim=1) * torch.view_as_complex(p.v[:, :2].contiguous()).unsqueeze(1), n=5, dim=1
            )
            .square()
            .sum(1)
        ),
        TOKENS,
    ),
    formula(
        "scattered_into_data",
        {"v": (3,)},
        lambda p, x: x.scatter_add(1, torch.tensor([[0, 2, 2]], device=x.device).expand(4, 3), p.v.expand(4, 3)).tanh(),
        X,
        alone=False,
        unproven=True,
    ),
    formula(
        "grid_sampled_parameter",
        {"image": (1, 2, 4, 4)},
        lambda p, x: F.grid_sample(p.image.expand(x.shape[0], -1, -1, -1), x.tanh(), align_corners=False).sum((2, 3)),
        randn((4, 3, 3, 2)),
    ),
    formula(
        "interpolated_positions",
        {"e": (1, 3, 2, 2)},
        lambda p, x: (x * F.interpolate(p.e, size=(4, 4), mode="bilinear")).tanh().sum((2, 3)),
        randn((4, 3, 4, 4)),
    ),
    formula(
        "per_sample_solve",
        {"a": (3, 3)},
        lambda p, x: torch.linalg.solve(
            x @ x.transpose(1, 2) + p.a @ p.a.t() + torch.eye(3, dtype=x.dtype, device=x.device), x[:, :, 0]
        ),
        randn((4, 3, 3)),
    ),
    wired(
        "determinant_of_data_and_parameter",
        lambda: {"a": nn.Linear(3, 9)},
        lambda m, x: torch.linalg.det(m.a(x).view(-1, 3, 3)),
        X,
    ),
]

DERIVED = COMPUTED + POINTWISE + OTHER
