"""The batch sizes for which a choice holds: exact crossing points of predicted times, and the reach of a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import sympy

from gramfx.plan import Regime
from gramfx.planning import Candidate, Problem

#: Beyond this batch size nothing is promised; a larger one is planned for when it comes.
LARGEST = 2**20


def time_regime(problem: Problem, best: Candidate, others: Sequence[Candidate]) -> tuple[Regime, str]:
    """Where ``best`` is predicted to be no slower than the others, and what is faster beyond."""
    first, last, then = 1, None, ""
    mine = _time(problem, best)
    for other in others:
        below, above = crossings(mine - _time(problem, other), problem.batch)
        first = max(first, below)
        if above is not None and (last is None or above < last):
            last, then = above, f"{other.terms.recipe.strategy} from {above + 1}"
    return Regime(first, last), then


def _time(problem: Problem, candidate: Candidate) -> sympy.Poly:
    return problem.cost(candidate.terms, None).time(problem.machine)


def crossings(difference: sympy.Poly, at: int) -> tuple[int, int | None]:
    """The integers around ``at`` up to which a polynomial, not positive at ``at``, stays so; ``None`` for no end."""
    first, last = 1, None
    if difference.is_ground:
        return first, last
    for (low, high), _ in difference.intervals(eps=sympy.Rational(1, 8)):
        if high > at:
            end = math.floor(high)
            end = end if difference.eval(end) <= 0 else end - 1
            last = max(at, end) if last is None else min(last, max(at, end))
        elif low > 0:
            start = math.ceil(low)
            first = max(first, start if difference.eval(start) <= 0 else start + 1)
    return min(first, at), last


def largest(fits: Callable[[int], bool], at: int) -> int | None:
    """The largest batch size that fits, from one that does, by doubling and halving; ``None`` up to ``LARGEST``."""
    low, high = at, 2 * at
    while fits(high):
        low, high = high, 2 * high
        if high > LARGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def peak_at(problem: Problem, candidate: Candidate, batch: int) -> int:
    """Bytes that a candidate needs of its own at another batch size."""
    return int(problem.cost(candidate.terms, batch).peak)
