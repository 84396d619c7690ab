"""The search for a recipe: strategies, then chunks, by predicted time under a limit of bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gramfx.align import aligned, components, groups
from gramfx.cost import Cost, Source, cost_of
from gramfx.emit import common_axes, token_axis
from gramfx.factors import row_cut
from gramfx.forms import OneHot, Windows
from gramfx.fused import FUSED_DEVICE, FUSED_DTYPE, can_fuse
from gramfx.machine import Machine
from gramfx.terms import ParameterTerms, Recipe, Term

#: Chunks are steps of the graph, so that more of them make it slow to trace, and far slower to compile.
MOST_STEPS = 256
MOST_COMPILED_STEPS = 12
#: How many axes of a parameter are tried for chunks, the longest ones.
MOST_AXES = 2
#: Working memory up to this share of the cache leaves room for what is read.
CACHE_SHARE = 0.5
#: Blocks above the diagonal alone have to be predicted to take less than this share of the time: smaller products run
#: slower than the model of the machine says.
WORTH_HALVING = 0.8


@dataclass(frozen=True)
class Candidate:
    """A recipe and what it costs at the planned batch size."""

    terms: ParameterTerms
    cost: Cost
    seconds: float


@dataclass(frozen=True)
class Problem:
    """What a search starts from: one parameter's terms, aligned where they can be, and what their factors are."""

    terms: ParameterTerms
    sources: tuple[Source, ...]
    dtype: torch.dtype
    machine: Machine
    batch: int
    device: torch.device
    most_steps: int = MOST_STEPS

    def anonymous(self) -> tuple[object, ...]:
        """Equal for problems that differ in names alone."""
        return self.terms.anonymous().to_json(), self.sources, self.dtype, self.batch

    def candidate(self, recipe: Recipe) -> Candidate:
        """The cost of one recipe."""
        terms = dataclasses.replace(self.terms, recipe=recipe)
        cost = self.cost(terms, self.batch)
        return Candidate(terms, cost, cost.seconds(self.machine))

    def cost(self, terms: ParameterTerms, batch: int | None) -> Cost:
        """At a batch size, or as polynomials in it."""
        return cost_of(terms, self.sources, self.dtype, self.machine.cache, batch)


def problem_of(
    terms: ParameterTerms,
    sources: Sequence[Source],
    dtype: torch.dtype,
    machine: Machine,
    batch: int,
    device: torch.device,
    most_steps: int = MOST_STEPS,
) -> Problem:
    """The terms brought to common axes of the parameter, where that is possible."""
    common = aligned(terms.terms) if terms.cross else _one_by_one(terms.terms)
    terms = terms if common is None else dataclasses.replace(terms, terms=common)
    return Problem(terms, tuple(sources), dtype, machine, batch, device, most_steps)


def _one_by_one(terms: Sequence[Term]) -> tuple[Term, ...] | None:
    alone = [aligned([term]) for term in terms]
    return None if any(one is None for one in alone) else tuple(one[0] for one in alone if one)


def candidates(problem: Problem, limit: int) -> list[Candidate]:
    """The best recipe of each strategy that needs no more than ``limit`` bytes of its own, fastest first.

    Empty where none does.
    """
    found = []
    for recipe in strategies(problem):
        best = _chunked(problem, recipe, limit)
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda candidate: candidate.seconds)


def smallest(problem: Problem) -> Candidate:
    """The recipe that is predicted to need the fewest bytes."""
    recipes = list(strategies(problem))
    recipes += [dataclasses.replace(one, remake=True) for one in recipes if one.strategy == "outer"]
    options = (one for recipe in recipes for one in _options(problem, recipe, 0, every=True))
    return min(options, key=lambda one: (one.cost.peak, one.seconds))


def strategies(problem: Problem) -> Iterator[Recipe]:
    """What can be done at all, not yet in chunks."""
    terms = problem.terms
    parts = _apart(terms)
    made = any(source.making for source in problem.sources)
    base = Recipe("outer", made=made, batch=problem.batch, balance=problem.machine.balance)
    whole = all(common_axes(part) for part in parts)
    for merge in (True, False) if _merges(parts) else (True,):
        given = dataclasses.replace(base, merge=merge)
        if whole:
            yield dataclasses.replace(given, strategy="pairwise")
        yield given
        if whole and merge and all(_all_chosen(part) for part in parts):
            yield dataclasses.replace(given, strategy="sorted")
    if problem.device.type == FUSED_DEVICE and problem.dtype == FUSED_DTYPE and whole and can_fuse(terms):
        yield dataclasses.replace(base, strategy="fused")


def _apart(terms: ParameterTerms) -> list[list[Term]]:
    return components(terms.terms) if terms.cross else [[term] for term in terms.terms]


def _merges(parts: Sequence[Sequence[Term]]) -> bool:
    return any(len(same) > 1 for part in parts for same in groups(part))


def _all_chosen(part: Sequence[Term]) -> bool:
    """Whether all terms read rows of the parameter by ids, laid end to end as one."""
    if len(groups(part)) > 1:
        return False
    chosen = _one_hot_axes(part[0])
    return len(chosen) == 1 and chosen[0] in part[0].parameter


# ---------------------------------------------------------------- chunks


def _chunked(problem: Problem, recipe: Recipe, limit: int) -> Candidate | None:
    """The fastest chunks that fit, and that work inside the cache if some do."""
    whole = problem.candidate(recipe)
    if recipe.strategy == "fused":
        return whole if whole.cost.peak <= limit else None
    small = min(limit, int(problem.machine.cache * CACHE_SHARE))
    if whole.cost.peak <= small and whole.seconds < 2 * whole.cost.launches * problem.machine.latency:
        return whole
    fitting = [one for one in (whole, *_options(problem, recipe, small)) if one.cost.peak <= limit]
    if not fitting and recipe.strategy == "outer":
        again = dataclasses.replace(recipe, remake=True)
        fitting = [one for one in _options(problem, again, limit) if one.cost.peak <= limit]
    # Smaller blocks run inside the cache, unless rows have to be made again for them.
    cached = [] if recipe.made else [one for one in fitting if one.cost.peak <= small]
    if not fitting:
        return None
    best = min(cached or fitting, key=lambda one: one.seconds)
    halves = [one for one in _halved(problem, best.terms.recipe) if one.cost.peak <= max(small, best.cost.peak)]
    worth = [one for one in halves if one.seconds < WORTH_HALVING * best.seconds]
    return min((best, *worth), key=lambda one: one.seconds)


def _halved(problem: Problem, recipe: Recipe) -> Iterator[Candidate]:
    """The same with products above the diagonal only, by blocks of samples."""
    if recipe.parts == 1 and _row_extent(problem) > 1:
        for parts in (2, 4):
            if _steps(problem, dataclasses.replace(recipe, parts=parts)) <= problem.most_steps:
                yield problem.candidate(dataclasses.replace(recipe, parts=parts))


def _options(problem: Problem, recipe: Recipe, enough: int, *, every: bool = False) -> Iterator[Candidate]:
    """Ever smaller chunks, for ever fewer samples at a time, until ``enough`` bytes do; of one op there are none."""
    if recipe.strategy == "fused":
        yield problem.candidate(recipe)
        return
    for blocked in _blocked(problem, recipe):
        for axis, extent in _axes(problem, recipe):
            for chunk in _halvings(extent):
                cut = dataclasses.replace(blocked, axis=axis, chunk=chunk)
                if _steps(problem, cut) > problem.most_steps:
                    break
                made = problem.candidate(cut)
                yield made
                if made.cost.peak <= enough and not every:
                    break


def _halvings(extent: int) -> Iterator[int]:
    yield 0
    while extent > 1:
        extent = (extent + 1) // 2
        yield extent


def _blocked(problem: Problem, recipe: Recipe) -> Iterator[Recipe]:
    """With ever fewer samples at a time: as rows are made, or where rows are not kept as they meet."""
    extent = _row_extent(problem)
    if recipe.strategy == "pairwise" or recipe.remake:
        counts = [1] + [2**k for k in range(1, extent.bit_length()) if 2**k < extent] + [extent] * (extent > 1)
        yield from (dataclasses.replace(recipe, parts=count) for count in counts)
    else:
        yield from (dataclasses.replace(recipe, samples=size) for size in _halvings(extent))


def _row_extent(problem: Problem) -> int:
    """How many rows blocks of samples can cut; 0 where they cannot."""
    parts = _apart(problem.terms)
    axes = [row_cut(part) for part in parts]
    extents = {part[0].sizes[axis] if axis else 0 for part, axis in zip(parts, axes, strict=True)}
    return extents.pop() if len(extents) == 1 else 0


def _steps(problem: Problem, recipe: Recipe) -> int:
    """How many times a contraction is repeated on parts."""
    extents = dict(_axes(problem, recipe))
    chunks = math.ceil(extents[recipe.axis] / recipe.chunk) if recipe.chunk else 1
    pairs = recipe.parts * (recipe.parts + 1) // 2
    if recipe.strategy == "pairwise":
        return chunks * (chunks + 1) // 2 * pairs
    made = math.ceil(_row_extent(problem) / recipe.samples) if recipe.samples else 1
    return chunks * (made + pairs)


def _axes(problem: Problem, recipe: Recipe) -> list[tuple[str, int]]:
    """The axes that chunks may cut, and their extents: tokens of a pairwise contraction, else of the parameter."""
    parts = _apart(problem.terms)
    if recipe.strategy == "pairwise":
        tokens = [term.sizes[token_axis(term)] for part in parts for term in part if token_axis(term)]
        return [("", max(tokens, default=1))]
    if not all(common_axes(part) for part in parts):
        return [("", 1)]
    first = parts[0][0]
    fixed = set(_one_hot_axes(first)) if recipe.strategy == "sorted" else set()
    cut = [axis for axis in first.parameter if axis not in fixed]
    wanted = sorted(cut, key=lambda axis: (_seen_through_windows(first, axis), first.sizes[axis]))
    return [(axis, first.sizes[axis]) for axis in wanted[-MOST_AXES:]] or [("", 1)]


def _seen_through_windows(term: Term, axis: str) -> bool:
    """Whether cutting the axis leaves patches unmade: the input channels of a convolution."""
    return any(isinstance(f.view, Windows) and axis in f.axes[: -2 * len(f.view.kernel)] for f in term.factors)


def label(terms: ParameterTerms) -> str:
    """A recipe in the words of its special cases."""
    recipe, parts = terms.recipe, _apart(terms)
    each = [term for part in parts for term in part]
    if all(term.fallback for term in each):
        return "rows by VJP"
    if recipe.strategy != "pairwise":
        return recipe.strategy
    words = ["merged"] if recipe.merge and _merges(parts) else []
    chosen = {bool(_one_hot_axes(term)) for term in each}
    words += ["gathered"] if len(chosen) == 2 else ["compared"] if chosen == {True} else []
    several = any(token_axis(term) for term in each) or any(len(term.factors) < 2 for term in each)
    return " ".join([*words, "pairwise" if several else "Hadamard"])


def _one_hot_axes(term: Term) -> list[str]:
    return [factor.axes[-1] for factor in term.factors if isinstance(factor.view, OneHot)]
