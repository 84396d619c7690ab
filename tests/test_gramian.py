"""The Gramian and ``Jᵀ w`` of every architecture and case against autograd, float64, no Inductor."""

import dataclasses

import pytest
import torch

from gramfx.errors import GramfxError, ObjectiveError
from tests import reference
from tests.architectures import ARCHITECTURES, Architecture, parameters
from tests.cases import CASES, Case
from tests.checks import exact, run

FLOAT64 = [a for a in ARCHITECTURES if torch.float64 in a.dtypes]
ANSWERED = [c for c in CASES if c.expect == "gramian" and not c.deferred]


@pytest.mark.parametrize("architecture", parameters(FLOAT64, always=3))
def test_with_the_batch_known(architecture: Architecture) -> None:
    outcome = run(architecture)
    exact(outcome, architecture.tolerance(torch.float64))
    if not architecture.unproven:
        assert bool(outcome.warned) == architecture.coupled


@pytest.mark.parametrize("architecture", parameters([a for a in FLOAT64 if a.random and not a.slow]))
def test_replayed_with_the_same_draws(architecture: Architecture) -> None:
    plan = run(architecture).step.plan
    assert plan.gradient == "kept"
    outcome = run(architecture, plan=dataclasses.replace(plan, gradient="replayed"))
    assert outcome.step.plan.gradient == "replayed"
    exact(outcome, architecture.tolerance(torch.float64))


@pytest.mark.parametrize("architecture", parameters([a for a in FLOAT64 if not a.slow], always=10))
def test_with_no_batch(architecture: Architecture) -> None:
    outcome = run(architecture, in_dims=None)
    exact(outcome, architecture.tolerance(torch.float64))
    assert not outcome.warned


@pytest.mark.parametrize("case", parameters(ANSWERED))
def test_cases(case: Case) -> None:
    dtype = torch.float64 if torch.float64 in case.dtypes else torch.float32
    outcome = run(case, dtype)
    exact(outcome, case.tolerance(dtype))
    assert bool(outcome.warned) == case.coupled or case.unproven


@pytest.mark.parametrize("case", parameters([c for c in CASES if c.deferred]))
def test_cases_that_may_be_refused(case: Case) -> None:
    try:
        outcome = run(case)
    except GramfxError as error:
        assert error.remedy
    else:
        exact(outcome, case.tolerance(torch.float64))


@pytest.mark.parametrize("case", parameters([c for c in CASES if c.expect == "complex_objective"]))
def test_complex_objectives_are_refused(case: Case) -> None:
    from gramfx import transform
    from tests.architectures import load

    loaded = load(case, torch.float64)
    with pytest.raises(ObjectiveError, match="view_as_real"):
        transform(loaded.model, loaded.objective, compile=False)(*loaded.args)


@pytest.mark.parametrize("case", parameters([c for c in ANSWERED if c.more_inputs]))
def test_further_inputs(case: Case) -> None:
    outcome = run(case)
    more = case.with_more_inputs(outcome.loaded)
    objectives, gramian = outcome.step(*more.args, targets=more.targets, **more.kwargs)
    jacobian = reference.jacobian(more.objectives(), reference.trainable(more.model))
    assert reference.relative_error(objectives, more.objectives()) <= 1e-10
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-10
