"""The strategy ``fused``: exact where it is forced, and chosen where it is predicted to be fastest."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import gramfx
from gramfx.cost import Source
from gramfx.emit import gramian_of
from gramfx.gramians import factors_of, gramian_nodes, terms_of
from gramfx.machine import Machine
from gramfx.planning import Problem, candidates, problem_of
from gramfx.regimes import time_regime
from gramfx.sketch import BATCH
from gramfx.terms import SYMBOLIC, Factor, ParameterTerms, Recipe, Term
from tests import reference


class Tied(nn.Module):
    """A table read by ids, and multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.randn(11, 6)), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.layer(nn.functional.embedding(ids, self.table))) @ self.table.t()


class Twice(nn.Module):
    """One layer after itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


def ids(batch: int) -> Tensor:
    return torch.randint(11, (batch, 7))


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape, dtype=torch.float64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], int]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), floats(7, 6), 2),
    "twice": (Twice, floats(7, 6), 1),
    "table": (lambda: nn.Embedding(11, 3, padding_idx=2), ids, 1),
    "tied": (Tied, ids, 4),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1), floats(3, 5, 5), 1),
}


def objective(output: Tensor) -> Tensor:
    return output.sin().flatten(1).mean(1)


def fused(plan: gramfx.Plan) -> gramfx.Plan:
    """The plan with the strategy for all parameters but biases, which have one factor alone."""

    def changed(one: Any) -> Any:
        recipe = Recipe("fused", batch=one.recipe.batch, balance=one.recipe.balance)
        return one if one.parameter.endswith("bias") else dataclasses.replace(one, recipe=recipe, strategy="fused")

    return dataclasses.replace(plan, contractions=tuple(map(changed, plan.contractions)))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_exact_in_a_step(name: str, dynamic: bool) -> None:
    build, inputs, count = MODELS[name]
    torch.manual_seed(0)
    model, first = build().double(), inputs(4)
    options: dict[str, Any] = {"compile": False, "dynamic": dynamic}
    plan = gramfx.transform(model, objective, **options).capture(first).plan
    assert "fused" not in {one.strategy for one in plan.contractions}
    step = gramfx.transform(model, objective, plan=fused(plan), **options)
    jacobian = reference.jacobian(objective(model(first)), reference.trainable(model))
    assert reference.relative_error(step(first)[1], jacobian @ jacobian.T) <= 1e-13
    lowered = [str(node.target) for node in step.stage("lowered").graph_module.graph.nodes]
    assert sum("gramfx.pairwise" in target for target in lowered) == count


@pytest.mark.slow
def test_exact_in_a_compiled_step() -> None:
    build, inputs, _ = MODELS["tied"]
    torch.manual_seed(0)
    model, first = build().double(), inputs(4)
    plan = gramfx.transform(model, objective, compile=False, dynamic=True).capture(first).plan
    step = gramfx.transform(model, objective, compile=True, dynamic=True, plan=fused(plan))
    for batch in (4, 6):
        given = inputs(batch)
        jacobian = reference.jacobian(objective(model(given)), reference.trainable(model))
        assert reference.relative_error(step(given)[1], jacobian @ jacobian.T) <= 1e-13


GPU = Machine(
    "like an H100", {"float32": 5e13, "float64": 6e13, "bfloat16": 7.9e14}, 4.3e12, 1e13, 5e-6, 50 * 2**20, 64
)


def linear(
    samples: int, tokens: int, width: int, dtype: torch.dtype, device: str, *, symbolic: bool = False
) -> Problem:
    """The planner's problem of one linear layer with ``width`` inputs and outputs."""
    sizes = {"b": SYMBOLIC if symbolic else samples, "t": tokens, "q0": width, "q1": width}
    term = Term("use", ("b",), (Factor(0, ("b", "t", "q0")), Factor(1, ("b", "t", "q1"))), ("q1", "q0"), sizes)
    source = Source((BATCH if symbolic else samples, tokens, width), dtype)
    terms, wide = ParameterTerms("weight", (width, width), (term,)), torch.promote_types(dtype, torch.float32)
    return problem_of(terms, (source, source), wide, GPU, samples, torch.device(device))


def strategies(problem: Problem) -> list[str]:
    return [one.terms.recipe.strategy for one in candidates(problem, 2**40)]


def test_chosen_where_it_is_predicted_to_be_fastest() -> None:
    assert strategies(linear(64, 50, 768, torch.bfloat16, "cuda"))[0] == "fused"
    assert strategies(linear(128, 20, 768, torch.float32, "cuda"))[0] == "fused"
    assert strategies(linear(64, 1024, 64, torch.bfloat16, "cuda"))[0] == "outer"


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float64, "cuda"), (torch.bfloat16, "cpu"), (torch.float32, "cpu")]
)
def test_not_considered_where_there_is_no_kernel(dtype: torch.dtype, device: str) -> None:
    assert "fused" not in strategies(linear(64, 50, 768, dtype, device))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_flops_are_those_counted(name: str, dynamic: bool) -> None:
    build, inputs, _ = MODELS[name]
    model, first = build().float(), inputs(4)
    first = first.float() if first.is_floating_point() else first
    step = gramfx.transform(model, objective, compile=False, dynamic=dynamic).capture(first)
    found = 0
    for node in gramian_nodes(step.stage("gramian").graph_module):
        sources = [Source.of(factor) for factor in factors_of(node)]
        problem = problem_of(terms_of(node), sources, torch.float32, GPU, 4, torch.device("cuda"))
        for one in candidates(problem, 2**40):
            if one.terms.recipe.strategy == "fused":
                factors = [torch.zeros(source.at(4).shape, dtype=source.dtype) for source in sources]
                with FlopCounterMode(display=False) as counted:
                    gramian_of(one.terms, factors, torch.float32)
                assert one.cost.all_flops == counted.get_total_flops()
                found += 1
    assert found == {"layers": 2, "tied": 2}.get(name, 1)


def test_costs_are_polynomials_in_the_batch() -> None:
    problem = linear(64, 50, 768, torch.bfloat16, "cuda", symbolic=True)
    best, *others = candidates(problem, 2**40)
    assert best.terms.recipe.strategy == "fused"
    assert problem.cost(best.terms, None).peak(64) == best.cost.peak
    assert 64 in time_regime(problem, best, others)[0]
