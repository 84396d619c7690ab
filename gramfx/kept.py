"""The captures that a step keeps."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from gramfx.errors import RecaptureWarning
from gramfx.program import Program
from gramfx.runtime import Compiled
from gramfx.source import warn_user

#: A compiled capture, the program whose tensors it runs on, and what its key keeps alive.
Made = tuple[Compiled, Program, list[Any]]

#: How many captures a step keeps, and after how many it says that there are many.
MOST_CAPTURES, MANY_CAPTURES = 64, 16
#: Of how many kinds of calls a step knows whether their batch size changes.
MOST_FAMILIES = 1024


class Families:
    """Calls that differ in batch size alone: the size that came first, or ``None`` where a graph is of one size only.

    Of the kinds seen last; a kind that comes back after many others is new.
    """

    def __init__(self) -> None:
        self._first: dict[Hashable, int | None] = {}

    def first(self, family: Hashable, size: int) -> int | None:
        """The size that was seen first, ``size`` where this is the first."""
        return self._kept(family, self._first.get(family, size))

    def fix(self, family: Hashable) -> None:
        """One graph a size from now on."""
        self._kept(family, None)

    def _kept(self, family: Hashable, size: int | None) -> int | None:
        self._first.pop(family, None)
        self._first[family] = size
        if len(self._first) > MOST_FAMILIES:
            del self._first[next(iter(self._first))]
        return size


class Captures:
    """Captures by key, those used last in the end: several where the model reads values, one a reading.

    Each is a list, of the same capture with plans for several batch sizes.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, list[list[Made]]] = {}
        self._many, self._passing = False, 0

    def __len__(self) -> int:
        return sum(map(len, self._made.values()))

    def under(self, key: Hashable) -> Iterator[list[Made]]:
        """What was captured under a key, that which was used last first; what is taken last is the latest used."""
        if key in self._made:
            made = self._made[key] = self._made.pop(key)
            for one in reversed(list(made)):
                made.append(made.pop(next(at for at, other in enumerate(made) if other is one)))
                yield one

    def add(self, key: Hashable, made: list[Made]) -> None:
        """Keep a capture that lasts, and no more than ``MOST_CAPTURES``: those used last."""
        if made[0][0].captured.lasting:
            self._made[key] = [*self._made.pop(key, []), made]
        else:
            self._passing += 1
        if len(self) + self._passing >= MANY_CAPTURES and not self._many:
            self._many = True
            warn_user(
                RecaptureWarning(
                    f"{MANY_CAPTURES} graphs were captured, one for each shape of the inputs, each state of the model "
                    "and all values that it reads; pad inputs to few shapes, keep out of the model what changes from "
                    "call to call, and use torch.where and masks instead of .item() and nonzero()"
                )
            )
        if len(self) > MOST_CAPTURES:
            oldest = next(iter(self._made))
            del self._made[oldest][0]
            if not self._made[oldest]:
                del self._made[oldest]
