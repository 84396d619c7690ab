"""Short ways to write entries: a module from one formula, inputs from their shapes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures.base import Architecture

Shape = tuple[int, ...]


class Formula(nn.Module):
    """`Formula(lambda p, x: x @ p.w, w=(3, 4))`: named random parameters and a function of them and the inputs."""

    def __init__(self, function: Callable[..., Any], **shapes: Shape) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.7))

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class Wired(nn.Module):
    """`Wired(lambda m, x: m.a(x) + m.b(x), a=nn.Linear(2, 3), b=nn.Linear(2, 3))`: children and how they are joined."""

    def __init__(self, function: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.function(self, *inputs, **keywords)


def randn(*shapes: Shape) -> Callable[[], tuple[Tensor, ...]]:
    """Makes normal inputs of these shapes."""
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def ids(high: int, *shapes: Shape) -> Callable[[], tuple[Tensor, ...]]:
    """Makes integer inputs below `high`; small ranges repeat ids on purpose."""
    return lambda: tuple(torch.randint(0, high, shape) for shape in shapes)


def formula(
    name: str,
    shapes: Mapping[str, Shape],
    function: Callable[..., Any],
    inputs: Callable[[], tuple[Any, ...]],
    **options: Any,
) -> Architecture:
    """An entry whose model is one `Formula`."""
    return Architecture(name=name, build=lambda: Formula(function, **shapes), inputs=inputs, **options)


def wired(
    name: str,
    children: Callable[[], Mapping[str, nn.Module]],
    function: Callable[..., Any],
    inputs: Callable[[], tuple[Any, ...]],
    **options: Any,
) -> Architecture:
    """An entry whose model is one `Wired`; `children` makes its modules anew."""
    return Architecture(name=name, build=lambda: Wired(function, **children()), inputs=inputs, **options)


def plain(
    name: str, build: Callable[[], nn.Module], inputs: Callable[[], tuple[Any, ...]], **options: Any
) -> Architecture:
    """An entry whose model takes the inputs as they are."""
    return Architecture(name=name, build=build, inputs=inputs, **options)


def concatenate(outputs: Any) -> Tensor:
    """Objectives [B, K] of several outputs [B, ...]."""
    return torch.cat([output.flatten(1) for output in outputs], 1)


def per_sample_mean(output: Tensor) -> Tensor:
    """Objectives [B]: the mean square of each sample's output."""
    return output.flatten(1).square().mean(1)
