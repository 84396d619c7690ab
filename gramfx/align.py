"""Terms of one parameter brought to the same axes of the parameter, so that they can meet."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from gramfx.forms import OneHot
from gramfx.terms import Factor, Term


def aligned(terms: Sequence[Term]) -> tuple[Term, ...] | None:
    """The same terms, all spelling the parameter by axes ``p0 p1 …`` of the same extents.

    Axes are split where another term has a finer view. ``None`` where a slice or a one-hot axis would have to be
    split, or where slices overlap in part: such terms meet only as rows.
    """
    plain = [_without_units(term) for term in terms]
    bounds = sorted(set(itertools.chain.from_iterable(_bounds(term) for term in plain)))
    if any(later % earlier for earlier, later in itertools.pairwise(bounds)):
        return None
    made = [_refined(term, bounds) for term in plain]
    if any(term is None for term in made):
        return None
    found = tuple(term for term in made if term is not None)
    return found if all(_meet_whole(a, b) for a, b in itertools.combinations(found, 2)) else None


def _whole(term: Term, axis: str) -> int:
    return term.slices[axis][1] if axis in term.slices else term.sizes[axis]


def _without_units(term: Term) -> Term:
    return dataclasses.replace(term, parameter=tuple(axis for axis in term.parameter if _whole(term, axis) != 1))


def _bounds(term: Term) -> list[int]:
    """The strides at which axes begin, counted from the innermost: divisors shared by all spellings."""
    extents = [_whole(term, axis) for axis in reversed(term.parameter)]
    return list(itertools.accumulate([1, *extents], lambda a, b: a * b))


def _refined(term: Term, bounds: Sequence[int]) -> Term | None:
    """``term`` with its parameter axes split at ``bounds`` and named by position."""
    parts: dict[str, list[str]] = {}
    sizes, slices = dict(term.sizes), {}
    spelled: list[str] = []
    below = 1
    for axis in reversed(term.parameter):
        above = below * _whole(term, axis)
        steps = [b for b in bounds if below <= b <= above]
        extents = [later // earlier for earlier, later in itertools.pairwise(steps)][::-1]
        if len(extents) > 1 and (axis in term.slices or _is_one_hot(term, axis)):
            return None
        names = [f"q{len(spelled) + i}" for i in reversed(range(len(extents)))]
        parts[axis] = names
        sizes |= dict(zip(names, extents, strict=True))
        if axis in term.slices:
            sizes[names[0]], slices[names[0]] = term.sizes[axis], term.slices[axis]
        spelled.extend(reversed(names))
        below = above
    factors = tuple(dataclasses.replace(f, axes=_spelled(f, parts)) for f in term.factors)
    return dataclasses.replace(term, factors=factors, parameter=tuple(reversed(spelled)), sizes=sizes, slices=slices)


def _spelled(factor: Factor, parts: dict[str, list[str]]) -> tuple[str, ...]:
    return tuple(new for axis in factor.axes for new in parts.get(axis, [axis]))


def _is_one_hot(term: Term, axis: str) -> bool:
    return any(isinstance(f.view, OneHot) and f.axes[-1] == axis for f in term.factors)


def _meet_whole(left: Term, right: Term) -> bool:
    """Whether two terms touch the same entries, or none in common."""
    if disjoint(left, right):
        return True
    return all(left.slices.get(axis) == right.slices.get(axis) for axis in left.parameter)


def disjoint(left: Term, right: Term) -> bool:
    """Whether two aligned terms touch different entries of the parameter."""
    for axis in left.parameter:
        a, b = left.slices.get(axis), right.slices.get(axis)
        if a and b and (a[0] + left.sizes[axis] <= b[0] or b[0] + right.sizes[axis] <= a[0]):
            return True
    return False


# ---------------------------------------------------------------- merging


def merge_key(term: Term) -> tuple[object, ...] | None:
    """Equal for aligned terms that differ in tokens only; ``None`` where tokens are not common to all factors."""
    tokens = set(term.tokens)
    if any(not tokens <= set(factor.axes) for factor in term.factors):
        return None
    factors = tuple((isinstance(f.view, OneHot) and f.view, canonical(f, term)) for f in term.factors)
    extents = tuple(term.sizes[axis] for axis in (*term.rows, *term.parameter))
    return term.rows, term.parameter, factors, extents, tuple(sorted(term.slices.items()))


def canonical(factor: Factor, term: Term) -> tuple[str, ...]:
    """The axes of a factor but for tokens, rows first, then the parameter's."""
    return tuple(axis for axis in (*term.rows, *term.parameter) if axis in factor.axes)


def merged(terms: Sequence[Term]) -> Term:
    """One term for several with the same key: their tokens one after the other on axis ``t``.

    A term of a single factor has its tokens summed instead.
    """
    first = terms[0]
    summed = len(first.factors) == 1
    count = sum(math.prod(term.sizes[axis] for axis in term.tokens) for term in terms)
    token: tuple[str, ...] = () if summed else ("t",)
    factors = []
    for number, factor in enumerate(first.factors):
        axes = canonical(factor, first)
        one_hot = isinstance(factor.view, OneHot)
        spelled = (*axes[:-1], *token, axes[-1]) if one_hot else (*axes, *token)
        factors.append(Factor(number, spelled, factor.view if one_hot else None))
    sizes = {axis: first.sizes[axis] for axis in (*first.rows, *first.parameter)}
    use = ", ".join(term.use for term in terms)
    return Term(use, first.rows, tuple(factors), first.parameter, {**sizes, "t": count}, first.slices)


def groups(terms: Sequence[Term]) -> list[list[Term]]:
    """Terms that can merge, together."""
    found: dict[object, list[Term]] = {}
    for number, term in enumerate(terms):
        key = merge_key(term)
        found.setdefault(number if key is None else key, []).append(term)
    return list(found.values())


def components(terms: Sequence[Term]) -> list[list[Term]]:
    """Terms that touch the same entries of the parameter, together; all in one where they are not aligned."""
    if any(set(term.parameter) != set(terms[0].parameter) for term in terms):
        return [list(terms)]
    found: dict[object, list[Term]] = {}
    for term in terms:
        found.setdefault(tuple(sorted(term.slices.items())), []).append(term)
    parts = list(found.values())
    apart = all(disjoint(a[0], b[0]) for a, b in itertools.combinations(parts, 2))
    return parts if apart else [list(terms)]
