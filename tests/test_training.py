"""Twenty optimiser steps by ``objectives.backward`` end where plain training ends."""

import warnings

import pytest
import torch

import gramfx
from tests import reference
from tests.architectures import ARCHITECTURES, Architecture, load, parameters
from tests.architectures.base import SEED_FORWARD, apply_objective

FLOAT64 = [a for a in ARCHITECTURES if torch.float64 in a.dtypes and not a.slow]
PARTS = 8


def trained(architecture: Architecture, steps: int = 20, rate: float = 1e-3) -> float:
    """How far apart the parameters end, with the weights of the objectives not all one."""
    ours, plain = load(architecture, torch.float64), load(architecture, torch.float64)
    step = gramfx.transform(ours.model, ours.objective, in_dims=architecture.in_dims, compile=False)
    both = [reference.trainable(one.model) for one in (ours, plain)]
    optimisers = [torch.optim.SGD(parameters, lr=rate, momentum=0.9) for parameters in both]
    with warnings.catch_warnings(), architecture.context():
        warnings.simplefilter("ignore")
        for number in range(steps):
            torch.manual_seed(SEED_FORWARD + number)
            objectives, _ = step(*ours.args, targets=ours.targets, **ours.kwargs)
            torch.manual_seed(SEED_FORWARD + number)
            output = plain.model(*plain.args, **plain.kwargs)
            expected = apply_objective(plain.objective, output, plain.targets)
            for made, optimiser in zip((objectives, expected), optimisers, strict=True):
                optimiser.zero_grad()
                made.backward(torch.linspace(0.5, 1.5, made.numel()).reshape(made.shape).to(made))
                learned = optimiser.param_groups[0]["params"]
                # Some models of the table would leave the range of float64 in twenty steps. Torch clips no sparse ones.
                if not any(p.grad is not None and p.grad.is_sparse for p in learned):
                    torch.nn.utils.clip_grad_norm_(learned, 1.0)
                optimiser.step()
    return float(
        reference.relative_error(*(torch.cat([p.detach().flatten() for p in parameters]) for parameters in both))
    )


@pytest.mark.parametrize("architecture", parameters(FLOAT64[::40]))
def test_some_architectures(architecture: Architecture) -> None:
    assert trained(architecture) <= 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_architecture(part: int) -> None:
    apart = {a.name: trained(a) for a in FLOAT64[part::PARTS]}
    assert {name: error for name, error in apart.items() if not error <= 1e-8} == {}
