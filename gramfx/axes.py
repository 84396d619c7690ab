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
    """Whether a dim of this size holds whole periods of the digit: ``inner * extent`` divides it."""
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
