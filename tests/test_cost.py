"""Every recipe's summand of the Gramian against autograd, and its predicted cost against what torch counts."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.flop_counter import FlopCounterMode

import gramfx
from gramfx.cost import Source
from gramfx.emit import gramian_of
from gramfx.forms import OneHot
from gramfx.gramians import accumulated_in, factors_of, gramian_nodes, terms_of
from gramfx.graph import value
from gramfx.machine import machine_of
from gramfx.memory import profile
from gramfx.planning import Problem, problem_of, strategies
from gramfx.terms import Factor, ParameterTerms, Recipe, Term
from gramfx.torch_compat import trace
from tests import reference
from tests.architectures import load, named

CPU = torch.device("cpu")
SAMPLED = 16


class _Values(Interpreter):
    """Runs a graph and keeps every value."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n.name] = super().run_node(n)
        return self.values[n.name]


@dataclasses.dataclass(frozen=True)
class Summand:
    """One parameter's contraction: its problem, the tensors its factors are, and the nodes that make them."""

    problem: Problem
    tensors: list[Tensor]
    factors: list[Node]
    dtype: torch.dtype

    def planned(self, recipe: Recipe) -> ParameterTerms:
        return dataclasses.replace(self.problem.terms, recipe=recipe)

    def gramian(self, recipe: Recipe) -> Tensor:
        with torch.no_grad():
            return gramian_of(self.planned(recipe), self.tensors, self.dtype)


def summands(step: gramfx.Step, tensors: list[Tensor], batch: int) -> list[Summand]:
    """The contractions of a captured step, on these tensors."""
    graph_module = step.stage("gramian").graph_module
    runs = _Values(graph_module)
    with torch.no_grad():
        runs.run(*[tensor.detach().contiguous() for tensor in tensors])
    found = []
    for node in gramian_nodes(graph_module):
        factors, dtype = factors_of(node), accumulated_in(node)
        sources = [Source.of(factor) for factor in factors]
        problem = problem_of(terms_of(node), sources, dtype, machine_of(CPU), batch, CPU)
        found.append(Summand(problem, [runs.values[factor.name] for factor in factors], factors, dtype))
    return found


@functools.cache
def of_table(name: str, coupled: bool) -> tuple[list[Summand], Tensor, dict[str, Tensor]]:
    """The contractions of an architecture in float64, its Jacobian by autograd, and its parameters."""
    loaded = load(named(name), torch.float64)
    dims = None if coupled else loaded.architecture.in_dims
    step = gramfx.transform(loaded.model, loaded.objective, in_dims=dims, compile=False, dynamic=False)
    tensors = step.arguments(*loaded.args, targets=loaded.targets, **loaded.kwargs)
    learned = reference.named_trainable(loaded.model)
    jacobian = reference.jacobian(loaded.objectives(), list(learned.values()))
    return summands(step, tensors, loaded.architecture.batch_size), jacobian, learned


def recipes(problem: Problem) -> Iterator[Recipe]:
    """All strategies that can be, cut in all ways that are told apart by small sizes."""
    for recipe in strategies(problem):
        pairwise = recipe.strategy == "pairwise"
        first = problem.terms.terms[0]
        ids = {factor.axes[-1] for factor in first.factors if isinstance(factor.view, OneHot)}
        # Rows chosen by the ranks of ids are not cut by id.
        kept = [axis for axis in first.parameter if recipe.strategy != "sorted" or axis not in ids]
        axes = [""] if pairwise else kept
        cuts = [("", 0), *itertools.product(axes, (1, 2, 3))]
        for (axis, chunk), samples, parts, remake in itertools.product(cuts, (0, 1, 3), (1, 2, 3, 7), (False, True)):
            if (pairwise and (samples or remake)) or (samples and remake):
                continue
            yield dataclasses.replace(recipe, axis=axis, chunk=chunk, samples=samples, parts=parts, remake=remake)


def sampled(problem: Problem) -> list[Recipe]:
    """Some of them, the same ones each time, whole ones of every strategy among them."""
    every = list(recipes(problem))
    return [*strategies(problem), *random.Random(0).sample(every, min(SAMPLED, len(every)))]


MODELS = [
    "mlp",
    "conv1d_dilated",
    "conv2d_grouped",
    "conv2d_stride_leaves_rest",
    "conv2d_depthwise",
    "conv3d_grouped_strided",
    "conv_transpose2d_grouped",
    "conv_used_twice",
    "embedding",
    "embedding_tokens",
    "embedding_padding_idx",
    "embedding_on_two_shapes",
    "parameter_used_twice",
]


@pytest.mark.parametrize("coupled", [False, True], ids=["samples", "coupled"])
@pytest.mark.parametrize("name", MODELS)
def test_every_recipe_is_autograds(name: str, coupled: bool) -> None:
    found, jacobian, learned = of_table(name, coupled)
    columns = reference.columns(learned)
    for summand in found:
        rows = jacobian[:, columns[summand.problem.terms.parameter]]
        for recipe in sampled(summand.problem):
            error = reference.relative_error(summand.gramian(recipe), rows @ rows.T)
            assert error <= 1e-10, recipe


@pytest.mark.parametrize("coupled", [False, True], ids=["samples", "coupled"])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_flops_are_those_that_torch_counts(name: str, coupled: bool) -> None:
    for summand in of_table(name, coupled)[0]:
        for recipe in sampled(summand.problem)[:8]:
            cost = summand.problem.cost(summand.planned(recipe), summand.problem.batch)
            with FlopCounterMode(display=False) as counter:
                summand.gramian(recipe)
            assert cost.all_flops == pytest.approx(counter.get_total_flops(), rel=0.01), recipe


# ---------------------------------------------------------------- sizes at which memory matters


class Tied(nn.Module):
    """A head that is its embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(200, 32), nn.Linear(32, 200)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embedding(words)))
        return F.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="none").view_as(words).mean(1)


def token_mean(output: Tensor) -> Tensor:
    return output.sin().flatten(1).mean(1)


def channel_mean(output: Tensor) -> Tensor:
    return output.sin().mean((2, 3))


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[Tensor], Tensor] | None]
LARGER: dict[str, Case] = {
    "tokens": (lambda: nn.Linear(48, 32), lambda: torch.randn(12, 24, 48), token_mean),
    "several_objectives": (lambda: nn.Linear(48, 16), lambda: torch.randn(12, 48), None),
    "convolution": (lambda: nn.Conv2d(8, 12, 3, padding=1, groups=2), lambda: torch.randn(8, 8, 9, 9), channel_mean),
    "table": (lambda: nn.Embedding(300, 24), lambda: torch.randint(300, (12, 20)), token_mean),
    "tied": (Tied, lambda: torch.randint(200, (12, 10)), None),
}


@functools.cache
def larger(name: str) -> tuple[Summand, ...]:
    build, inputs, objective = LARGER[name]
    torch.manual_seed(0)
    model, given = build(), inputs()
    step = gramfx.transform(model, objective, compile=False, dynamic=False)
    return tuple(summands(step, step.arguments(given), len(given)))


def own_peak(summand: Summand, recipe: Recipe) -> int:
    """Bytes alive at once in the traced contraction."""

    def contract(*tensors: Tensor) -> Tensor:
        return gramian_of(summand.planned(recipe), tensors, summand.dtype)

    with torch.no_grad():
        return profile(trace(contract, [value(factor) for factor in summand.factors]), summand.problem.batch).peak


def wide(problem: Problem) -> list[Recipe]:
    """A few recipes of each strategy, in chunks that are worth their while."""
    found = []
    for recipe in strategies(problem):
        found.append(recipe)
        if recipe.strategy == "pairwise":
            found += [dataclasses.replace(recipe, chunk=8), dataclasses.replace(recipe, chunk=8, parts=3)]
            continue
        axis = problem.terms.terms[0].parameter[-1]
        cut = dataclasses.replace(recipe, axis=axis, chunk=(problem.terms.terms[0].sizes[axis] + 3) // 4)
        found += [cut, dataclasses.replace(cut, samples=4), dataclasses.replace(cut, parts=4, remake=True)]
    return found


@pytest.mark.parametrize("name", LARGER)
def test_predicted_peak_is_that_of_the_traced_contraction(name: str) -> None:
    for summand in larger(name):
        for recipe in wide(summand.problem):
            counted = own_peak(summand, recipe)
            predicted = summand.problem.cost(summand.planned(recipe), summand.problem.batch).peak
            if counted > 2**14:
                assert predicted == pytest.approx(counted, rel=0.15), (summand.problem.terms.parameter, recipe)


@pytest.mark.parametrize("name", LARGER)
def test_costs_as_polynomials_are_the_numbers_at_the_planned_batch(name: str) -> None:
    for summand in larger(name):
        problem = summand.problem
        for recipe in wide(problem):
            numbers, exact = (problem.cost(summand.planned(recipe), batch) for batch in (problem.batch, None))
            assert (exact.all_flops, exact.moved, exact.peak) == (numbers.all_flops, numbers.moved, numbers.peak)


# ---------------------------------------------------------------- a sum of products that cancels


def cancelling(pattern: str) -> tuple[ParameterTerms, list[Tensor]]:
    """512 tokens whose gradients cancel to a small part: neighbours, or the first half and the second."""
    torch.manual_seed(0)
    batch, pairs, width = 3, 256, 8
    one, noise = torch.randn(batch, pairs, width), torch.randn(batch, pairs, width)
    both, dim = [one, one + 1e-3 * noise], 2 if pattern == "neighbours" else 1
    tokens = torch.stack(both, dim).reshape(batch, 2 * pairs, width)
    signs = torch.stack([torch.ones(pairs), -torch.ones(pairs)], dim - 1).reshape(-1)
    axes = (Factor(0, ("b", "t0", "p0")), Factor(1, ("b", "t0", "p1")))
    term = Term("use", ("b",), axes, ("p1", "p0"), {"b": batch, "t0": 2 * pairs, "p0": width, "p1": 4})
    return ParameterTerms("w", (4, width), (term,)), [tokens, signs.reshape(1, -1, 1).repeat(batch, 1, 4)]


@pytest.mark.parametrize("chunk", [0, 64, 100])
@pytest.mark.parametrize("strategy", ["pairwise", "outer"])
@pytest.mark.parametrize("pattern", ["neighbours", "halves"])
def test_tokens_that_cancel(pattern: str, strategy: str, chunk: int) -> None:
    terms, tensors = cancelling(pattern)
    recipe = Recipe(strategy, chunk=chunk if strategy == "pairwise" else 0)
    got = gramian_of(dataclasses.replace(terms, recipe=recipe), tensors, torch.float32)
    rows = torch.einsum("btp,btq->bqp", *(tensor.double() for tensor in tensors)).flatten(1)
    assert reference.relative_error(got, rows @ rows.T) <= 1e-3


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("strategy", ["pairwise", "outer"])
def test_uses_that_cancel(strategy: str, merge: bool) -> None:
    """Two uses of one weight on nearly the same input, one subtracted from the other."""
    torch.manual_seed(0)
    one = torch.randn(3, 64)
    other, plus = one + 1e-3 * torch.randn(3, 64), torch.ones(3, 4)
    sizes = {"b": 3, "p0": 64, "p1": 4}
    terms = [
        Term(f"use{i}", ("b",), (Factor(i, ("b", "p0")), Factor(2 + i, ("b", "p1"))), ("p1", "p0"), sizes)
        for i in range(2)
    ]
    held = ParameterTerms("w", (4, 64), tuple(terms), recipe=Recipe(strategy, merge=merge))
    got = gramian_of(held, [one, other, plus, -plus], torch.float32)
    rows = torch.einsum("bp,bq->bqp", one.double() - other.double(), plus.double()).flatten(1)
    assert reference.relative_error(got, rows @ rows.T) <= 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["tokens", "convolution", "table"])
def test_half_precision_factors_are_accumulated_in_float32(name: str, dtype: torch.dtype) -> None:
    for summand in larger(name):
        low = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in summand.tensors]
        high = [tensor.double() if tensor.is_floating_point() else tensor for tensor in low]
        for recipe in strategies(summand.problem):
            terms = summand.planned(recipe)
            got, want = gramian_of(terms, low, torch.float32), gramian_of(terms, high, torch.float64)
            assert got.dtype == torch.float32
            assert reference.relative_error(got, want) <= 1e-5, recipe
