"""Modules for the situations of :mod:`benchmarks.correctness`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Applied(nn.Module):
    """A function of named modules and the inputs."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function, self.held = function, nn.ModuleDict(modules)

    def forward(self, *inputs: Tensor) -> Tensor:
        """What the function makes of them."""
        return self.function(self.held, *inputs)


class Centred(nn.Module):
    """The batch without its mean."""

    def forward(self, x: Tensor) -> Tensor:
        """``x - x.mean(0)``."""
        return x - x.mean(0)


class Scaled(nn.Module):
    """A linear layer whose output is scaled by a parameter of its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """Scaled, entry by entry."""
        return self.layer(x).tanh() * self.scale


class Spectral(nn.Module):
    """Features multiplied by a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.filter = nn.Linear(3, 4), nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        """Filtered in the space of frequencies."""
        return torch.fft.irfft(torch.fft.rfft(self.layer(x)) * self.filter, n=4)


class StraightThrough(torch.autograd.Function):
    """The sign, differentiated as if it were the identity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """The sign."""
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """As it came."""
        return gradient


class Mixture(nn.Module):
    """Each sample goes to the expert that its gate prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 2), nn.ModuleList(nn.Linear(3, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Gated outputs, gathered by the rows that were chosen."""
        shares = self.gate(x).softmax(1)
        chosen, output = shares.argmax(1), x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            output = output.index_add(0, rows, expert(x[rows]) * shares[rows, number, None])
        return output
