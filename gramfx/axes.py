"""Where the batch lies in a value: one digit of one dim's index, and how views move it.

The samples of a batch need not be rows of dim 0. Multi-head attention flattens ``[T, B, D]`` to ``[T*B, D]``: there
sample ``i % B`` owns row ``i``. After ``[B, T, D] -> [B*T, D]`` it is sample ``(i // T) % B``. One digit says both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import sympy
import torch

Size: TypeAlias = int | sympy.Expr
Shape: TypeAlias = tuple[Size, ...]


@dataclass(frozen=True)
class Loc:
    """A digit of an index: ``(index[dim] // inner) % extent``, the extent being the batch size for a batch."""

    dim: int
    inner: Size


@dataclass(frozen=True)
class Ragged:
    """Samples that own runs of rows, as many each as the tensor ``offsets`` says, a placeholder; ``rows`` in all.

    The digit that tells the row apart has this extent. The sample is a function of it, so what keeps rows apart keeps
    samples apart. A place has it as a factor of its inner extent, a symbol that no rule can mistake for a number.
    """

    offsets: str
    rows: int

    @property
    def unit(self) -> sympy.Expr:
        """The inner extent of a dim whose entries are rows."""
        return sympy.Symbol(f"{_MARK}{self.rows}:{self.offsets}", integer=True, positive=True)

    def within(self, inner: Size) -> int | None:
        """How many entries each row has in succession, None where the inner extent is not one of these rows."""
        found = quotient(inner, self.unit)
        return found if isinstance(found, int) else None


_MARK = "rows:"


def ragged(loc: Loc | None) -> Ragged | None:
    """The runs of rows that a place tells apart, None where it tells samples apart."""
    return None if loc is None or isinstance(loc.inner, int) else _ragged(loc.inner)


@lru_cache(maxsize=4096)
def _ragged(inner: sympy.Expr) -> Ragged | None:
    for symbol in inner.free_symbols:
        if symbol.name.startswith(_MARK):
            rows, _, offsets = symbol.name.removeprefix(_MARK).partition(":")
            return Ragged(offsets, int(rows))
    return None


@dataclass(frozen=True)
class Value:
    """What is known of a tensor.

    ``differentiable``: a derivative path from a trainable parameter reaches it. ``batch``: the digit that is the
    sample, None if it belongs to no sample. ``iota``: the value equals this digit of its own index, whose extent is
    ``shape[dim] / inner``.
    """

    shape: Shape
    differentiable: bool
    batch: Loc | None
    iota: Loc | None = None


def size_of(extent: int | torch.SymInt | sympy.Expr) -> Size:
    """An extent as an int where it is one, else as a polynomial in the symbols of its shape environment."""
    size = extent.node.expr if isinstance(extent, torch.SymInt) else extent
    return int(size) if isinstance(size, (int, sympy.Integer)) else size


def shape_of(tensor: torch.Tensor) -> Shape:
    """The sizes of a (fake) tensor."""
    return tuple(size_of(extent) for extent in tensor.shape)


def product(sizes: Iterable[Size]) -> Size:
    """The number of elements of these sizes."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return size_of(total)


def quotient(size: Size, divisor: Size) -> Size | None:
    """``size / divisor`` if that is a whole number for every value of the symbols, else None."""
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if divisor and size % divisor == 0 else None
    return _polynomial_quotient(sympy.sympify(size), sympy.sympify(divisor))


@lru_cache(maxsize=4096)
def _polynomial_quotient(size: sympy.Expr, divisor: sympy.Expr) -> Size | None:
    if divisor == 0:
        return None
    numerator, denominator = sympy.fraction(sympy.cancel(size / divisor))
    return size_of(sympy.expand(numerator)) if denominator == 1 else None


def holds(size: Size, inner: Size, extent: Size) -> bool:
    """Whether a dim of this size holds whole periods of the digit: ``inner * extent`` divides it.

    A digit of rows has their number for its extent.
    """
    rows = None if isinstance(inner, int) else _ragged(inner)
    if rows is not None:
        entries = rows.within(inner)
        return entries is not None and quotient(size, entries * rows.rows) is not None
    return quotient(size, inner * extent) is not None


def relocate(loc: Loc, old: Sequence[Size], new: Sequence[Size], extent: Size) -> Loc | None:
    """Where a digit lies after a view ``old -> new``, None if the view splits it over several dims.

    In the flat row-major index the digit has ``stride = inner * prod(old[dim+1:])``. It lies in the dim of ``new``
    whose own stride divides that one, with room for ``extent`` values above it.
    """
    stride = loc.inner * product(old[loc.dim + 1 :])
    after: Size = 1
    for dim in reversed(range(len(new))):
        inner = quotient(stride, after)
        if inner is not None and holds(new[dim], inner, extent):
            return Loc(dim, inner)
        after = after * new[dim]
    return None
