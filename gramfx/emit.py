"""From terms to a Gramian, on arrays: tensors to run or to trace, sizes to learn the cost."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gramfx.align import canonical, components, disjoint, groups, merged
from gramfx.arrays import Axes, Loop, Made, blocks, dense, every
from gramfx.factors import (
    ROWS,
    Cuts,
    Held,
    Part,
    Work,
    cut_to,
    einsum,
    ids_of,
    loaded,
    one_hots,
    operands_of,
    row_axes,
    row_cut,
)
from gramfx.forms import OneHot
from gramfx.fused import fused
from gramfx.terms import Factor, ParameterTerms, Recipe, Term


def gramian_of(terms: ParameterTerms, tensors: Sequence[Tensor | Made], dtype: torch.dtype) -> Tensor:
    """The parameter's summand ``J Jᵀ`` of the Gramian, ``[m, m]``, accumulated in ``dtype``.

    tensors: what the factors of the terms point at; rows of the Jacobian may be made when they are needed.
    """
    arrays = [dense(one) if isinstance(one, Tensor) else one for one in tensors]
    return gramian_array(terms, arrays, dtype).tensor


def gramian_array(terms: ParameterTerms, arrays: Sequence[Any], dtype: torch.dtype, loop: Loop = every) -> Any:
    """:func:`gramian_of` on arrays."""
    work = Work(terms.recipe, dtype, loop)
    apart = components(terms.terms) if terms.cross else [[term] for term in terms.terms]
    found = [_gramian(_held(group, arrays, work), terms, work) for group in apart]
    return functools.reduce(lambda a, b: a.plus(b), found)


def parameter_rows(
    term: Term, shape: tuple[int, ...], tensors: Sequence[Tensor], dtype: torch.dtype, part: Part | None = None
) -> Tensor:
    """The term's summand of the Jacobian, ``[m, *shape]``, or its rows of the samples ``part``."""
    cuts = {} if part is None else {row_cut([term]): part}
    rows = _whole_rows(Held(term, [dense(tensor) for tensor in tensors]), cuts, Work(Recipe("outer"), dtype))
    return rows.tensor.reshape(rows.tensor.shape[0], *shape)


def _held(group: Sequence[Term], arrays: Sequence[Any], work: Work) -> list[Held]:
    if not work.recipe.merge:
        return [Held(term, arrays) for term in group]
    return [_merge(same, arrays) if len(same) > 1 else Held(same[0], arrays) for same in groups(group)]


def _merge(group: Sequence[Term], arrays: Sequence[Any]) -> Held:
    """Several terms as one, their tokens laid end to end."""
    made = [_end_to_end([(term.factors[i], term) for term in group], arrays) for i in range(len(group[0].factors))]
    return Held(merged(group), made)


def _end_to_end(same: Sequence[tuple[Factor, Term]], arrays: Sequence[Any]) -> Any:
    flat = []
    for factor, term in same:
        one_hot = isinstance(factor.view, OneHot)
        array = ids_of(factor, term, arrays, {}) if one_hot else loaded(factor, term, arrays, {})
        kept = tuple(axis for axis in canonical(factor, term) if axis in array.axes)
        summed = () if len(term.factors) == 1 else term.tokens
        flat.append(array.reduced((*kept, *summed)))
        if len(term.factors) > 1:
            flat[-1] = flat[-1].folded(summed, "t")
    if len(same[0][1].factors) == 1:
        return functools.reduce(lambda a, b: a.plus(b), flat)
    return flat[0].joined(flat[1:], "t")


def _gramian(held: Sequence[Held], terms: ParameterTerms, work: Work) -> Any:
    """``[m, m]`` of terms that touch the same entries of the parameter."""
    if work.recipe.strategy == "fused":
        return fused(held, work)
    if work.recipe.strategy == "pairwise":
        wide = dataclasses.replace(work, dtype=accumulator([one.term for one in held], work.dtype))
        return _assembled(_by_pairs(held, wide), held).cast(work.dtype)
    if not common_axes([one.term for one in held]):
        rows = functools.reduce(lambda a, b: a.plus(b), [_whole_rows(one, {}, work) for one in held])
        return rows.contract(rows.renamed({ROWS: f"{ROWS}'"}), (ROWS, f"{ROWS}'"))
    if work.recipe.strategy == "sorted":
        held = [_ranked(one) for one in held]
    return _assembled(_by_rows(held, work), held)


def _ranked(held: Held) -> Held:
    """With the ranks of all ids, the same for whatever part of them is looked at."""
    (factor,) = one_hots(held.term)
    return dataclasses.replace(held, ranks=ids_of(factor, held.term, held.arrays, {}).ranks())


def common_axes(terms: Sequence[Term]) -> bool:
    """Whether the terms spell the parameter alike, so that it can be cut."""
    first = terms[0]
    return all(t.parameter == first.parameter and t.slices == first.slices for t in terms) and all(
        any(axis in factor.axes for factor in term.factors) for term in terms for axis in term.parameter
    )


# ---------------------------------------------------------------- blocks of rows of the Jacobian

#: Blocks of the Gramian on and above the diagonal, by number.
Blocks = dict[tuple[int, int], Any]


def _row_parts(held: Sequence[Held], count: int) -> list[Cuts]:
    terms = [one.term for one in held]
    axis = row_cut(terms)
    if not axis or count < 2:
        return [{}]
    extent = terms[0].sizes[axis]
    return [{axis: part} for part in blocks(extent, math.ceil(extent / count))]


def _assembled(found: Blocks, held: Sequence[Held]) -> Any:
    """``[m, m]`` from its blocks on and above the diagonal, each with the axes of its rows, then of its columns."""
    terms = [one.term for one in held]
    rows = row_axes(terms)
    axis, columns = row_cut(terms), tuple(f"{row}'" for row in rows)
    count = 1 + max(i for i, _ in found)
    full = []
    for i in range(count):
        line = [found[i, j] if i <= j else _mirrored(found[j, i], rows) for j in range(count)]
        full.append(line[0].joined(line[1:], f"{axis}'"))
    whole = full[0].joined(full[1:], axis)
    return whole.folded(rows, ROWS).folded(columns, f"{ROWS}'").reduced((ROWS, f"{ROWS}'"))


def _mirrored(block: Any, rows: Axes) -> Any:
    names = {row: f"{row}'" for row in rows}
    swapped = block.renamed({**names, **{new: old for old, new in names.items()}})
    return swapped.reduced((*rows, *names.values()))


def _flat_rows(array: Any, term: Term, rows: Axes, mark: str = "") -> Any:
    """The rows as one axis where the terms of the parameter have different ones."""
    return array.folded(tuple(axis + mark for axis in term.rows), ROWS + mark) if rows == (ROWS,) else array


# ---------------------------------------------------------------- outer: rows, then their products


def _by_rows(held: Sequence[Held], work: Work) -> Blocks:
    recipe = work.recipe
    rows = row_axes([one.term for one in held])
    axis = recipe.axis if recipe.axis in held[0].term.parameter else ""
    parts = _row_parts(held, recipe.parts)
    found: Blocks = {}
    for part in work.loop(blocks(held[0].term.sizes[axis], recipe.chunk) if axis else [(0, 0)]):
        cut = {axis: part} if axis else {}
        if recipe.remake:
            make = functools.partial(_made_again, held, cut, parts, rows, work)
        else:
            make = functools.partial(_cut_rows, _in_blocks(held, cut, rows, work), parts)
        for i in range(len(parts)):
            mine = make(i)
            for j in range(i, len(parts)):
                other = (mine if i == j else make(j)).renamed({row: f"{row}'" for row in rows})
                block = mine.contract(other, (*rows, *(f"{row}'" for row in rows)))
                found[i, j] = found[i, j].plus(block) if (i, j) in found else block
    return found


def _made_again(held: Sequence[Held], cut: Cuts, parts: Sequence[Cuts], rows: Axes, work: Work, number: int) -> Any:
    return _rows_of_all(held, {**cut, **parts[number]}, rows, work)


def _cut_rows(made: Any, parts: Sequence[Cuts], number: int) -> Any:
    return cut_to(made, parts[number])


def _in_blocks(held: Sequence[Held], cut: Cuts, rows: Axes, work: Work) -> Any:
    """All rows, those of a few samples at a time."""
    axis = row_cut([one.term for one in held])
    if not axis or not work.recipe.samples:
        return _rows_of_all(held, cut, rows, work)
    parts = blocks(held[0].term.sizes[axis], work.recipe.samples)
    first, *rest = (_rows_of_all(held, {**cut, axis: part}, rows, work) for part in parts)
    return first.joined(rest, axis)


def _rows_of_all(held: Sequence[Held], cuts: Cuts, rows: Axes, work: Work) -> Any:
    """The sum of the terms' rows, the parameter's axes as one, in whatever order costs the first term no copy."""
    order = tuple(dict.fromkeys(a for f in held[0].term.factors for a in f.axes if a in held[0].term.parameter))
    each = []
    for one in held:
        made = _flat_rows(_rows(one, cuts, work, order), one.term, rows)
        each.append(made.folded(order, "p"))
    return functools.reduce(lambda a, b: a.plus(b), each)


def _rows(held: Held, cuts: Cuts, work: Work, order: Axes) -> Any:
    """The term's rows: the axes of the rows, then those of the parameter that some factor has, in ``order``."""
    term = held.term
    operands = operands_of(held, cuts, work.dtype)
    chosen = [(f.axes[-1], ids_of(f, term, held.arrays, cuts)) for f in one_hots(term)]
    present = {axis for array in operands for axis in array.axes} | {axis for axis, _ in chosen}
    out = (*term.rows, *(axis for axis in order if axis in present))
    if not chosen:
        return einsum(operands, out, work)
    later = {axis for _, ids in chosen for axis in ids.axes}
    kept = [a for a in dict.fromkeys(a for x in operands for a in x.axes) if a in out or a in later]
    array = einsum(operands, tuple(kept), work)
    for number, (axis, ids) in enumerate(chosen, start=1):
        needed = {*term.rows, *(a for _, rest in chosen[number:] for a in rest.axes)}
        whole = term.sizes[axis]
        if held.ranks is not None:
            ids, whole = cut_to(held.ranks, cuts), math.prod(held.ranks.size(a) for a in held.ranks.axes)
        array = array.scatter(axis, ids, tuple(a for a in ids.axes if a in needed), cuts.get(axis, (0, whole)), whole)
    return array.reduced(out)


def _whole_rows(held: Held, cuts: Cuts, work: Work) -> Any:
    """``[m, entries of the parameter]``, zeros where a slice does not reach."""
    term = held.term
    made = _rows(held, cuts, work, term.parameter)
    extents = {**term.sizes, **{axis: size for axis, (_, size) in cuts.items()}}
    made = made.shaped((*term.rows, *term.parameter), extents)
    for axis in term.parameter:
        if axis in term.slices:
            offset, whole = term.slices[axis]
            made = made.padded(axis, offset, whole - offset - term.sizes[axis])
    return made.folded(term.rows, ROWS).folded(term.parameter, "p").reduced((ROWS, "p"))


# ---------------------------------------------------------------- pairwise: products of factors


def _by_pairs(held: Sequence[Held], work: Work) -> Blocks:
    rows = row_axes([one.term for one in held])
    parts = _row_parts(held, work.recipe.parts)
    found: Blocks = {}
    for i, j in itertools.combinations_with_replacement(range(len(parts)), 2):
        for left, right in itertools.product(range(len(held)), repeat=2):
            if disjoint(held[left].term, held[right].term) or (i == j and left > right):
                continue
            block = _pair(held[left], held[right], (parts[i], parts[j]), rows, work, whole=i != j)
            found[i, j] = found[i, j].plus(block) if (i, j) in found else block
    return found


def _pair(left: Held, right: Held, parts: tuple[Cuts, Cuts], rows: Axes, work: Work, *, whole: bool) -> Any:
    """``J_left J_rightᵀ``, token block by token block; its transpose too unless ``whole``, where all meet all."""
    cut = [(token_axis(one.term), one.term) for one in (left, right)]
    mine, other = ([{axis: part} if axis else {} for part in _tokens(axis, term, work)] for axis, term in cut)
    same = left is right and not whole
    pairs = [(i, j) for i in range(len(mine)) for j in range(i if same else 0, len(other))]
    total = None
    for p, q in work.loop([(_key(mine[i], i), _key(other[j], j)) for i, j in pairs]):
        block = _block(left, right, {**mine[p[0]], **parts[0]}, {**other[q[0]], **parts[1]}, rows, work)
        if not whole and not (same and p[0] == q[0]):
            block = block.plus(_mirrored(block, rows))
        total = block if total is None else total.plus(block)
    return total


def _key(cut: Cuts, number: int) -> tuple[int, Any]:
    """A part by its number and size, as loops tell parts apart."""
    return number, next((size for _, size in cut.values()), 0)


def token_axis(term: Term) -> str:
    """The widest axis of tokens, which chunks of a pairwise contraction cut, or ``""``."""
    return max(term.tokens, key=lambda axis: term.sizes[axis], default="")


def _tokens(axis: str, term: Term, work: Work) -> Iterable[Part]:
    return blocks(term.sizes[axis], work.recipe.chunk) if axis else [(0, 0)]


def _block(left: Held, right: Held, mine: Cuts, other: Cuts, rows: Axes, work: Work) -> Any:
    operands = _meeting(left, right, mine, other, work.dtype)
    columns = tuple(f"{axis}'" for axis in right.term.rows)
    block = einsum(operands, (*left.term.rows, *columns), work)
    return _flat_rows(_flat_rows(block, left.term, rows), right.term, rows, "'")


def accumulator(terms: Sequence[Term], dtype: torch.dtype) -> torch.dtype:
    """float64 for float32 sums over pairs of tokens or of uses, which may cancel.

    Where gradients cancel to a part ``ε`` of their size, the products of their pairs cancel to ``ε²``.
    """
    several = len(terms) > 1 or any(term.sizes[axis] > 1 for term in terms for axis in term.tokens)
    return torch.float64 if several and dtype == torch.float32 else dtype


def _beside(term: Term) -> dict[str, str]:
    """New names for the axes of the right-hand term of a pair: it shares those of the parameter alone."""
    return {axis: f"{axis}'" for axis in (*term.sizes, *term.rows) if axis not in term.parameter}


def _meeting(left: Held, right: Held, mine: Cuts, other: Cuts, dtype: torch.dtype) -> list[Any]:
    """The operands of a pair, one-hot factors resolved: equal ids meet by comparison, others by gathering."""
    names = _beside(right.term)
    loaded = operands_of(left, mine, None if one_hots(left.term) else dtype)
    again = loaded if left is right and mine == other else operands_of(right, other, None)
    dense = loaded + [array.renamed(names) for array in again]
    chosen = [(f.axes[-1], ids_of(f, left.term, left.arrays, mine)) for f in one_hots(left.term)]
    chosen += [(f.axes[-1], ids_of(f, right.term, right.arrays, other).renamed(names)) for f in one_hots(right.term)]
    for axis in dict.fromkeys(name for name, _ in chosen):
        ids = [found for name, found in chosen if name == axis]
        if len(ids) == 2:
            dense.append(ids[0].equals(ids[1]))
        else:
            dense = [array.take(axis, ids[0]) if axis in array.axes else array for array in dense]
    return [array.cast(dtype) for array in dense]
