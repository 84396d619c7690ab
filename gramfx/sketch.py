"""Arrays of sizes alone: running a contraction on them says what it costs.

Sizes are integers, or polynomials in the batch size ``B`` (elements of sympy's ring of integer polynomials), and so are
the costs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sympy.polys.domains import ZZ
from sympy.polys.rings import ring

from gramfx.arrays import Axes
from gramfx.forms import Windows
from gramfx.pairwise import PRECISE, flops_of_pairs
from gramfx.pairwise_tiles import ALIGNED, partial_bytes, tiling_of
from gramfx.terms import SYMBOLIC
from gramfx.torch_compat import is_symbolic

#: The batch size as a polynomial.
BATCH: Any = ring("B", ZZ)[1]


@dataclass(frozen=True)
class Event:
    """One step that writes: the values it reads and the value it makes, ``nbytes`` large."""

    reads: tuple[int, ...]
    made: int
    nbytes: Any


@dataclass
class Tape:
    """What a contraction did.

    ``flops`` counts those of matrix products, two a multiply-add, by dtype; ``narrow`` the same over the least of each
    product's three extents, which says how many of them run slowly for being narrow; ``fused`` those of fused ops.
    ``moved`` counts bytes read and written, ``spilled`` those of steps that touch more than ``cache``. ``batch`` is
    what a symbolic batch counts as, ``at`` its value where numbers must be compared.
    """

    batch: Any
    at: int
    cache: int

    events: list[Event] = field(default_factory=list)
    flops: Counter[torch.dtype] = field(default_factory=Counter)
    narrow: Counter[torch.dtype] = field(default_factory=Counter)
    fused: Counter[torch.dtype] = field(default_factory=Counter)
    moved: Any = 0
    launches: int = 0
    weight: int = 1
    spilled: Any = 0
    _count: int = 0

    def source(self) -> int:
        """The number of a value that was there before."""
        self._count += 1
        return self._count

    def write(self, nbytes: Any, *reads: Sketch) -> int:
        """Record one step; the number of what it made."""
        made = self.source()
        self.events.append(Event(tuple(read.value for read in reads), made, nbytes))
        self.touch(nbytes + sum(read.nbytes for read in reads))
        return made

    def touch(self, nbytes: Any) -> None:
        """Count one operation that reads and writes so many bytes."""
        self.moved += self.weight * nbytes
        if number(nbytes, self.at) > self.cache:
            self.spilled += self.weight * nbytes
        self.launches += self.weight

    def loop(self, parts: Iterable[Any]) -> Iterator[Any]:
        """The first part of each kind, and a second one weighed by how many there are: the first adds to nothing."""
        parts = list(parts)
        count = Counter(map(_kind, parts))
        seen: Counter[Any] = Counter()
        for part in parts:
            kind = _kind(part)
            seen[kind] += 1
            if seen[kind] <= 2:
                times = 1 if seen[kind] == 1 else count[kind] - 1
                self.weight *= times
                yield part
                self.weight //= times

    def peak(self, kept: Sketch) -> Any:
        """The most bytes alive at once, sources excepted, ``kept`` alive at the end."""
        last = {kept.value: len(self.events)}
        for step, event in enumerate(self.events):
            last |= {read: step for read in event.reads if last.get(read, -1) < step}
        alive = peak = 0
        sizes: dict[int, Any] = {}
        for step, event in enumerate(self.events):
            sizes[event.made] = event.nbytes
            alive += event.nbytes
            peak = max(peak, alive, key=lambda size: number(size, self.at))
            for value in {event.made, *event.reads}:
                if last.get(value, step) == step:
                    alive -= sizes.pop(value, 0)
        return peak


def number(size: Any, at: int) -> int:
    """A polynomial's value at batch size ``at``; a number as it is."""
    return size if isinstance(size, int) else int(size(at))


def evaluated(size: int | torch.SymInt, batch: int) -> int:
    """A traced size, of at most one symbol, at batch size ``batch``."""
    return _evaluated(size.node.expr, batch) if is_symbolic(size) else int(size)  # type: ignore[union-attr]


@functools.lru_cache(4096)
def _evaluated(expression: Any, batch: int) -> int:
    return int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))


def polynomial(size: int | torch.SymInt) -> Any:
    """A traced size, of at most one symbol, as a polynomial in ``B``; a number as it is."""
    if not is_symbolic(size):
        return int(size)
    expression = size.node.expr  # type: ignore[union-attr]
    (symbol,) = expression.free_symbols
    return BATCH.ring.from_expr(expression.subs(symbol, BATCH.as_expr()))


def _kind(part: Any) -> Any:
    left, right = part
    if isinstance(left, tuple):
        return left[1], right[1], left == right
    return right


@dataclass(frozen=True)
class Sketch:
    """Sizes with names: the array that records what it costs.

    ``order``: the axes as they lie in memory; ``parted``: those of which it is a part; ``scattered``: numbers overlap.
    """

    tape: Tape
    axes: Axes
    sizes: tuple[Any, ...]
    dtype: torch.dtype
    value: int
    order: Axes = ()
    parted: frozenset[str] = frozenset()
    scattered: bool = False

    def __post_init__(self) -> None:
        if not self.order:
            object.__setattr__(self, "order", self.axes)

    @property
    def nbytes(self) -> Any:
        """Of its numbers, each counted once though they overlap in memory."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def _view(self, axes: Iterable[str], sizes: Iterable[Any], **changed: Any) -> Sketch:
        return dataclasses.replace(self, axes=tuple(axes), sizes=tuple(sizes), **changed)

    def _made(
        self, axes: Iterable[str], sizes: Iterable[Any], *reads: Sketch, dtype: torch.dtype | None = None
    ) -> Sketch:
        fresh = {"scattered": False, "order": (), "parted": frozenset()}
        new = self._view(axes, sizes, dtype=dtype or self.dtype, **fresh)
        return dataclasses.replace(new, value=self.tape.write(new.nbytes, *reads))

    def again(self, *reads: Sketch) -> Sketch:
        """New numbers of the same sizes, made from ``reads``."""
        return self._made(self.axes, self.sizes, *reads)

    def size(self, axis: str) -> Any:  # noqa: D102
        return self.sizes[self.axes.index(axis)]

    def shaped(self, axes: Axes, sizes: Mapping[str, int]) -> Sketch:  # noqa: D102
        if len(axes) == len(self.axes):
            return self.renamed(dict(zip(self.axes, axes, strict=True)))
        return self._view(
            axes, (self.tape.batch if sizes[axis] == SYMBOLIC else sizes[axis] for axis in axes), order=()
        )

    def renamed(self, names: Mapping[str, str]) -> Sketch:  # noqa: D102
        new = {axis: names.get(axis, axis) for axis in self.axes}
        parted = frozenset(new[axis] for axis in self.parted)
        return self._view(new.values(), self.sizes, order=tuple(new[axis] for axis in self.order), parted=parted)

    def cut(self, axis: str, start: int, size: Any) -> Sketch:  # noqa: D102
        sizes = (size if a == axis else s for a, s in zip(self.axes, self.sizes, strict=True))
        return self._view(self.axes, sizes, parted=self.parted | ({axis} if size != self.size(axis) else set()))

    def windows(self, view: Windows, axes: Axes) -> Sketch:  # noqa: D102
        count = len(view.kernel)
        lead = self.sizes[: len(self.sizes) - count]
        padded = self
        if any(view.padding):
            around = (s + 2 * p for s, p in zip(self.sizes[-count:], view.padding, strict=True))
            padded = self._made(self.axes, (*lead, *around), self)
        return padded._view(axes, (*lead, *view.out, *view.kernel), scattered=True, order=())

    def _folds(self, *groups: Axes) -> Sketch:
        """With each of ``groups`` fit to be one dim: copied where they do not follow each other in memory."""
        for group in groups:
            start = self.order.index(group[0]) if group else 0
            together = self.order[start : start + len(group)] == group and not self.parted.intersection(group[1:])
            if len(group) > 1 and (self.scattered or not together):
                return self._made(self.axes, self.sizes, self)
        return self

    def cast(self, dtype: torch.dtype) -> Sketch:  # noqa: D102
        return self if dtype == self.dtype else self._made(self.axes, self.sizes, self, dtype=dtype)

    def differs(self, number: int) -> Sketch:  # noqa: D102
        return self._made(self.axes, self.sizes, self, dtype=torch.bool)

    def equals(self, other: Sketch) -> Sketch:  # noqa: D102
        return self._made(self.axes + other.axes, self.sizes + other.sizes, self, other, dtype=torch.bool)

    def take(self, axis: str, ids: Sketch) -> Sketch:  # noqa: D102
        at = self.axes.index(axis)
        axes = (*self.axes[:at], *ids.axes, *self.axes[at + 1 :])
        sizes = (*self.sizes[:at], *ids.sizes, *self.sizes[at + 1 :])
        made = self._view(axes, sizes, order=(), parted=frozenset())
        return dataclasses.replace(made, value=self.tape.write(made.nbytes, ids))

    def scatter(self, axis: str, ids: Sketch, kept: Axes, part: tuple[int, Any], whole: Any) -> Sketch:  # noqa: D102
        size = part[1]
        lead = tuple(name for name in ids.axes if name in kept)
        rest = tuple(name for name in self.axes if name not in ids.axes)
        source = self if size == whole else self._made(self.axes, self.sizes, self)
        places = ids._made(ids.axes, ids.sizes, ids)
        axes = (*lead, axis, *rest)
        sizes = (*(ids.size(name) for name in lead), size, *(self.size(name) for name in rest))
        zeros = self._made(axes, sizes)
        return self._made(axes, sizes, source, places, zeros)

    def ranks(self) -> Sketch:  # noqa: D102
        ordered = self._made(self.axes, self.sizes, self)
        fresh = self._made(self.axes, self.sizes, ordered)
        return self._made(self.axes, self.sizes, ordered, fresh)

    def contract(self, other: Sketch, out: Axes) -> Sketch:  # noqa: D102
        mine, theirs = self._alone_summed(other, out), other._alone_summed(self, out)
        sizes = {**dict(zip(mine.axes, mine.sizes, strict=True)), **dict(zip(theirs.axes, theirs.sizes, strict=True))}
        if set(mine.axes) == set(theirs.axes):
            return mine._made(mine.axes, mine.sizes, mine, theirs).reduced(out)
        if any(axis not in out for axis in sizes):
            return mine._multiply(theirs, out)
        return mine._made(sizes, sizes.values(), mine, theirs).reduced(out)

    def _multiply(self, other: Sketch, out: Axes) -> Sketch:
        """Record a matrix product."""
        shared = tuple(axis for axis in self.axes if axis in other.axes)
        each, summed = (tuple(axis for axis in shared if (axis in out) == kept) for kept in (True, False))
        left, right = (tuple(axis for axis in one.axes if axis not in shared) for one in (self, other))
        mine, theirs = self._folds(each, left, summed), other._folds(each, right, summed)
        extents = [mine._count(summed), mine._count(left), theirs._count(right)]
        *rest, least = sorted(extents, key=lambda extent: -number(extent, self.tape.at))
        narrow = self.tape.weight * 2 * mine._count(each) * math.prod(rest)
        self.tape.narrow[self.dtype] += narrow
        self.tape.flops[self.dtype] += narrow * least
        sizes = (*map(mine.size, (*each, *left)), *map(theirs.size, right))
        return mine._made((*each, *left, *right), sizes, mine, theirs).reduced(out)

    def _count(self, axes: Axes) -> Any:
        return math.prod(map(self.size, axes))

    def _alone_summed(self, other: Sketch, out: Axes) -> Sketch:
        return self.reduced(tuple(axis for axis in self.axes if axis in other.axes or axis in out))

    def reduced(self, out: Axes) -> Sketch:  # noqa: D102
        sizes = tuple(self.size(axis) for axis in out)
        return self._view(out, sizes) if set(out) == set(self.axes) else self._made(out, sizes, self)

    def folded(self, axes: Axes, name: str) -> Sketch:  # noqa: D102
        flat = self._folds(axes)
        at = flat.axes.index(axes[0]) if axes else len(flat.axes)
        rest = at + len(axes)
        spelled = (*flat.axes[:at], name, *flat.axes[rest:])
        place = flat.order.index(axes[0]) if axes else len(flat.order)
        order = (*flat.order[:place], name, *flat.order[place + len(axes) :])
        parted = flat.parted - set(axes) | ({name} if flat.parted.intersection(axes) else set())
        sizes = (*flat.sizes[:at], flat._count(axes), *flat.sizes[rest:])
        return flat._view(spelled, sizes, order=order, parted=parted)

    def joined(self, others: Sequence[Sketch], axis: str) -> Sketch:  # noqa: D102
        if not others:
            return self
        whole = self.size(axis) + sum(other.size(axis) for other in others)
        return self._made(self.axes, (whole if a == axis else self.size(a) for a in self.axes), self, *others)

    def plus(self, other: Sketch) -> Sketch:  # noqa: D102
        return self._made(self.axes, self.sizes, self, other)

    def pairwise_gram(self, cot: Sketch, ignored: int) -> Sketch:  # noqa: D102
        count, width = cot.sizes[0] * cot.sizes[1], cot.sizes[2]
        width += self.sizes[2] if self.dtype.is_floating_point else 0
        return self._tiled((self, cot), flops_of_pairs(count, width))

    def pairwise_gathered(self, left: Sketch, head: Sketch, right: Sketch, gram: Sketch, ignored: int) -> Sketch:  # noqa: D102
        pairs = left.sizes[0] * left.sizes[1] * right.sizes[0] * right.sizes[1]
        by_id = head._made(head.axes, head.sizes, head)
        return self._tiled((self, left, by_id, right), 2 * pairs * left.sizes[2], halves=2).again()

    def _tiled(self, reads: Sequence[Sketch], flops: Any, halves: int = 1) -> Sketch:
        """Record one fused op: its copies of rows that are not aligned, what tiles leave to fold, and the result."""
        dtype = functools.reduce(torch.promote_types, (one.dtype for one in reads if one.dtype.is_floating_point))
        self.tape.flops[dtype] += self.tape.weight * flops
        self.tape.fused[dtype] += self.tape.weight * flops
        rows = tiling_of(dtype, PRECISE, self.sizes[1]).rows
        copied = [one._aligned().cast(dtype) if one.dtype.is_floating_point else one for one in reads]
        nbytes = halves * partial_bytes(self.sizes[0], self.sizes[1], rows)
        partial = self._made(("bytes",), (nbytes,), *copied, dtype=torch.uint8)
        axes, sizes = (self.axes[0], f"{self.axes[0]}'"), (self.sizes[0], self.sizes[0])
        terms = self._made(axes, sizes, partial, dtype=torch.float32)
        return terms.again(terms)

    def _aligned(self) -> Sketch:
        missing = -self.sizes[-1] % ALIGNED
        return self.padded(self.axes[-1], 0, missing) if len(self.sizes) == 3 else self

    def padded(self, axis: str, before: int, after: int) -> Sketch:  # noqa: D102
        if not before and not after:
            return self
        return self._made(self.axes, (self.size(a) + (a == axis) * (before + after) for a in self.axes), self)
