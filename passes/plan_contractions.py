"""Choose ahead of time how each parameter's terms are contracted, by predicted time under a budget of bytes."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from gramfx.cost import Source, expression, symbolic
from gramfx.errors import InputError, VerificationError
from gramfx.gramians import (
    accumulated_in,
    factors_of,
    gramian_nodes,
    key_of,
    maker_of,
    set_terms,
    source_of,
    terms_of,
    without_made_rows,
)
from gramfx.graph import value
from gramfx.machine import Machine
from gramfx.memory import Profile, nbytes, profile
from gramfx.plan import Contraction, Plan, Regime, Totals
from gramfx.planning import MOST_STEPS, Candidate, Problem, candidates, label, problem_of, smallest
from gramfx.regimes import largest, peak_at, time_regime
from gramfx.terms import Recipe

#: Puts the candidates of one problem in the order of preference.
Order = Callable[[Problem, Sequence[Candidate]], list[Candidate]]
UNLIMITED = 2**62


def fastest_predicted(_: Problem, found: Sequence[Candidate]) -> list[Candidate]:
    """The order in which candidates are found."""
    return list(found)


@dataclass(frozen=True)
class Bounds:
    """What may be alive above parameters and inputs: ``plain`` bytes, as in a plain forward and backward, and
    ``budget`` more, each at a batch size."""

    plain: Callable[[int], int]
    budget: Callable[[int], int]

    def limit(self, batch: int) -> int:
        """All that may be alive."""
        return self.plain(batch) + self.budget(batch)


@dataclass(frozen=True)
class _Search:
    """One attempt: the problems, the graph whose memory counts, and the candidates found for each node."""

    profiled: GraphModule
    alive: Profile
    problems: Mapping[Node, Problem]
    found: Mapping[Node, list[Candidate]]

    def fits(self, limit: int) -> bool:
        """Whether each node has a candidate, and nothing else needs more."""
        return all(self.found.values()) and self.alive.peak <= limit


def plan_contractions(
    graph_module: GraphModule,
    batch: int,
    bounds: Bounds,
    machine: Machine,
    *,
    given: Plan | None = None,
    order: Order = fastest_predicted,
    reserve: int | None = 0,
    most_steps: int = MOST_STEPS,
) -> tuple[GraphModule, Plan] | None:
    """Set the recipe of every ``gramfx::gramian`` node, and say all that was decided as a :class:`Plan`.

    The graph is scheduled already. batch: the size to plan for, also where the graph's is a symbol. given: a plan whose
    recipes are taken instead of looking for better ones, where it holds for this batch size. order: from candidates,
    fastest predicted first, to candidates in order of preference. reserve: bytes to leave free below the limit;
    ``None`` for the recipes that need the fewest bytes, whatever the limit. most_steps: into how many steps one
    contraction may be cut. ``None`` comes back where nothing is predicted to keep the limit. Raises
    :class:`InputError` for a plan of other terms.
    """
    graph_module = copy.deepcopy(graph_module)
    problem_at = functools.partial(_problem, machine=machine, batch=batch, most_steps=most_steps)
    if given is not None and batch in given.regime:
        for node in gramian_nodes(graph_module):
            problem = problem_at(node, [Source.of(factor) for factor in factors_of(node)])
            set_terms(node, dataclasses.replace(problem.terms, recipe=_recipe(given, node)))
        graph_module.recompile()
        return graph_module, given
    limit = UNLIMITED if reserve is None else bounds.limit(batch) - reserve
    order = (lambda problem, _: [smallest(problem)]) if reserve is None else order
    for made in _made_in_turn(graph_module, batch, reserve is None):
        search = _searched(graph_module, made, batch, problem_at, limit, order)
        if search.fits(limit):
            break
    else:
        return None
    plan = _plan(search, batch, bounds)
    for node, (best, *_) in search.found.items():
        set_terms(node, best.terms)
    graph_module.recompile()
    return graph_module, plan


def _recipe(given: Plan, node: Node) -> Recipe:
    terms = terms_of(node)
    known = given.of(terms.parameter)
    if known is None or known.key != key_of(node):
        raise InputError(
            "the plan was made for another model",
            expected=f"a plan for {terms.parameter} with uses {', '.join(term.use for term in terms.terms)}",
            got="none" if known is None else known.form,
            remedy="leave plan out, or plan anew and save that",
        )
    return known.recipe


# ---------------------------------------------------------------- the search


def _made_in_turn(graph_module: GraphModule, batch: int, all_at_once: bool) -> Iterator[frozenset[str]]:
    """Of which gramian nodes rows by VJPs are made in blocks: of none, then of ever more, the largest first."""
    sizes = {
        node.name: sum(nbytes((factor, 0), batch) for factor in factors_of(node) if maker_of(factor))
        for node in gramian_nodes(graph_module)
    }
    largest_first = sorted((name for name, size in sizes.items() if size), key=lambda name: -sizes[name])
    count = len(largest_first) if all_at_once else 0
    while count < len(largest_first):
        yield frozenset(largest_first[:count])
        count = max(1, 2 * count)
    yield frozenset(largest_first)


def _problem(node: Node, sources: Sequence[Source], *, machine: Machine, batch: int, most_steps: int) -> Problem:
    return problem_of(terms_of(node), sources, accumulated_in(node), machine, batch, value(node).device, most_steps)


def _searched(
    graph_module: GraphModule,
    made: Collection[str],
    batch: int,
    problem_at: Callable[..., Problem],
    limit: int,
    order: Order,
) -> _Search:
    """Candidates for every node; none where something else needs more than ``limit``.

    made: the nodes whose rows by VJPs are not there before, but made in blocks.
    """
    profiled = without_made_rows(graph_module, made) if made else graph_module
    alive = profile(profiled, batch)
    if alive.peak > limit:
        return _Search(profiled, alive, {}, {})
    whole = profile(graph_module, batch) if made else alive
    problems = {}
    for node in gramian_nodes(graph_module):
        blocks = node.name in made
        sources = [source_of(one, node, batch, whole) if blocks else Source.of(one) for one in factors_of(node)]
        problems[node] = problem_at(node, sources)
    before = {node.name: size for node, size in alive.before.items()}
    known: dict[object, list[Candidate]] = {}
    found = {node: _found(problem, limit - before[node.name], known, order) for node, problem in problems.items()}
    return _Search(profiled, alive, problems, found)


def _found(problem: Problem, limit: int, known: dict[object, list[Candidate]], order: Order) -> list[Candidate]:
    """Candidates, looked for once for all parameters that differ in their names alone."""
    found = _under(problem, UNLIMITED, known, order)
    if any(candidate.cost.peak > limit for candidate in found):
        found = _under(problem, limit, known, order)
    return [
        dataclasses.replace(one, terms=dataclasses.replace(problem.terms, recipe=one.terms.recipe)) for one in found
    ]


def _under(problem: Problem, limit: int, known: dict[object, list[Candidate]], order: Order) -> list[Candidate]:
    key = (problem.anonymous(), limit)
    if key not in known:
        found = candidates(problem, limit)
        known[key] = order(problem, found) if found else []
    return known[key]


# ---------------------------------------------------------------- the plan as a value


def _plan(search: _Search, batch: int, bounds: Bounds) -> Plan:
    static = not any(symbolic(problem.sources) for problem in search.problems.values())
    contractions = tuple(_contraction(node, search, static) for node in search.problems)
    regime = Regime(batch, batch) if static else _reach(search, batch, bounds)
    for one in contractions:
        regime = regime.within(one.regime)
    machine = next((problem.machine.name for problem in search.problems.values()), "")
    return Plan(batch, regime, bounds.budget(batch), machine, contractions, Totals(0, 0, 0, bounds.plain(batch)))


def _contraction(node: Node, search: _Search, static: bool) -> Contraction:
    problem, (best, *others) = search.problems[node], search.found[node]
    terms = best.terms
    exact = problem.cost(terms, None)
    regime, then = (Regime(problem.batch, problem.batch), "") if static else time_regime(problem, best, others)
    forms = list(dict.fromkeys(str(term) for term in terms.terms))
    return Contraction(
        parameter=terms.parameter,
        uses=len(terms.terms),
        form=forms[0] if len(forms) == 1 else f"{forms[0]} and {len(forms) - 1} more",
        strategy=terms.recipe.strategy,
        label=label(terms),
        recipe=terms.recipe,
        flops=int(best.cost.all_flops),
        moved=int(best.cost.moved),
        peak=int(best.cost.peak),
        seconds=best.seconds,
        polynomials=(str(expression(exact.all_flops)), str(expression(exact.moved)), str(expression(exact.peak))),
        regime=regime,
        then=then,
        others=tuple((one.terms.recipe.strategy, one.seconds) for one in others),
        fallback="; ".join(dict.fromkeys(term.fallback for term in terms.terms if term.fallback)),
        key=key_of(node),
    )


def _reach(search: _Search, batch: int, bounds: Bounds) -> Regime:
    """The batch sizes up to which these recipes keep the limit."""

    def fits(size: int) -> bool:
        alive = profile(search.profiled, size)
        before = {node.name: nbytes for node, nbytes in alive.before.items()}
        needed = (
            before[node.name] + peak_at(problem, search.found[node][0], size)
            for node, problem in search.problems.items()
        )
        return max(alive.peak, *needed) <= bounds.limit(size)

    return Regime(1, largest(fits, batch))


def verify_planned(graph_module: GraphModule) -> None:
    """Raise :class:`VerificationError` where a gramian node has no strategy."""
    for node in gramian_nodes(graph_module):
        if not terms_of(node).recipe.strategy:
            raise VerificationError("a contraction was not planned", got=node.name)
