"""Random compositions of views, elementwise ops, contractions and parameter uses, against autograd."""

import random
import warnings
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gramfx
from gramfx.errors import CoupledObjectivesWarning
from tests import reference

BATCH = 3
MOST_ENTRIES, MOST_OBJECTIVES = 200, 12


class Composition(nn.Module):
    """Runs a list of steps; each may use parameters, those it made before included."""

    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.weights = nn.ParameterList()
        self._made: dict[int, int] = {}

    def parameter(self, step: int, shape: tuple[int, ...], choice: int) -> Tensor:
        """This step's parameter: now and then an earlier one of the same shape, to be used once more."""
        if step not in self._made:
            fitting = [i for i, p in enumerate(self.weights) if p.shape == shape]
            if not fitting or choice % 3:
                fitting = [len(self.weights)]
                self.weights.append(nn.Parameter(torch.randn(shape) * 0.5))
            self._made[step] = fitting[choice % len(fitting)]
        return self.weights[self._made[step]]

    def forward(self, h: Tensor) -> Tensor:
        for number, (name, choice) in enumerate(self.steps):
            made = STEPS[name](self, number, h, choice)
            h = made if made.numel() <= MOST_ENTRIES else h
        while h.numel() > MOST_OBJECTIVES:
            h = h.sum(-1)
        return h


def permuted(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    order = list(range(h.dim()))
    random.Random(choice).shuffle(order)
    return h.permute(order)


def merged(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    at = choice % max(h.dim() - 1, 1)
    return h.flatten(at, at + 1) if h.dim() > 1 else h


def split(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    at = choice % h.dim() if h.dim() else 0
    return h.unflatten(at, (2, -1)) if h.dim() and h.shape[at] % 2 == 0 else h


def sliced(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    at = choice % h.dim() if h.dim() else 0
    return h.narrow(at, choice % 2, h.shape[at] - 1) if h.dim() and h.shape[at] > 2 else h


def stretched(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    return h.unsqueeze(choice % (h.dim() + 1)).expand(
        *h.shape[: choice % (h.dim() + 1)], 2, *h.shape[choice % (h.dim() + 1) :]
    )


def curved(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    functions: tuple[Callable[[Tensor], Tensor], ...] = (torch.tanh, torch.sin, torch.nn.functional.silu, torch.square)
    return functions[choice % len(functions)](h)


def linear(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    return h @ net.parameter(step, (h.shape[-1], 2 + choice % 2), choice) if h.dim() else h


def linear_by_transpose(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    return torch.nn.functional.linear(h, net.parameter(step, (h.shape[-1], h.shape[-1]), choice).t()) if h.dim() else h


def shifted(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    return h + net.parameter(step, tuple(h.shape[h.dim() - choice % (h.dim() + 1) :]), choice)


def scaled(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    shape = tuple(size if (choice >> i) % 2 else 1 for i, size in enumerate(h.shape))
    return h * net.parameter(step, shape, choice)


def gram(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    return h @ h.transpose(-1, -2) if h.dim() > 1 else h


def normalised(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    return h - h.mean(choice % h.dim(), keepdim=True) if h.dim() else h


def convolved(net: Composition, step: int, h: Tensor, choice: int) -> Tensor:
    if h.dim() != 3 or h.shape[-1] < 2:
        return h
    return torch.nn.functional.conv1d(h, net.parameter(step, (2, h.shape[1], 2), choice))


STEPS: dict[str, Callable[[Composition, int, Tensor, int], Tensor]] = {
    step.__name__: step
    for step in (
        permuted,
        merged,
        split,
        sliced,
        stretched,
        curved,
        linear,
        linear_by_transpose,
        shifted,
        scaled,
        gram,
        normalised,
        convolved,
    )
}


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 10**6)), min_size=2, max_size=8),
    shape=st.sampled_from([(BATCH, 4), (BATCH, 2, 4), (BATCH, 2, 3)]),
    exact=st.booleans(),
)
def test_any_composition_is_exact(steps: list[tuple[str, int]], shape: tuple[int, ...], exact: bool) -> None:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            net, x = Composition([*steps, ("shifted", 1)]), torch.randn(shape)
            net(x)
        finally:
            torch.set_default_dtype(torch.float32)
    jacobian = reference.jacobian(net(x), reference.trainable(net))
    step = gramfx.transform(net, in_dims=0 if exact else None, compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoupledObjectivesWarning)
        objectives, gramian = step(x)
    assert reference.relative_error(objectives, net(x)) <= 1e-10
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-9
