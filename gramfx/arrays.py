"""Tensors with named axes: the few operations that contractions are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from gramfx.forms import Windows
from gramfx.pairwise import PAIRWISE_GATHERED, PAIRWISE_GRAM, alike, precision
from gramfx.torch_compat import is_symbolic

Axes = tuple[str, ...]


class Array(Protocol):
    """What contractions ask of an operand. Implemented on tensors here, on sizes alone in ``gramfx.sketch``."""

    @property
    def axes(self) -> Axes:
        """The names of the dims, in order."""

    def size(self, axis: str) -> Any:
        """The extent of an axis."""

    def shaped(self, axes: Axes, sizes: Mapping[str, int]) -> Self:
        """The same numbers, row-major, with other axes."""

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same numbers under other names."""

    def cut(self, axis: str, start: int, size: Any) -> Self:
        """A part of one axis."""

    def windows(self, view: Windows, axes: Axes) -> Self:
        """The patches a kernel sees: the spatial axes, which are last, become ``*out, *kernel``."""

    def cast(self, dtype: torch.dtype) -> Self:
        """In another dtype."""

    def differs(self, number: int) -> Self:
        """Where an integer is not ``number``."""

    def equals(self, other: Self) -> Self:
        """Where two integers are equal: the axes of both, one after the other."""

    def take(self, axis: str, ids: Self) -> Self:
        """The entries that ``ids`` name, the axes of ``ids`` in the place of ``axis``."""

    def scatter(self, axis: str, ids: Self, kept: Axes, part: tuple[int, Any], whole: Any) -> Self:
        """Sums over the axes of ``ids`` that are not ``kept``, each entry put where its id says on a new last axis.

        Only the ids of ``part``, a start and a size, count, of ``whole`` many.
        """

    def ranks(self) -> Self:
        """Integers replaced by their rank among all of them, equal ones by equal ranks."""

    def contract(self, other: Self, out: Axes) -> Self:
        """The einsum of two."""

    def reduced(self, out: Axes) -> Self:
        """Sums over the axes that ``out`` lacks, in the order of ``out``."""

    def folded(self, axes: Axes, name: str) -> Self:
        """``axes``, which follow each other, as one."""

    def joined(self, others: Sequence[Self], axis: str) -> Self:
        """All one after the other along an axis."""

    def plus(self, other: Self) -> Self:
        """The sum of two with the same axes."""

    def padded(self, axis: str, before: int, after: int) -> Self:
        """With zeros around one axis."""

    def pairwise_gram(self, cot: Self, ignored: int) -> Self:
        """``[b, b']`` of ``[b, t, d]``, or ids ``[b, t]``, and ``[b, t, p]``: :func:`gramfx.pairwise.pairwise_gram`."""

    def pairwise_gathered(self, left: Self, head: Self, right: Self, gram: Self, ignored: int) -> Self:
        """``[b, b']`` of ids: :func:`gramfx.pairwise.pairwise_gathered`, measured by the diagonal of ``gram``."""


class Loop(Protocol):
    """Runs over the parts of a chunked contraction."""

    def __call__(self, parts: Iterable[Any]) -> Iterable[Any]:
        """The parts, or one for each kind of them."""


def every(parts: Iterable[Any]) -> Iterable[Any]:
    """All the parts: the loop that runs a contraction."""
    return parts


@dataclass(frozen=True)
class Dense:
    """A tensor and the names of its dims."""

    tensor: Tensor
    axes: Axes

    def _new(self, tensor: Tensor, axes: Iterable[str] | None = None) -> Dense:
        return Dense(tensor, self.axes if axes is None else tuple(axes))

    def _at(self, axis: str) -> int:
        return self.axes.index(axis)

    def size(self, axis: str) -> Any:  # noqa: D102
        return self.tensor.shape[self._at(axis)]

    def shaped(self, axes: Axes, sizes: Mapping[str, int]) -> Dense:  # noqa: D102
        # A reshape may fix a symbolic batch, so what has its dims already is left alone.
        if self.tensor.dim() == len(axes):
            return self._new(self.tensor, axes)
        return self._new(self.tensor.reshape([sizes[axis] for axis in axes]), axes)

    def renamed(self, names: Mapping[str, str]) -> Dense:  # noqa: D102
        return self._new(self.tensor, (names.get(axis, axis) for axis in self.axes))

    def cut(self, axis: str, start: int, size: Any) -> Dense:  # noqa: D102
        if size is self.size(axis) or size == self.size(axis):
            return self
        return self._new(self.tensor.narrow(self._at(axis), start, size))

    def windows(self, view: Windows, axes: Axes) -> Dense:  # noqa: D102
        return self._new(windows(self.tensor, view), axes)

    def cast(self, dtype: torch.dtype) -> Dense:  # noqa: D102
        return self._new(self.tensor.to(dtype))

    def differs(self, number: int) -> Dense:  # noqa: D102
        return self._new(self.tensor != number)

    def equals(self, other: Dense) -> Dense:  # noqa: D102
        mine = self.tensor.reshape(*self.tensor.shape, *(1,) * other.tensor.dim())
        return self._new(mine == other.tensor, (*self.axes, *other.axes))

    def take(self, axis: str, ids: Dense) -> Dense:  # noqa: D102
        at = self._at(axis)
        taken = self.tensor.index_select(at, ids.tensor.reshape(-1)).unflatten(at, list(ids.tensor.shape))
        return self._new(taken, (*self.axes[:at], *ids.axes, *self.axes[at + 1 :]))

    def scatter(self, axis: str, ids: Dense, kept: Axes, part: tuple[int, Any], whole: Any) -> Dense:  # noqa: D102
        start, size = part
        lead = tuple(name for name in ids.axes if name in kept)
        summed = tuple(name for name in ids.axes if name not in kept)
        rest = tuple(name for name in self.axes if name not in ids.axes)
        source = self.reduced((*lead, *summed, *rest)).tensor
        places = ids.reduced((*lead, *summed)).tensor
        if size is not whole and size != whole:
            outside = (places < start) | (places >= start + size)
            source = source.masked_fill(outside.reshape(*outside.shape, *(1,) * len(rest)), 0)
            places = (places - start).clamp(0, size - 1)
        count = math.prod(source.shape[: len(lead)])
        owner = torch.arange(count, device=places.device).reshape(*source.shape[: len(lead)], *(1,) * len(summed))
        flat = source.reshape(-1, *source.shape[len(lead) + len(summed) :])
        made = flat.new_zeros(count * size, *flat.shape[1:]).index_add(0, (places + owner * size).reshape(-1), flat)
        made = made.reshape(*source.shape[: len(lead)], size, *flat.shape[1:])
        return self._new(made, (*lead, axis, *rest))

    def ranks(self) -> Dense:  # noqa: D102
        ordered, order = self.tensor.reshape(-1).sort()
        fresh = torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
        ranked = torch.empty_like(ordered).scatter(0, order, fresh.cumsum(0))
        return self._new(ranked.reshape(self.tensor.shape))

    def contract(self, other: Dense, out: Axes) -> Dense:  # noqa: D102
        mine, theirs = self._alone_summed(other, out), other._alone_summed(self, out)
        if set(mine.axes) == set(theirs.axes):
            # A product entry by entry: a matmul would permute both into single rows.
            return mine._new(mine.tensor * theirs.reduced(mine.axes).tensor).reduced(out)
        shared = tuple(axis for axis in mine.axes if axis in theirs.axes)
        each, summed = (tuple(axis for axis in shared if (axis in out) == kept) for kept in (True, False))
        left, right = (tuple(axis for axis in one.axes if axis not in shared) for one in (mine, theirs))
        if not summed:
            padded = mine.reduced((*each, *left)).tensor.reshape(*map(mine.size, (*each, *left)), *(1,) * len(right))
            return mine._new(padded * theirs._stretched(each, left, right), (*each, *left, *right)).reduced(out)
        a, b = mine._matrix(each, left, summed), theirs._matrix(each, right, summed).transpose(-2, -1)
        made = torch.bmm(a, b) if each else torch.mm(a, b)
        sizes = [*map(mine.size, (*each, *left)), *map(theirs.size, right)]
        if len(left) != 1 or len(right) != 1 or len(each) > 1:
            made = made.reshape(sizes)
        return mine._new(made, (*each, *left, *right)).reduced(out)

    def _stretched(self, each: Axes, between: Axes, rest: Axes) -> Tensor:
        """With dims of one entry after those of ``each``."""
        sizes = (*map(self.size, each), *(1,) * len(between), *map(self.size, rest))
        return self.reduced((*each, *rest)).tensor.reshape(sizes)

    def _matrix(self, each: Axes, rows: Axes, columns: Axes) -> Tensor:
        """``[each, rows, columns]``, each folded into one dim, ``each`` left out where there is none.

        Transposed in place where the rows come last already: a product takes that without a copy.
        """
        turned = self.axes == (*each, *columns, *rows)
        first, second = (columns, rows) if turned else (rows, columns)
        tensor = self.reduced((*each, *first, *second)).tensor
        groups = [each, first, second] if each else [first, second]
        if any(len(group) != 1 for group in groups):
            tensor = tensor.reshape([math.prod(self.size(axis) for axis in group) for group in groups])
        return tensor.transpose(-2, -1) if turned else tensor

    def _alone_summed(self, other: Dense, out: Axes) -> Dense:
        return self.reduced(tuple(axis for axis in self.axes if axis in other.axes or axis in out))

    def reduced(self, out: Axes) -> Dense:  # noqa: D102
        summed = [at for at, axis in enumerate(self.axes) if axis not in out]
        kept = tuple(axis for axis in self.axes if axis in out)
        tensor = self.tensor.sum(summed) if summed else self.tensor
        return self._new(tensor if kept == out else tensor.permute([kept.index(axis) for axis in out]), out)

    def folded(self, axes: Axes, name: str) -> Dense:  # noqa: D102
        if len(axes) == 1:
            return self.renamed({axes[0]: name})
        at = self._at(axes[0]) if axes else len(self.axes)
        shape = self.tensor.shape
        size = math.prod(shape[at : at + len(axes)])
        tensor = self.tensor.reshape(*shape[:at], size, *shape[at + len(axes) :])
        return self._new(tensor, (*self.axes[:at], name, *self.axes[at + len(axes) :]))

    def joined(self, others: Sequence[Dense], axis: str) -> Dense:  # noqa: D102
        if not others:
            return self
        return self._new(torch.cat([self.tensor, *(o.reduced(self.axes).tensor for o in others)], self._at(axis)))

    def plus(self, other: Dense) -> Dense:  # noqa: D102
        return self._new(self.tensor + other.reduced(self.axes).tensor)

    def padded(self, axis: str, before: int, after: int) -> Dense:  # noqa: D102
        return self._new(_padded(self.tensor, self._at(axis), before, after))

    def pairwise_gram(self, cot: Dense, ignored: int) -> Dense:  # noqa: D102
        act, cotangent = alike(self.tensor, cot.tensor)
        made = PAIRWISE_GRAM(act, cotangent, ignored=ignored, precision=precision())
        return self._new(made, (self.axes[0], f"{self.axes[0]}'"))

    def pairwise_gathered(self, left: Dense, head: Dense, right: Dense, gram: Dense, ignored: int) -> Dense:  # noqa: D102
        given, squares = alike(left.tensor, head.tensor, right.tensor), gram.tensor.diagonal()
        made = PAIRWISE_GATHERED(self.tensor, *given, squares, ignored=ignored, precision=precision())
        return gram._new(made)


def dense(tensor: Tensor) -> Dense:
    """With its dims' positions for names."""
    return Dense(tensor, tuple(map(str, range(tensor.dim()))))


@dataclass(frozen=True)
class Made:
    """Rows of the Jacobian that are not there until they are asked for, of some samples or of all."""

    rows: Callable[[tuple[int, Any] | None], Any]


def windows(source: Tensor, view: Windows) -> Tensor:
    """The patches a kernel sees, a view of the padded source: ``[..., *L] -> [..., *out, *kernel]``."""
    lead = source.dim() - len(view.kernel)
    dims = list(zip(view.kernel, view.stride, view.padding, view.dilation, view.out, strict=True))
    around = [(dim[2], _missing(int(source.shape[lead + i]), *dim)) for i, dim in enumerate(dims)]
    source = _padded_all(source, lead, around)
    for at, (kernel, stride, _, dilation, out) in enumerate(dims, lead):
        source = source.unfold(at, (kernel - 1) * dilation + 1, stride).narrow(at, 0, out)[..., ::dilation]
    return source


def _missing(size: int, kernel: int, stride: int, padding: int, dilation: int, out: int) -> int:
    """How many zeros the last patch needs behind a source of ``size``."""
    return max(0, (out - 1) * stride + (kernel - 1) * dilation + 1 - size - padding)


def _padded_all(source: Tensor, lead: int, around: Sequence[tuple[int, int]]) -> Tensor:
    if not any(before or after for before, after in around):
        return source
    if not any(is_symbolic(size) for size in source.shape):
        return torch.constant_pad_nd(source, [side for pair in reversed(around) for side in pair])
    for at, (before, after) in enumerate(around, lead):
        source = _padded(source, at, before, after)
    return source


def _padded(source: Tensor, at: int, before: int, after: int) -> Tensor:
    """Zeros around dim ``at``, where ``constant_pad_nd`` would fix a symbolic batch."""
    sides = [source.new_zeros([*source.shape[:at], size, *source.shape[at + 1 :]]) for size in (before, after)]
    return torch.cat([sides[0], source, sides[1]], at) if before or after else source


def blocks(extent: Any, size: int) -> Iterator[tuple[int, Any]]:
    """``(start, size)`` of the parts of an axis, all of it in one where ``size`` is 0."""
    if not size or (isinstance(extent, int) and size >= extent):
        yield 0, extent
        return
    for start in range(0, extent, size):
        yield start, min(size, extent - start)
