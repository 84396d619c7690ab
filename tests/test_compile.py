"""Inductor's result equals the graph run op by op, static and with one graph for all batch sizes."""

import copy
import warnings

import pytest
import torch

import gramfx
from tests import reference
from tests.architectures import ARCHITECTURES, FIXED, Architecture, apply_objective, load_resized, parameters
from tests.checks import exact, run

NAMES = ("mlp", "conv_pool_linear", "encoder_layer", "tied_embedding_and_head_tokens")
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
CHOSEN = [a for a in ARCHITECTURES if a.name in NAMES]
#: Computes in float32 inside, where one backward and a sum of many round apart.
CAST = "parameter_cast"


def one_graph(architecture: Architecture, dtype: torch.dtype, *, compile: bool) -> int:
    """Batches of 3, 5 and 9 against autograd; returns how many captures that took."""
    loaded = load_resized(architecture, architecture.batch_size, dtype)
    step = gramfx.transform(loaded.model, loaded.objective, in_dims=architecture.in_dims, compile=compile, dynamic=True)
    for count in (3, 5, 9):
        model = copy.deepcopy(loaded.model)
        sized = load_resized(architecture, count, dtype)
        objectives, gramian = step(*sized.args, targets=sized.targets)
        want = apply_objective(sized.objective, model(*sized.args), sized.targets)
        jacobian = reference.jacobian(want, reference.trainable(model))
        tolerance = TOLERANCE[dtype]
        assert reference.relative_error(objectives, want) <= tolerance
        assert reference.relative_error(gramian, jacobian @ jacobian.T) <= tolerance
        loaded.model.zero_grad()
        weights = torch.linspace(-1.0, 2.0, len(jacobian)).to(jacobian)
        objectives.backward(weights.reshape(objectives.shape))
        got = torch.cat([reference.flat(p.grad, p) for p in reference.trainable(loaded.model)])
        rounding = 1e-6 if architecture.name == CAST else 0.0
        assert reference.relative_error(got, weights @ jacobian) <= max(tolerance, rounding)
    return step.captures


@pytest.mark.parametrize("architecture", parameters(CHOSEN))
def test_inductor_serves_all_batch_sizes_with_one_compile(architecture: Architecture) -> None:
    assert one_graph(architecture, torch.float32, compile=True) == 1


@pytest.mark.parametrize("architecture", parameters([a for a in CHOSEN if a.name == "mlp"]))
def test_inductor_runs_the_backward_too(architecture: Architecture) -> None:
    exact(run(architecture, torch.float32, compile=True, dynamic=False), TOLERANCE[torch.float32])


def test_inductor_keeps_the_dropout_masks() -> None:
    (architecture,) = [a for a in ARCHITECTURES if a.name == "encoder_dropout"]
    exact(run(architecture, torch.float32, compile=True), TOLERANCE[torch.float32])


SYMBOLIC = [
    a
    for a in ARCHITECTURES
    if torch.float64 in a.dtypes
    and not (a.slow or a.random or a.coupled or a.unproven or a.keywords or a.name in FIXED)
    and a.in_dims is not None
    and a.batch_size == 4
]


@pytest.mark.parametrize("architecture", parameters(SYMBOLIC[::6], always=4))
def test_a_symbolic_batch_is_exact(architecture: Architecture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gramfx.errors.StaticBatchWarning)
        assert one_graph(architecture, torch.float64, compile=False) in (1, 3)
