"""What contracting terms costs, in multiply-adds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import opt_einsum

from gramfx.emit import beside
from gramfx.forms import OneHot
from gramfx.terms import SYMBOLIC, Term

Axes = tuple[str, ...]


def rows_cost(term: Term, batch: int) -> int:
    """Of the term's summand of the Jacobian. A symbolic batch counts as ``batch``."""
    present = {axis for factor in term.factors for axis in factor.axes}
    out = (*term.rows, *(axis for axis in term.parameter if axis in present))
    return _einsum_cost([factor.axes for factor in term.factors], out, _sizes(term, batch))


def products_cost(terms: Sequence[Term], shape: tuple[int, ...], batch: int) -> int:
    """Of the products of all rows of the Jacobian with each other."""
    sizes = _sizes(terms[0], batch)
    return math.prod(sizes[axis] for axis in terms[0].rows) ** 2 * math.prod(shape)


def pair_cost(left: Term, right: Term, batch: int) -> int:
    """Of ``J_left J_rightᵀ`` without a gradient."""
    other = beside(right)
    sizes = {**_sizes(left, batch), **_sizes(other, batch)}
    one_hot = [f.axes for term in (left, other) for f in term.factors if isinstance(f.view, OneHot)]
    operands = [f.axes for term in (left, other) for f in term.factors if not isinstance(f.view, OneHot)]
    for axis in dict.fromkeys(axes[-1] for axes in one_hot):
        ids = [axes[:-1] for axes in one_hot if axes[-1] == axis]
        if len(ids) == 2:
            operands.append((*ids[0], *ids[1]))
        else:
            operands = [_replaced(axes, axis, ids[0]) for axes in operands]
    return _einsum_cost(operands, (*left.rows, *other.rows), sizes)


def _replaced(axes: Axes, axis: str, ids: Axes) -> Axes:
    return tuple(new for old in axes for new in (ids if old == axis else (old,)))


def _sizes(term: Term, batch: int) -> Mapping[str, int]:
    return {axis: batch if size == SYMBOLIC else size for axis, size in term.sizes.items()}


def _einsum_cost(operands: Sequence[Axes], out: Axes, sizes: Mapping[str, int]) -> int:
    names = dict.fromkeys(axis for axes in operands for axis in axes)
    symbols = {axis: opt_einsum.get_symbol(i) for i, axis in enumerate(names)}
    spelled = ",".join("".join(symbols[axis] for axis in axes) for axes in operands)
    equation = f"{spelled}->{''.join(symbols[axis] for axis in out)}"
    shapes = [tuple(sizes[axis] for axis in axes) for axes in operands]
    return int(opt_einsum.contract_path(equation, *shapes, shapes=True)[1].opt_cost)
