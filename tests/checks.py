"""One comparison of a step with the oracle, shared by the tests over tables."""

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor

import gramfx
from gramfx.errors import CoupledObjectivesWarning
from gramfx.gradients import replayed_gradient
from gramfx.torch_compat import autocast_off
from tests import reference
from tests.architectures import Architecture, load
from tests.architectures.base import SEED_FORWARD, Loaded


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a step gave, and what autograd gives for the same model."""

    step: gramfx.Step
    loaded: Loaded
    objectives: Tensor
    gramian: Tensor
    jacobian: Tensor
    warned: list[str]


def run(architecture: Architecture, dtype: torch.dtype = torch.float64, **options: Any) -> Outcome:
    """Transform and call, beside the plain model built from the same seeds; the user's state is compared on the way."""
    plain = load(architecture, dtype)
    with architecture.context():
        jacobian = reference.jacobian(plain.objectives(), reference.trainable(plain.model))
    ours = load(architecture, dtype)
    before = reference.snapshot(ours.model)
    options = {"in_dims": architecture.in_dims, "compile": False, **options}
    step = gramfx.transform(ours.model, ours.objective, **options)
    with warnings.catch_warnings(record=True) as caught, architecture.context():
        warnings.simplefilter("always", CoupledObjectivesWarning)
        torch.manual_seed(SEED_FORWARD)
        objectives, gramian = step(*ours.args, targets=ours.targets, **ours.kwargs)
    untouched(before, reference.snapshot(plain.model), reference.snapshot(ours.model))
    warned = [str(one.message) for one in caught if issubclass(one.category, CoupledObjectivesWarning)]
    return Outcome(step, ours, objectives, gramian, jacobian, warned)


def untouched(before: reference.Snapshot, plain: reference.Snapshot, ours: reference.Snapshot) -> None:
    """Asserts that tensors and random state are as the plain forward leaves them, and all else as before."""
    assert ours.identities == before.identities
    assert reference.differences(dataclasses.replace(plain, identities=before.identities), ours) == []


def exact(outcome: Outcome, tolerance: float) -> None:
    """Asserts that the Gramian and ``Jᵀ w`` are autograd's."""
    jacobian = outcome.jacobian
    assert reference.relative_error(outcome.gramian, jacobian @ jacobian.T) <= tolerance
    assert not outcome.gramian.requires_grad
    weights = torch.linspace(-1.0, 2.0, len(jacobian)).to(jacobian)
    outcome.objectives.backward(weights.reshape(outcome.objectives.shape).to(outcome.objectives))
    parameters = reference.trainable(outcome.loaded.model)
    got = torch.cat([reference.flat(parameter.grad, parameter) for parameter in parameters])
    assert reference.relative_error(got, weights @ jacobian) <= tolerance
    if (replayed := _replayed(outcome, weights)) is not None:
        assert reference.relative_error(replayed, weights @ jacobian) <= tolerance


def _replayed(outcome: Outcome, weights: Tensor) -> Tensor | None:
    """``Jᵀ w`` by a replay, beside what the plan chose; ``None`` where the forward draws or changes something."""
    compiled = outcome.step._last
    assert compiled is not None
    if compiled.lowering.draws or compiled.captured.mutated:
        return None
    loaded = outcome.loaded
    tensors = outcome.step.arguments(*loaded.args, targets=loaded.targets, **loaded.kwargs)
    run, _ = replayed_gradient(compiled.lowering.stages["canonical"], ())
    with autocast_off():
        found = run(
            *(slot.detach() for slot in tensors), weights.reshape(outcome.objectives.shape).to(outcome.objectives)
        )
    by_parameter = {id(tensors[index]): one for index, one in zip(compiled.wanted, found, strict=True)}
    parameters = reference.trainable(loaded.model)
    return torch.cat([reference.flat(by_parameter.get(id(p)), p) for p in parameters])
