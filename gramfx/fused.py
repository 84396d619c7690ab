"""The strategy ``fused``: a Gramian by pairs of tokens as one op, which keeps no products of pairs in memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from gramfx.align import components, groups, merged
from gramfx.factors import ROWS, Held, Work, ids_of, loaded, one_hots
from gramfx.forms import OneHot
from gramfx.terms import SAMPLE, SYMBOLIC, Factor, ParameterTerms, Term

#: Devices that kernels are written for, and the dtype that these accumulate in.
FUSED_DEVICE, FUSED_DTYPE = "cuda", torch.float32


def can_fuse(terms: ParameterTerms) -> bool:
    """Whether each use is a sum over tokens of one outer product, uses that meet being one, or a table read by ids and
    multiplied with."""
    parts = components(terms.terms) if terms.cross else [[term] for term in terms.terms]
    return all(_can_fuse([merged(same) if len(same) > 1 else same[0] for same in groups(part)]) for part in parts)


def _can_fuse(terms: Sequence[Term]) -> bool:
    tied = len(terms) == 2 and sorted(len(one_hots(term)) for term in terms) == [0, 1]
    return (len(terms) == 1 or tied) and all(map(_is_outer_products, terms))


def _is_outer_products(term: Term) -> bool:
    """Whether two factors have all tokens, and each entry of the parameter's axes on one of them alone."""
    tokens = {SAMPLE, *term.tokens}
    if term.rows != (SAMPLE,) or not term.tokens or len(term.factors) != 2 or len(one_hots(term)) > 1:
        return False
    if any(term.sizes[axis] == SYMBOLIC for axis in term.tokens):
        return False
    mine, theirs = (set(factor.axes) - tokens for factor in term.factors)
    return all(tokens <= set(factor.axes) for factor in term.factors) and not mine & theirs


def fused(held: Sequence[Held], work: Work) -> Any:
    """``[m, m]`` of uses that touch the same entries of the parameter."""
    total = functools.reduce(lambda a, b: a.plus(b), map(_alone, held))
    if len(held) == 2:
        read, multiplied = sorted(held, key=lambda one: not one_hots(one.term))
        total = total.plus(_between(read, multiplied, total))
    return total.renamed({SAMPLE: ROWS, f"{SAMPLE}'": f"{ROWS}'"}).cast(work.dtype)


def _alone(held: Held) -> Any:
    left, right = _sides(held.term)
    return _array(left, held).pairwise_gram(_array(right, held), _ignored(left))


def _between(read: Held, multiplied: Held, total: Any) -> Any:
    """What two uses of one table have in common. total: the sum of the Gramians of each alone."""
    ids, cotangent = _sides(read.term)
    head, right = sorted(multiplied.term.factors, key=lambda factor: ids.axes[-1] not in factor.axes)
    given = (_array(cotangent, read), _array(head, multiplied), _array(right, multiplied))
    return _array(ids, read).pairwise_gathered(*given, total, _ignored(ids))


def _sides(term: Term) -> tuple[Factor, Factor]:
    """Both factors, ids first."""
    first, second = sorted(term.factors, key=lambda factor: not isinstance(factor.view, OneHot))
    return first, second


def _ignored(factor: Factor) -> int:
    return factor.view.ignored if isinstance(factor.view, OneHot) else -1


def _array(factor: Factor, held: Held) -> Any:
    """``[samples, tokens, entries of the parameter]``, or ids ``[samples, tokens]``."""
    term = held.term
    if isinstance(factor.view, OneHot):
        return ids_of(factor, term, held.arrays, {}).reduced((SAMPLE, *term.tokens)).folded(term.tokens, "t")
    own = tuple(axis for axis in term.parameter if axis in factor.axes)
    array = loaded(factor, term, held.arrays, {}).reduced((SAMPLE, *term.tokens, *own))
    return array.folded(term.tokens, "t").folded(own, "p")
