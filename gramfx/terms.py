"""Terms: the gradient of the objectives by one use of a parameter, as an einsum over named axes.

    grad[rows, parameter axes] = sum over token axes of  factor * factor * ...

Axes are names: ``b`` the sample; ``k0``, ``k1`` the objectives of a sample, before and after it in row-major order;
``t…`` tokens, summed over; ``p…`` extents of the parameter. A use that one backward pass serves has rows ``k0 b k1``;
one upstream of a coupling op has one cotangent per objective, rows ``k0`` alone, and its batch is one of its tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gramfx.forms import OneHot, Windows

SAMPLE = "b"
#: The size of an axis that is symbolic: only the sample's can be.
SYMBOLIC = -1


@dataclass(frozen=True)
class Factor:
    """Tensor number ``tensor``, seen through ``view`` and reshaped to the extents of ``axes``."""

    tensor: int
    axes: tuple[str, ...]
    view: Windows | OneHot | None = None


@dataclass(frozen=True)
class Term:
    """One use's gradient. ``parameter`` spells the parameter's entries, row-major.

    ``sizes`` maps axes to extents. ``slices`` maps an axis of the parameter that covers a part of one only to
    ``(offset, whole extent)``. ``use`` names the use; ``fallback`` says why its rows
    come from a VJP and not from an einsum, where they do.
    """

    use: str
    rows: tuple[str, ...]
    factors: tuple[Factor, ...]
    parameter: tuple[str, ...]
    sizes: Mapping[str, int] = field(hash=False)
    slices: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    fallback: str = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Axes that are summed over, in order of first appearance."""
        kept = {*self.rows, *self.parameter}
        return tuple(dict.fromkeys(axis for factor in self.factors for axis in factor.axes if axis not in kept))

    def renamed(self, names: Mapping[str, str]) -> Term:
        """The same term with axes renamed."""

        def new(axes: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(names.get(axis, axis) for axis in axes)

        return dataclasses.replace(
            self,
            rows=new(self.rows),
            factors=tuple(dataclasses.replace(f, axes=new(f.axes)) for f in self.factors),
            parameter=new(self.parameter),
            sizes={names.get(axis, axis): size for axis, size in self.sizes.items()},
            slices={names.get(axis, axis): part for axis, part in self.slices.items()},
        )

    def __str__(self) -> str:
        read = ", ".join(" ".join(factor.axes) + _mark(factor.view) for factor in self.factors)
        return f"{read} -> ({' '.join(self.rows)}) ({' '.join(self.parameter)})"


def _mark(view: Windows | OneHot | None) -> str:
    return "" if view is None else f" [{'one-hot' if isinstance(view, OneHot) else 'windows'}]"


@dataclass(frozen=True)
class Recipe:
    """How the terms of one parameter are contracted.

    ``strategy``: ``outer`` makes each objective's gradient and then their products; ``pairwise`` multiplies factors
    with factors and never makes a gradient; ``sorted`` is ``outer`` for rows chosen by ids, on as many rows as there
    are ids; ``fused`` is ``pairwise`` as one op; empty before planning. ``chunk``: how much of ``axis``, an axis of the
    parameter, is made at a time, for ``pairwise`` how many tokens; ``samples``: of how many samples; 0 is all of them.
    ``parts``: how many blocks the samples are cut into when products are taken, those above the diagonal only.
    ``remake``: rows are made again for each block they meet, so that two blocks are alive at once. ``made``: rows that
    come from VJPs are made inside the contraction, of a few samples at a time. ``merge``: uses of one form are laid end
    to end first. ``batch``: the size a symbolic batch is planned at; ``balance``: how many multiply-adds the machine
    does while it writes one number.
    """

    strategy: str = ""
    axis: str = ""
    chunk: int = 0
    samples: int = 0
    parts: int = 1
    remake: bool = False
    merge: bool = True
    made: bool = False
    batch: int = 1
    balance: int = 64


@dataclass(frozen=True)
class ParameterTerms:
    """All terms of one parameter, and how to contract them: the value behind a ``gramfx::gramian`` node.

    ``shape`` is the parameter's. Without ``cross`` each use makes its own block.
    """

    parameter: str
    shape: tuple[int, ...]
    terms: tuple[Term, ...]
    cross: bool = True
    recipe: Recipe = Recipe()

    def anonymous(self) -> ParameterTerms:
        """Equal for parameters that differ in names alone."""
        terms = tuple(dataclasses.replace(term, use="", fallback="") for term in self.terms)
        return dataclasses.replace(self, parameter="", terms=terms)

    def to_json(self) -> str:
        """A string that :meth:`from_json` reads."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> ParameterTerms:
        """The inverse of :meth:`to_json`."""
        held = json.loads(text)
        terms = tuple(_read_term(term) for term in held.pop("terms"))
        recipe = Recipe(**held.pop("recipe"))
        return ParameterTerms(shape=tuple(held.pop("shape")), terms=terms, recipe=recipe, **held)


def _read_term(held: dict[str, Any]) -> Term:
    return Term(
        use=held["use"],
        rows=tuple(held["rows"]),
        factors=tuple(Factor(f["tensor"], tuple(f["axes"]), _read_view(f["view"])) for f in held["factors"]),
        parameter=tuple(held["parameter"]),
        sizes=held["sizes"],
        slices={axis: (part[0], part[1]) for axis, part in held["slices"].items()},
        fallback=held["fallback"],
    )


def _read_view(held: dict[str, Any] | None) -> Windows | OneHot | None:
    if held is None:
        return None
    return OneHot(**held) if "classes" in held else Windows(**{name: tuple(sizes) for name, sizes in held.items()})
