"""The factors of terms as arrays, the parts of them that are wanted, and their einsum."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import opt_einsum
import torch
from opt_einsum.paths import DynamicProgramming
from sympy.polys.rings import PolyElement

from gramfx.arrays import Axes, Loop, Made, every
from gramfx.forms import OneHot, Windows
from gramfx.terms import SAMPLE, SYMBOLIC, Factor, Recipe, Term
from gramfx.torch_compat import is_symbolic

#: The part of an axis that is wanted: ``(start, size)``.
Part = tuple[int, Any]
Cuts = Mapping[str, Part]
ROWS = "r"


@dataclass(frozen=True)
class Held:
    """A term and the arrays its factors point at. ``ranks``: those of its ids, to count instead of the ids."""

    term: Term
    arrays: Sequence[Any]
    ranks: Any = None


@dataclass(frozen=True)
class Work:
    """What the strategies share: the recipe, the dtype to accumulate in, and how to run over parts."""

    recipe: Recipe
    dtype: torch.dtype
    loop: Loop = every


def row_axes(terms: Sequence[Term]) -> Axes:
    """The axes of the rows, one for all of them where the terms have different ones."""
    return terms[0].rows if all(term.rows == terms[0].rows for term in terms) else (ROWS,)


def row_cut(terms: Sequence[Term]) -> str:
    """The axis of the rows that blocks of samples cut, or ``""``."""
    rows = row_axes(terms)
    axis = SAMPLE if SAMPLE in rows else rows[0] if rows and rows != (ROWS,) else ""
    return "" if not axis or terms[0].sizes[axis] == SYMBOLIC else axis


def operands_of(held: Held, cuts: Cuts, dtype: torch.dtype | None) -> list[Any]:
    """All factors but the one-hot ones, and a mask of the ids that count, where some do not."""
    found = []
    for factor in held.term.factors:
        if not isinstance(factor.view, OneHot):
            found.append(loaded(factor, held.term, held.arrays, cuts))
        elif factor.view.ignored >= 0:
            found.append(ids_of(factor, held.term, held.arrays, cuts).differs(factor.view.ignored))
    return found if dtype is None else [array.cast(dtype) for array in found]


def one_hots(term: Term) -> list[Factor]:
    """The factors that are ids."""
    return [factor for factor in term.factors if isinstance(factor.view, OneHot)]


def ids_of(factor: Factor, term: Term, arrays: Sequence[Any], cuts: Cuts) -> Any:
    """The ids of a one-hot factor, the part of them that is wanted."""
    return cut_to(arrays[factor.tensor].shaped(factor.axes[:-1], term.sizes), cuts)


def loaded(factor: Factor, term: Term, arrays: Sequence[Any], cuts: Cuts) -> Any:
    """The part of a factor that is wanted, with the factor's axes."""
    array = arrays[factor.tensor]
    if isinstance(array, Made):
        array = array.rows(cuts.get(row_cut([term])))
        extents = {**term.sizes, **{axis: size for axis, (_, size) in cuts.items()}}
        axis = row_cut([term])
        return cut_to(array.shaped(factor.axes, extents), {name: part for name, part in cuts.items() if name != axis})
    if not isinstance(factor.view, Windows):
        return cut_to(array.shaped(factor.axes, term.sizes), cuts)
    count = len(factor.view.kernel)
    lead, places = factor.axes[: -2 * count], tuple(f"place{i}" for i in range(count))
    spatial = dict(zip(places, (array.size(axis) for axis in array.axes[-count:]), strict=True))
    source = cut_to(array.shaped((*lead, *places), {**term.sizes, **spatial}), cuts)
    seen = source.windows(factor.view, factor.axes)
    return cut_to(seen, {axis: part for axis, part in cuts.items() if axis not in lead})


def cut_to(array: Any, cuts: Cuts) -> Any:
    """The wanted part of each of an array's axes."""
    for axis in array.axes:
        if axis in cuts:
            array = array.cut(axis, *cuts[axis])
    return array


# ---------------------------------------------------------------- einsum


def einsum(operands: Sequence[Any], out: Axes, work: Work) -> Any:
    """One einsum, contracted two operands at a time along the path that opt_einsum finds for the machine's balance."""
    arrays = list(operands)
    if len(arrays) == 1:
        return arrays[0].reduced(out)
    hints = [tuple(hint(array.size(axis), work.recipe.batch) for axis in array.axes) for array in arrays]
    for step in _path(tuple(array.axes for array in arrays), tuple(hints), out, work.recipe.balance):
        picked = [arrays.pop(i) for i in sorted(step, reverse=True)]
        if len(picked) == 1:
            arrays.append(picked[0])
            continue
        kept = set(out).union(*(array.axes for array in arrays))
        right, left = picked
        axes = tuple(axis for axis in dict.fromkeys((*left.axes, *right.axes)) if axis in kept)
        arrays.append(left.contract(right, axes if arrays else out))
    return arrays[0]


@functools.lru_cache(4096)
def _path(operands: tuple[Axes, ...], shapes: tuple[tuple[int, ...], ...], out: Axes, balance: int) -> Any:
    if len(operands) == 2:
        return [(0, 1)]
    names = dict.fromkeys(axis for axes in operands for axis in axes)
    symbols = {axis: opt_einsum.get_symbol(i) for i, axis in enumerate(names)}
    spelled = ",".join("".join(symbols[axis] for axis in axes) for axes in operands)
    equation = f"{spelled}->{''.join(symbols[axis] for axis in out)}"
    best = DynamicProgramming(minimize=f"combo-{balance}")
    return opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=best)[0]


def hint(size: Any, batch: int) -> int:
    """A number for the extent of an axis: only the sample's can be a symbol, and counts as ``batch``."""
    if is_symbolic(size):
        return batch
    return int(size(batch)) if isinstance(size, PolyElement) else int(size)
