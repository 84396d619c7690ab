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
    if difference.is_ground:
        return 1, None
    roots = [interval for interval, _ in difference.intervals(eps=sympy.Rational(1, 8))]
    above = (n for low, high in roots for n in range(max(at, math.floor(low)) + 1, math.ceil(high) + 2))
    below = (n for low, high in reversed(roots) for n in range(min(at, math.ceil(high)) - 1, math.floor(low) - 2, -1))
    last = next((n - 1 for n in above if difference.eval(n) > 0), None)
    first = next((n + 1 for n in below if n >= 1 and difference.eval(n) > 0), 1)
    return first, last


def largest(fits: Callable[[int], bool], at: int) -> int | None:
    """The largest batch size that fits, from one that does, by doubling and halving; ``None`` up to ``LARGEST``."""
    low, high = at, max(1, 2 * at)
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
