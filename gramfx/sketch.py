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
    product's three extents, which says how many of them run slowly for being narrow.
    ``moved`` counts bytes read and written, ``spilled`` those of steps that touch more than ``cache``. ``batch`` is
    what a symbolic batch counts as, ``at`` its value where numbers must be compared.
    """

    batch: Any
    at: int
    cache: int

    events: list[Event] = field(default_factory=list)
    flops: Counter[torch.dtype] = field(default_factory=Counter)
    narrow: Counter[torch.dtype] = field(default_factory=Counter)
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
        touched = nbytes + sum(read.nbytes for read in reads)
        self.moved += self.weight * touched
        if number(touched, self.at) > self.cache:
            self.spilled += self.weight * touched
        self.launches += self.weight
        return made

    def loop(self, parts: Iterable[Any]) -> Iterator[Any]:
        """One part of each kind, weighed by how many there are."""
        parts = list(parts)
        count = Counter(map(_kind, parts))
        seen = set()
        for part in parts:
            kind = _kind(part)
            if kind not in seen:
                seen.add(kind)
                self.weight *= count[kind]
                yield part
                self.weight //= count[kind]

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
    """Sizes with names: the array that records what it costs."""

    tape: Tape
    axes: Axes
    sizes: tuple[Any, ...]
    dtype: torch.dtype
    value: int
    scattered: bool = False

    @property
    def nbytes(self) -> Any:
        """Of its numbers, each counted once though they overlap in memory."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def _view(self, axes: Iterable[str], sizes: Iterable[Any], **changed: Any) -> Sketch:
        return dataclasses.replace(self, axes=tuple(axes), sizes=tuple(sizes), **changed)

    def _made(
        self, axes: Iterable[str], sizes: Iterable[Any], *reads: Sketch, dtype: torch.dtype | None = None
    ) -> Sketch:
        new = self._view(axes, sizes, dtype=dtype or self.dtype, scattered=False)
        return dataclasses.replace(new, value=self.tape.write(new.nbytes, *reads))

    def again(self, *reads: Sketch) -> Sketch:
        """New numbers of the same sizes, made from ``reads``."""
        return self._made(self.axes, self.sizes, *reads)

    def size(self, axis: str) -> Any:  # noqa: D102
        return self.sizes[self.axes.index(axis)]

    def shaped(self, axes: Axes, sizes: Mapping[str, int]) -> Sketch:  # noqa: D102
        if len(axes) == len(self.axes):
            return self._view(axes, self.sizes)
        return self._view(axes, (self.tape.batch if sizes[axis] == SYMBOLIC else sizes[axis] for axis in axes))

    def renamed(self, names: Mapping[str, str]) -> Sketch:  # noqa: D102
        return self._view((names.get(axis, axis) for axis in self.axes), self.sizes)

    def cut(self, axis: str, start: int, size: Any) -> Sketch:  # noqa: D102
        return self._view(self.axes, (size if a == axis else s for a, s in zip(self.axes, self.sizes, strict=True)))

    def windows(self, view: Windows, axes: Axes) -> Sketch:  # noqa: D102
        count = len(view.kernel)
        lead = self.sizes[: len(self.sizes) - count]
        padded = self
        if any(view.padding):
            around = (s + 2 * p for s, p in zip(self.sizes[-count:], view.padding, strict=True))
            padded = self._made(self.axes, (*lead, *around), self)
        return padded._view(axes, (*lead, *view.out, *view.kernel), scattered=True)

    def _gathered(self) -> Sketch:
        """As a matrix product wants it: patches overlap in memory and are copied."""
        return self._made(self.axes, self.sizes, self) if self.scattered else self

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
        made = self._view(axes, sizes)
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
            mine, theirs = mine._gathered(), theirs._gathered()
            mine._multiply(theirs, out)
        return mine._made(out, (sizes[axis] for axis in out), mine, theirs)

    def _multiply(self, other: Sketch, out: Axes) -> None:
        """Record a matrix product."""
        shared = [axis for axis in self.axes if axis in other.axes]
        each = math.prod(self.size(axis) for axis in shared if axis in out)
        extents = [math.prod(self.size(axis) for axis in shared if axis not in out)]
        extents += [math.prod(one.size(axis) for axis in one.axes if axis not in shared) for one in (self, other)]
        *rest, least = sorted(extents, key=lambda extent: -number(extent, self.tape.at))
        narrow = self.tape.weight * 2 * each * math.prod(rest)
        self.tape.narrow[self.dtype] += narrow
        self.tape.flops[self.dtype] += narrow * least

    def _alone_summed(self, other: Sketch, out: Axes) -> Sketch:
        return self.reduced(tuple(axis for axis in self.axes if axis in other.axes or axis in out))

    def reduced(self, out: Axes) -> Sketch:  # noqa: D102
        sizes = tuple(self.size(axis) for axis in out)
        return self._view(out, sizes) if set(out) == set(self.axes) else self._made(out, sizes, self)

    def folded(self, axes: Axes, name: str) -> Sketch:  # noqa: D102
        at = self.axes.index(axes[0]) if axes else len(self.axes)
        size = math.prod(self.sizes[at : at + len(axes)])
        rest = at + len(axes)
        return self._view((*self.axes[:at], name, *self.axes[rest:]), (*self.sizes[:at], size, *self.sizes[rest:]))

    def joined(self, others: Sequence[Sketch], axis: str) -> Sketch:  # noqa: D102
        if not others:
            return self
        whole = self.size(axis) + sum(other.size(axis) for other in others)
        return self._made(self.axes, (whole if a == axis else self.size(a) for a in self.axes), self, *others)

    def plus(self, other: Sketch) -> Sketch:  # noqa: D102
        return self._made(self.axes, self.sizes, self, other)

    def padded(self, axis: str, before: int, after: int) -> Sketch:  # noqa: D102
        if not before and not after:
            return self
        return self._made(self.axes, (self.size(a) + (a == axis) * (before + after) for a in self.axes), self)
