"""Which parameters are used, how often, and by whom."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.architectures.formulas import Formula, formula, plain, randn, wired
from tests.architectures.structure import mlp


def frozen(module: nn.Module) -> nn.Module:
    """Sets requires_grad to False everywhere."""
    return module.requires_grad_(False)


def layers(**sizes: tuple[int, int]) -> dict[str, nn.Module]:
    """Linear layers by name."""
    return {name: nn.Linear(*size) for name, size in sizes.items()}


def tied_linears() -> dict[str, nn.Module]:
    """Two layers that own one weight."""
    found = layers(a=(3, 3), b=(3, 3))
    found["b"].weight = found["a"].weight
    return found


class Parent(nn.Module):
    """A parent with a free parameter, that may read its child's parameters and may call the child."""

    def __init__(self, reads: bool, calls: bool) -> None:
        super().__init__()
        self.child, self.free = nn.Linear(3, 2), nn.Parameter(torch.randn(2))
        self.reads, self.calls = reads, calls

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, :2] * self.free
        if self.reads:
            y = y + torch.tanh(x @ self.child.weight.t()) * self.child.bias
        if self.calls:
            y = y + self.child(x * x)
        return y


class TwoNames(nn.Module):
    """One parameter under two names of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, 3))
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second


class HalfUsed(nn.Module):
    """Uses its frozen parameter, and not its trainable one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Parameter(torch.randn(3, 3), requires_grad=False), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.used


def discard(m: Any, x: Tensor) -> Tensor:
    """Calls a module for nothing."""
    m.b(x)
    return m.a(x)


def partly_frozen() -> nn.Module:
    """Single layers with one learning and one frozen parameter."""
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    frozen(net[3])
    net[0].weight.requires_grad_(False)
    net[1].bias.requires_grad_(False)
    net[4].bias.requires_grad_(False)
    return net


def shared_layers(m: Any, x: Tensor) -> Tensor:
    """One block three times, as ALBERT does."""
    for _ in range(3):
        x = x + m.block(m.norm(x))
    return x.sum(1)


def siamese(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """One encoder on both inputs, their distance out."""
    return (m.net(x) - m.net(y)).square().sum(1)


def siamese_concatenated(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """One call on both inputs, stacked on the batch dim."""
    left, right = m.net(torch.cat([x, y])).chunk(2)
    return (left - right).square().sum(1)


def hypernetwork(m: Any, x: Tensor) -> Tensor:
    """The layer's weights are made of the sample."""
    weight = m.maker(x).view(-1, 3, 2)
    return torch.bmm(x.unsqueeze(1), weight).squeeze(1) + m.a(x)


def parameter_containers() -> nn.Module:
    """Parameters inside a list and a dict."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ParameterList([nn.Parameter(torch.randn(3, 3)) for _ in range(2)])
            self.shifts = nn.ParameterDict(
                {"start": nn.Parameter(torch.randn(3)), "idle": nn.Parameter(torch.randn(3))}
            )

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.shifts["start"]
            for weight in self.steps:
                x = torch.tanh(x @ weight)
            return x

    return Net()


TWICE = {"w": (3, 4)}
SQUARE = {"w": (3, 3)}

SHARING = [
    wired("module_used_twice", lambda: layers(a=(3, 4)), lambda m, x: m.a(x) + m.a(x * x / 5), randn((4, 3))),
    wired("module_used_in_series", lambda: layers(a=(3, 3)), lambda m, x: m.a(torch.tanh(m.a(x))), randn((4, 3))),
    wired(
        "module_used_on_other_shapes",
        lambda: layers(a=(3, 2)),
        lambda m, x, y: m.a(x) + m.a(y).sum(1),
        randn((4, 3), (4, 5, 3)),
    ),
    wired(
        "block_used_three_times", lambda: {"block": mlp(3, 4, 3), "norm": nn.LayerNorm(3)}, shared_layers, randn((4, 3))
    ),
    formula("parameter_used_twice", TWICE, lambda p, x: x @ p.w + (x * x / 5) @ p.w, randn((4, 3))),
    formula(
        "parameter_used_twice_by_one_node",
        SQUARE,
        lambda p, x: torch.einsum("bi,ij,jk->bk", x, p.w, p.w),
        randn((4, 3)),
    ),
    formula("parameter_and_its_transpose", TWICE, lambda p, x: torch.tanh(x @ p.w) @ p.w.t(), randn((4, 3))),
    formula("parameter_as_weight_and_scale", SQUARE, lambda p, x: (x @ p.w) * p.w[0] + p.w[:, 1], randn((4, 3))),
    formula(
        "parameter_as_linear_and_conv",
        {"w": (2, 3, 1)},
        lambda p, x: F.conv1d(x, p.w).mean(2) + F.linear(x.sum(2), p.w.flatten(1)),
        randn((4, 3, 5)),
    ),
    wired("parameter_in_two_modules", tied_linears, lambda m, x: m.b(torch.tanh(m.a(x))), randn((4, 3))),
    plain("parameter_under_two_names", TwoNames, randn((4, 3))),
    wired("unused_module", lambda: layers(a=(3, 2), b=(5, 5)), lambda m, x: m.a(x), randn((4, 3)), zero=("b",)),
    formula("unused_parameter", {"w": (3, 2), "idle": (7,)}, lambda p, x: x @ p.w, randn((4, 3)), zero=("idle",)),
    formula(
        "parameter_used_without_gradient",
        {"w": (3, 2), "v": (2,)},
        lambda p, x: x @ p.w + p.v.detach(),
        randn((4, 3)),
        zero=("v",),
    ),
    wired(
        "no_grad_branch",
        lambda: layers(a=(3, 2), b=(3, 2)),
        lambda m, x: _no_grad_branch(m, x),
        randn((4, 3)),
        zero=("b",),
    ),
    plain("partly_frozen_layers", partly_frozen, randn((4, 3))),
    wired(
        "frozen_module",
        lambda: {"a": nn.Linear(3, 4), "b": frozen(mlp(4, 4, 4)), "c": nn.Linear(4, 2)},
        lambda m, x: m.c(m.b(m.a(x))),
        randn((4, 3)),
    ),
    wired(
        "frozen_branch",
        lambda: {"a": nn.Linear(3, 2), "b": frozen(mlp(3, 4, 2))},
        lambda m, x: m.a(x) + m.b(x),
        randn((4, 3)),
    ),
    wired(
        "frozen_backbone",
        lambda: {"a": frozen(mlp(3, 4, 4)), "b": nn.Linear(4, 2)},
        lambda m, x: m.b(m.a(x)),
        randn((4, 3)),
    ),
    wired(
        "only_frozen_parameter_used",
        lambda: {"idler": HalfUsed(), "a": nn.Linear(3, 2)},
        lambda m, x: m.a(m.idler(x)),
        randn((4, 3)),
        zero=("idler",),
    ),
    wired("discarded_output", lambda: layers(a=(3, 2), b=(3, 4)), discard, randn((4, 3)), zero=("b",)),
    plain("free_parameter_in_parent", lambda: Parent(reads=False, calls=True), randn((4, 3))),
    plain("parent_reads_child_without_call", lambda: Parent(reads=True, calls=False), randn((4, 3))),
    plain("parent_reads_and_calls_child", lambda: Parent(reads=True, calls=True), randn((4, 3))),
    wired(
        "free_parameter_like_linear",
        lambda: {"p": Formula(lambda p, x: x @ p.w.t(), w=(4, 3)), "a": nn.Linear(4, 2)},
        lambda m, x: m.a(m.p(x)),
        randn((4, 3)),
    ),
    plain("linear_without_bias", lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2)), randn((4, 3))),
    plain("parameter_containers", parameter_containers, randn((4, 3)), zero=("shifts.idle",)),
    wired("siamese", lambda: {"net": mlp(3, 4, 2)}, siamese, randn((4, 3), (4, 3))),
    wired(
        "siamese_concatenated",
        lambda: {"net": mlp(3, 4, 2)},
        siamese_concatenated,
        randn((4, 3), (4, 3)),
        unproven=True,
    ),
    wired("hypernetwork", lambda: layers(maker=(3, 6), a=(3, 2)), hypernetwork, randn((4, 3))),
]


def _no_grad_branch(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.b(x) * m.a(x)
    return m.a(x) - target
