"""What contracting a parameter's terms costs: numbers at one batch size, or polynomials in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy
import torch
from sympy.polys.rings import PolyElement
from torch.fx import Node, map_arg

from gramfx.arrays import Made
from gramfx.emit import gramian_array
from gramfx.graph import value
from gramfx.machine import Machine
from gramfx.memory import touched
from gramfx.sketch import BATCH, Sketch, Tape, evaluated, number, polynomial
from gramfx.terms import ParameterTerms
from gramfx.torch_compat import product_flops


@dataclass(frozen=True)
class Making:
    """What it takes to make all rows of the Jacobian, of ``samples`` samples.

    ``flops``; ``scratch``: bytes alive besides the rows; ``touched``: the bytes that each operation reads and writes.
    """

    samples: int
    flops: int
    scratch: int
    touched: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Sizes and dtype of a tensor that factors point at; ``making`` where it is not there until it is asked for."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    making: Making | None = None

    def at(self, batch: int) -> Source:
        """With numbers for sizes."""
        return dataclasses.replace(self, shape=tuple(number(size, batch) for size in self.shape))

    def sketched(self, tape: Tape) -> Sketch | Made:
        """As an operand of a contraction."""
        axes = tuple(map(str, range(len(self.shape))))
        if self.making is None:
            return Sketch(tape, axes, self.shape, self.dtype, tape.source())
        making = self.making

        def rows(part: tuple[int, Any] | None) -> Sketch:
            share = 1 if part is None else part[1] / making.samples
            tape.flops[self.dtype] += tape.weight * round(share * making.flops)
            for nbytes in making.touched:
                tape.touch(round(share * nbytes))
            scratch = Sketch(tape, ("bytes",), (round(share * making.scratch),), torch.uint8, tape.source())
            scratch = scratch.again()
            made = Sketch(tape, axes, (round(share * self.shape[0]), *self.shape[1:]), self.dtype, tape.source())
            return made.again(scratch)

        return Made(rows)

    @staticmethod
    def of(node: Node) -> Source:
        """Of a node's value."""
        tensor = value(node)
        return Source(tuple(polynomial(size) for size in tensor.shape), tensor.dtype)


@dataclass(frozen=True)
class Cost:
    """What a contraction takes, as numbers or as polynomials in the batch size.

    ``flops`` of matrix products, two a multiply-add, by dtype; ``narrow``, the same over the least extent of each
    product; ``fused``, those of fused ops; bytes ``moved``, of them ``spilled`` those that no cache holds; ``launches``
    of operations; ``peak`` bytes alive at once besides the sources.
    """

    flops: Mapping[torch.dtype, Any]
    narrow: Mapping[torch.dtype, Any]
    fused: Mapping[torch.dtype, Any]
    moved: Any
    spilled: Any
    launches: int
    peak: Any

    @property
    def all_flops(self) -> Any:
        """In whatever dtype."""
        return sum(self.flops.values())

    def _parts(self, machine: Machine) -> list[tuple[Any, float]]:
        """Amounts, and how much of each a second takes; none overlaps another."""
        parts = [(count, machine.rate(dtype)) for dtype, count in self.flops.items()]
        # A product with an extent n runs at n / (n + half) of the full rate: half more in flops over n.
        parts += [(count * machine.half, machine.rate(dtype)) for dtype, count in self.narrow.items()]
        # Fused ops run at about half the rate of a library's products, so that theirs count twice.
        parts += [(count, machine.rate(dtype)) for dtype, count in self.fused.items()]
        parts += [(self.spilled, machine.bandwidth), (self.moved - self.spilled, machine.cached_bandwidth)]
        return [*parts, (self.launches, 1 / machine.latency)]

    def seconds(self, machine: Machine) -> float:
        """The time at one batch size."""
        return float(sum(amount / rate for amount, rate in self._parts(machine)))

    def time(self, machine: Machine) -> sympy.Poly:
        """The seconds as a polynomial in the batch size, exact in the machine's own numbers."""
        parts = self._parts(machine)
        total = sum(expression(amount) / sympy.Rational(Fraction(rate)) for amount, rate in parts)
        return sympy.Poly(total, BATCH.as_expr(), domain="QQ")


def cost_of(
    terms: ParameterTerms, sources: Sequence[Source], dtype: torch.dtype, cache: int, batch: int | None = None
) -> Cost:
    """The cost of a planned contraction: at batch size ``batch``, or as polynomials where that is ``None``.

    cache: how many bytes stay close at hand; as polynomials, what fits is decided at the planned batch size.
    """
    at = terms.recipe.batch if batch is None else batch
    if batch is not None:
        sources = [source.at(batch) for source in sources]
    tape = Tape(BATCH if batch is None else batch, at, cache)
    made = gramian_array(terms, [source.sketched(tape) for source in sources], dtype, tape.loop)
    flops, narrow, fused = dict(tape.flops), dict(tape.narrow), dict(tape.fused)
    return Cost(flops, narrow, fused, tape.moved, tape.spilled, tape.launches, tape.peak(made))


def flops_of(nodes: Iterable[Node], batch: int) -> int:
    """Of matrix products and convolutions, two a multiply-add, as torch counts them; a symbolic batch at ``batch``."""
    total = 0
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = map_arg((node.args, node.kwargs), value)
            total += evaluated(product_flops(node.target, args, kwargs, node.meta.get("val")), batch)
    return total


def seconds_of(nodes: Iterable[Node], batch: int, machine: Machine) -> float:
    """The predicted time of a graph's calls run one by one, a symbolic batch at ``batch``."""
    total = 0.0
    for node in nodes:
        nbytes = touched(node, batch) if isinstance(node.target, torch._ops.OpOverload) else 0
        if nbytes:
            bandwidth = machine.bandwidth if nbytes > machine.cache else machine.cached_bandwidth
            rate = machine.flops["float64" if _is_double(value(node)) else "float32"]
            total += nbytes / bandwidth + machine.latency + flops_of([node], batch) / rate
    return total


def _is_double(held: Any) -> bool:
    return isinstance(held, torch.Tensor) and held.dtype == torch.float64


def expression(size: Any) -> sympy.Expr:
    """A size as sympy prints it."""
    return size.as_expr() if isinstance(size, PolyElement) else sympy.Integer(size)


def symbolic(sources: Sequence[Source]) -> bool:
    """Whether some size is not a number."""
    return any(not isinstance(size, int) for source in sources for size in source.shape)
