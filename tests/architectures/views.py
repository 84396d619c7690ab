"""Views and rearrangements of a parameter before it meets data."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.architectures.formulas import formula, plain, randn

X, TOKENS, IMAGE = randn((4, 3)), randn((4, 5, 3)), randn((4, 2, 4, 4))


class ClassToken(nn.Module):
    """Patches of an image behind a class token, positions added, one attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(2, 4, 2, stride=2), nn.Parameter(torch.randn(1, 1, 4))
        self.position = nn.Parameter(torch.randn(1, 5, 4))
        self.block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1) + self.position
        return self.head(self.block(tokens)[:, 0])


def fused_projections(p: Any, x: Tensor) -> Tensor:
    """Three projections cut from one weight."""
    q, k, v = (F.linear(x, w) for w in p.w.chunk(3))
    return F.scaled_dot_product_attention(q, k, v).square().sum(1)


def overlapping(p: Any, x: Tensor) -> Tensor:
    """Two windows of one parameter that share rows."""
    return torch.tanh(x @ p.w[0:3]) + (x * x) @ p.w[1:4]


def flat_network(p: Any, x: Tensor) -> Tensor:
    """All weights in one vector, as meta-learning code keeps them."""
    first, bias, second = p.theta.split([12, 4, 8])
    return torch.tanh(F.linear(x, first.view(4, 3), bias)) @ second.view(4, 2)


def unbound(p: Any, x: Tensor) -> Tensor:
    """A stack of layers, one a step."""
    for weight in p.w.unbind(0):
        x = torch.tanh(x @ weight)
    return x


def stepwise(p: Any, x: Tensor) -> Tensor:
    """A stack of layers, by integer index."""
    return torch.tanh(torch.tanh(x @ p.w[0]) @ p.w[1]) @ p.w[-1]


def multiscale(p: Any, x: Tensor) -> Tensor:
    """A whole parameter and parts of it."""
    return torch.tanh(x @ p.w) + torch.tanh(x[:, :2] @ p.w[:2]) + x @ p.w[:, :1]


VIEWS = [
    formula("view_t", {"w": (2, 3)}, lambda p, x: torch.tanh(x @ p.w.t()), X),
    formula("view_transpose", {"w": (2, 3, 2)}, lambda p, x: torch.tanh(x @ p.w.transpose(0, 1).flatten(1)), X),
    formula("view_permute", {"w": (2, 1, 3)}, lambda p, x: torch.tanh(x @ p.w.permute(2, 0, 1).squeeze(2)), X),
    formula("view_reshape", {"w": (6,)}, lambda p, x: torch.tanh(x @ p.w.reshape(3, 2)), X),
    formula("view_flatten", {"w": (3, 2, 2)}, lambda p, x: torch.tanh(x @ p.w.flatten(1)), X),
    formula("view_unsqueeze", {"w": (3,)}, lambda p, x: torch.tanh(x @ p.w.unsqueeze(1)), X),
    formula("view_slice", {"w": (5, 4)}, lambda p, x: torch.tanh(x @ p.w[1:4, :2]), X),
    formula("view_slice_step", {"w": (6, 4)}, lambda p, x: torch.tanh(x @ p.w[::2, 1::2]), X),
    formula("view_narrow", {"w": (3, 5)}, lambda p, x: torch.tanh(x @ p.w.narrow(1, 2, 2)), X),
    formula("view_select", {"w": (2, 3, 2)}, lambda p, x: torch.tanh(x @ p.w[0]) + x @ p.w.select(0, 1), X),
    formula("view_only_one_row", {"w": (4, 3)}, lambda p, x: torch.tanh(x + p.w[2]), X),
    formula("view_integer_index_twice", {"w": (2, 3, 3)}, lambda p, x: torch.tanh(torch.tanh(x @ p.w[0]) @ p.w[0]), X),
    formula("view_stack_of_layers", {"w": (3, 3, 3)}, stepwise, X),
    formula("view_unbind", {"w": (2, 3, 3)}, unbound, X),
    formula("view_split", {"theta": (24,)}, flat_network, X),
    formula("view_chunk", {"w": (9, 3)}, fused_projections, TOKENS),
    formula("view_expand", {"w": (3, 1)}, lambda p, x: torch.tanh(x @ p.w.expand(3, 2)), X),
    formula("view_expand_over_batch", {"b": (3,)}, lambda p, x: torch.tanh(x * p.b.expand(x.shape[0], -1)), X),
    formula("view_repeat", {"b": (1, 3)}, lambda p, x: torch.tanh(x * p.b.repeat(x.shape[0], 1)), X),
    formula(
        "view_repeat_interleave", {"b": (3,)}, lambda p, x: torch.tanh(x.repeat(1, 2) * p.b.repeat_interleave(2)), X
    ),
    formula("view_overlapping_slices", {"w": (4, 2)}, overlapping, X),
    formula("view_disjoint_slices", {"w": (6, 2)}, lambda p, x: torch.tanh(x @ p.w[:3]) + (x * x) @ p.w[3:], X),
    formula("view_whole_and_parts", {"w": (3, 2)}, multiscale, X),
    formula("view_diagonal", {"w": (3, 3)}, lambda p, x: torch.tanh(x * p.w.diagonal()), X),
    formula("view_flip", {"w": (3, 2)}, lambda p, x: torch.tanh(x @ p.w.flip(0)), X),
    formula("view_roll", {"w": (3, 2)}, lambda p, x: torch.tanh(x @ p.w.roll(1, 1)), X),
    formula("view_lower_triangle", {"w": (3, 3)}, lambda p, x: torch.tanh(x @ p.w.tril()), X),
    formula("view_cat", {"a": (3, 2), "b": (3, 1)}, lambda p, x: torch.tanh(x @ torch.cat([p.a, p.b], 1)), X),
    formula("view_stack", {"a": (3,), "b": (3,)}, lambda p, x: torch.tanh(x @ torch.stack([p.a, p.b], 1)), X),
    formula(
        "view_cat_with_data",
        {"a": (2, 3)},
        lambda p, x: torch.cat([p.a.expand(x.shape[0], 2, 3), x], 1).tanh().prod(1),
        TOKENS,
    ),
    formula("view_pad", {"w": (2, 2)}, lambda p, x: torch.tanh(x @ F.pad(p.w, (0, 1, 1, 0))), X),
    formula("view_as_strided", {"w": (6,)}, lambda p, x: torch.tanh(x @ p.w.as_strided((3, 2), (2, 1))), X),
    formula(
        "view_squeezed_kernel",
        {"w": (3, 1, 2)},
        lambda p, x: F.conv1d(x.mT, p.w.squeeze(1).unsqueeze(1), groups=3).tanh().sum(2),
        TOKENS,
    ),
    formula("view_diag_embed", {"s": (3,)}, lambda p, x: torch.tanh(x @ torch.diag(p.s)), X),
    formula(
        "view_masked",
        {"w": (3, 2)},
        lambda p, x: torch.tanh(x @ p.w.masked_fill(torch.eye(3, 2, dtype=torch.bool, device=x.device), 0.0)),
        X,
    ),
    plain("class_token", ClassToken, IMAGE),
]
