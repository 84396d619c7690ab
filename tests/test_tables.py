"""The tables of architectures and cases: everything builds, and is what it claims to be on the dense Jacobian."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests import reference
from tests.architectures import ARCHITECTURES, FAMILIES, Architecture, Loaded, load, load_alone, named, parameters
from tests.cases import CASES, Case

PUBLISHED_SIZES = {
    "alexnet": 61_100_840,
    "resnet18_instance_norm": 11_689_512,
    "squeezenet": 1_235_496,
    "mobilenet_v2_eval": 3_504_872,
    "mobilenet_v3_group_norm": 2_542_856,
    "transformer_large": 44_140_544,
}
TABLE = [*ARCHITECTURES, *(case for case in CASES if case.expect == "gramian")]
ONE_BY_ONE = [e for e in TABLE if e.alone and not e.random and e.batch_size and e.out_dim is not None]
MIXING = [*FAMILIES["coupled"], *FAMILIES["lookalikes"]]


def jacobian_of(loaded: Loaded) -> Tensor:
    """J of one loaded architecture."""
    with loaded.architecture.context():
        return reference.jacobian(loaded.objectives(), reference.trainable(loaded.model))


def test_names_are_unique() -> None:
    """Test ids must tell entries apart."""
    names = [entry.name for entry in [*ARCHITECTURES, *CASES]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("architecture", parameters(TABLE))
def test_entry_has_a_finite_reproducible_jacobian(architecture: Architecture, dtype: torch.dtype) -> None:
    """J has the parameters' dtype, is finite, not zero, the same again, and gives the weighted gradient."""
    if dtype not in architecture.dtypes:
        pytest.skip("not meant for this dtype")
    loaded = load(architecture, dtype)
    rows = jacobian_of(loaded)
    assert rows.dtype == dtype
    assert rows.shape[1] == sum(map(reference.width, reference.trainable(loaded.model)))
    assert rows.isfinite().all()
    assert rows.numel() == 0 or rows.abs().max() > 1e-6
    again = jacobian_of(load(architecture, dtype))
    assert torch.equal(rows, again) or reference.relative_error(again, rows) < architecture.tolerance(dtype)
    check_weighted_gradient(load(architecture, dtype), rows)


def check_weighted_gradient(loaded: Loaded, rows: Tensor) -> None:
    """One backward pass a parameter agrees with the dense Jacobian."""
    weights = torch.randn(len(rows), dtype=loaded.dtype)
    with loaded.architecture.context():
        got = reference.weighted_gradient(loaded.objectives(), reference.trainable(loaded.model), weights)
    want, scale = rows.T @ weights, rows.abs().sum(0).max() if rows.numel() else 1.0
    assert reference.relative_error(got / scale, want / scale) < 20 * loaded.architecture.tolerance(loaded.dtype)


@pytest.mark.parametrize("architecture", parameters([e for e in TABLE if e.zero]))
def test_entry_has_the_zero_columns_it_names(architecture: Architecture) -> None:
    """Exactly the named parameters have zero columns."""
    dtype = architecture.dtypes[-1]
    loaded = load(architecture, dtype)
    rows, named = jacobian_of(loaded), reference.named_trainable(loaded.model)
    silent = torch.cat([reference.columns_under(named, name) for name in architecture.zero])
    assert not rows[:, silent].any()
    for name, part in reference.columns(named).items():
        if not set(range(part.start, part.stop)) <= set(silent.tolist()):
            assert rows[:, part].any(), name


@pytest.mark.parametrize("architecture", parameters(ONE_BY_ONE))
def test_entry_is_coupled_exactly_where_it_says_so(architecture: Architecture) -> None:
    """Samples run one by one give the same rows of J, or do not."""
    dtype, dim = architecture.dtypes[-1], architecture.out_dim
    assert dim is not None
    whole = blocks_of(load(architecture, dtype))
    try:
        alone = [blocks_of(load_alone(architecture, sample, dtype)) for sample in range(architecture.batch_size)]
    except ValueError as refusal:
        assert "more than 1 value per channel" in str(refusal)
        assert architecture.coupled
        return
    differs = reference.relative_error(torch.cat(alone, dim), whole) > max(1e-6, architecture.tolerance(dtype))
    assert differs == architecture.coupled


def blocks_of(loaded: Loaded) -> Tensor:
    """J with the shape of the objectives and one dim of parameters behind it."""
    with loaded.architecture.context():
        objectives = loaded.objectives()
        return reference.jacobian(objectives, reference.trainable(loaded.model)).unflatten(0, objectives.shape)


@pytest.mark.parametrize("architecture", parameters([e for e in MIXING if e.out_dim is not None]))
def test_layer_outputs_are_coupled_exactly_where_it_says_so(architecture: Architecture) -> None:
    """Objective b has a derivative by another sample's rows of some layer's output, or has none."""
    loaded, dim = load(architecture, torch.float64), architecture.out_dim
    assert dim is not None
    outputs = layer_outputs(loaded.model)
    objectives = loaded.objectives()
    assert outputs
    owners = torch.arange(architecture.batch_size).expand(objectives.movedim(dim, -1).shape)
    owners = owners.movedim(-1, dim).flatten()
    crossing = 0.0
    for owner, value in zip(owners.tolist(), objectives.flatten(), strict=True):
        for gradient in torch.autograd.grad(value, outputs, retain_graph=True, materialize_grads=True):
            others = torch.arange(len(gradient)) != owner
            crossing = max(crossing, gradient[others].abs().max().item())
    assert (crossing > 1e-9) == architecture.coupled


def layer_outputs(model: nn.Module) -> list[Tensor]:
    """A list that the next forward fills with the outputs of all modules that own parameters."""
    found: list[Tensor] = []
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_hook(lambda _module, _args, output: found.append(output))
    return found


def test_closed_targets_change_nothing() -> None:
    """Targets inside the objective or beside it: the same Jacobian."""
    for entry in ARCHITECTURES:
        if entry.targets is not None and not entry.slow and entry.separable:
            beside = jacobian_of(load(replace(entry, closed=False)))
            assert torch.equal(beside, jacobian_of(load(replace(entry, closed=True))))


@pytest.mark.parametrize("case", parameters([case for case in CASES if case.claims]))
def test_case_claims_hold_on_the_dense_jacobian(case: Case) -> None:
    """What a case says about J is true of J."""
    loaded = load(case, case.dtypes[-1])
    named = reference.named_trainable(loaded.model)
    rows = jacobian_of(loaded)
    assert case.claims is not None
    case.claims(rows, lambda prefix: rows[:, reference.columns_under(named, prefix)])


@pytest.mark.parametrize("case", parameters([case for case in CASES if case.more_inputs]))
def test_case_runs_on_its_further_inputs(case: Case) -> None:
    """Other batch sizes go through the same module."""
    loaded = load(case, torch.float64)
    rows = jacobian_of(case.with_more_inputs(loaded))
    assert rows.isfinite().all()
    assert len(rows) != len(jacobian_of(loaded))


@pytest.mark.parametrize("case", parameters([case for case in CASES if case.expect == "complex_objective"]))
def test_case_that_autograd_refuses(case: Case) -> None:
    """A complex objective has no real gradient."""
    with pytest.raises(RuntimeError, match="complex"):
        jacobian_of(load(case))


@pytest.mark.parametrize("case", parameters([c for c in CASES if c.expect == "gramian" and torch.float64 in c.dtypes]))
def test_case_agrees_with_finite_differences_where_it_says_so(case: Case) -> None:
    """J v is the slope of the objectives along v, unless the case says that autograd is not the derivative."""
    if case.batch_size == 0:
        pytest.skip("no objectives")
    loaded, step = load(case, torch.float64), 1e-6
    slope = jacobian_of(loaded) @ direction(loaded)
    ends = []
    for sign in (1.0, -1.0):
        moved = load(case, torch.float64)
        with torch.no_grad():
            chosen = reference.trainable(moved.model)
            parts = direction(moved).split([parameter.numel() for parameter in chosen])
            for parameter, part in zip(chosen, parts, strict=True):
                parameter += sign * step * part.view_as(parameter)
        ends.append(moved.objectives().detach().flatten())
    error = reference.relative_error((ends[0] - ends[1]) / (2 * step), slope)
    assert (error < 1e-6) == case.differentiable


def direction(loaded: Loaded) -> Tensor:
    """A fixed direction in the space of all trainable parameters."""
    generator = torch.Generator().manual_seed(7)
    count = sum(parameter.numel() for parameter in reference.trainable(loaded.model))
    return torch.randn(count, dtype=loaded.dtype, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_real_networks_have_the_published_number_of_parameters(name: str) -> None:
    """Own code, the published structure."""
    model = named(name).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED_SIZES[name]
