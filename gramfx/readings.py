"""What a capture takes for granted of tensors' values, and how its graph stops where one of them is another."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from gramfx.devices import cuda_devices
from gramfx.errors import CaptureMismatchError
from gramfx.graph import results


class ReadingChangedError(Exception):
    """A graph met another value than it was captured with. ``seen``: what was read until then, in order."""

    def __init__(self, seen: Sequence[Tensor]) -> None:
        super().__init__(f"reading {len(seen) - 1} is another than at the capture")
        self.seen = tuple(seen)


Seen = Sequence[Tensor]


class Reading:
    """A tensor that the model's Python code, or a shape, read, with its value at the capture.

    ``tests``: what became of comparisons, as functions of all that was read up to here, and how they came out. They are
    all that counts unless the value is ``exact``: a number that was used for anything but to be compared.
    """

    def __init__(self, value: Tensor, *, exact: bool = True) -> None:
        self.value, self.exact = value, exact
        self.tests: list[tuple[Callable[[Seen], bool], bool]] = []

    def holds(self, seen: Seen) -> bool:
        """Whether the model would do the same with the last of these values, after the others."""
        same = not self.exact or _same(seen[-1], self.value)
        try:
            return same and all(test(seen) == came_out for test, came_out in self.tests)
        except ArithmeticError:
            # The model computed this of other numbers, and would not get there with these.
            return False

    def settle(self, seen: Seen, tolerance: float) -> None:
        """Take the last value, as the lowered graph has it, which may round otherwise than the model.

        Raises :class:`CaptureMismatchError` where that is more than rounding.
        """
        value = seen[-1]
        if value.is_floating_point() and torch.allclose(value, self.value, tolerance, tolerance, equal_nan=True):
            self.value = value.clone()
        if not self.holds(seen):
            raise unsteady(str(self.value), str(value))


class Number:
    """A floating-point number that the model read, until it is used for more than arithmetic and comparisons.

    readings: all of the model's so far, the numbers that this one is made of in the places ``at``.
    """

    def __init__(
        self, readings: list[Reading], at: frozenset[int], value: float, made: Callable[[Seen], float]
    ) -> None:
        self.readings, self.at, self.value, self.made = readings, at, value, made

    def __float__(self) -> float:
        for index in self.at:
            self.readings[index].exact = True
        return self.value

    def __bool__(self) -> bool:
        return self.compared(operator.ne, 0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(float(self), name)

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __int__(self) -> int:
        return int(float(self))

    def __round__(self, digits: int | None = None) -> Any:
        return round(float(self), digits)

    def __hash__(self) -> int:
        return hash(float(self))

    def __format__(self, text: str) -> str:
        return format(float(self), text)

    def __repr__(self) -> str:
        return repr(float(self))

    def compared(self, compare: Callable[..., Any], *other: Any) -> Any:
        """The answer to a comparison, which calls that this capture serves must give too."""
        found = self.derived(compare, *other)
        if not isinstance(found, Number):
            return found
        # With the latest reading: what was read before decided that the model came to compare at all.
        self.readings[-1].tests.append((found.made, found.value))  # type: ignore[arg-type]
        return found.value

    def derived(self, compute: Callable[..., Any], *other: Any) -> Any:
        """A number made of this one and at most one other; plain where that is a tensor, say."""
        if any(type(one) not in (bool, int, float, Number) for one in other):
            return compute(float(self), *other)
        numbers = [self, *(one for one in other if isinstance(one, Number))]
        plain = [one.value if isinstance(one, Number) else one for one in other]

        def made(seen: Seen) -> Any:
            return compute(self.made(seen), *(one.made(seen) if isinstance(one, Number) else one for one in other))

        return Number(self.readings, frozenset().union(*(one.at for one in numbers)), compute(self.value, *plain), made)


def _comparison(compare: Callable[..., Any]) -> Any:
    return lambda self, other: self.compared(compare, other)


def _arithmetic(compute: Callable[..., Any]) -> Any:
    return lambda self, *other: self.derived(compute, *other)


def _reflected(compute: Callable[..., Any]) -> Any:
    return lambda self, other: self.derived(lambda mine, others: compute(others, mine), other)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("neg", "pos", "abs", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__r{_name}__", _reflected(getattr(operator, _name)))


def unsteady(expected: str | None = None, got: str | None = None) -> CaptureMismatchError:
    """The error where a graph reads other values than the model, on the same call."""
    return CaptureMismatchError(
        "what the model reads cannot be read again",
        expected=expected,
        got=got,
        remedy="look for kernels that are not deterministic, and for comparisons of numbers that differ by rounding",
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit the same numbers, NaN equal to NaN."""
    if a.shape != b.shape or not bool(((a == b) | ((a != a) & (b != b))).all()):
        return False
    return not a.is_floating_point() or torch.equal(a.signbit(), b.signbit())


def may_fit(readings: Sequence[Reading], seen: Sequence[Tensor]) -> bool:
    """Whether a capture with these readings may serve a call of which so much was read already.

    Captures of one program that agree so far ran the same so far, and so their next reading is that of the same tensor.
    """
    known = min(len(readings), len(seen))
    return all(readings[index].holds(seen[: index + 1]) for index in range(known))


class _Check(nn.Module):
    def __init__(self, reading: Reading, seen: list[Tensor]) -> None:
        super().__init__()
        self.reading, self.seen = reading, seen

    def forward(self, value: Tensor) -> Tensor:
        self.seen.append(value)
        if not self.reading.holds(self.seen):
            raise ReadingChangedError(self.seen)
        return value


class Checked:
    """A lowered graph that compares each reading as soon as it is made, before anything runs that relies on it.

    Its readings, which the lowered graph returns after objectives and Gramian, are not returned.
    """

    def __init__(self, lowered: GraphModule, readings: Sequence[Reading]) -> None:
        self.seen: list[Tensor] = []
        checks = nn.Module()
        graph, made = Graph(), dict[Node, Node]()
        graph.graph_copy(lowered.graph, made)
        objectives, gramian, *rest = results(lowered)
        count = len(readings)
        for number, (node, reading) in enumerate(zip(rest[:count], readings, strict=True)):
            checks.add_module(f"reading{number}", _Check(reading, self.seen))
            with graph.inserting_after(made[node]):
                graph.call_module(f"reading{number}", (made[node],))
        graph.output(tuple(made[node] for node in (objectives, gramian, *rest[count:])))
        self.graph_module = GraphModule(checks, graph)

    def __call__(self, *tensors: Tensor) -> Any:
        """What the lowered graph returns, without readings. Raises :class:`ReadingChangedError`."""
        self.seen.clear()
        try:
            return self.graph_module(*tensors)
        finally:
            self.seen.clear()


@contextlib.contextmanager
def draws_taken_back(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put the random state back as it was where a reading was another."""
    devices = cuda_devices(tensors)
    before = torch.get_rng_state()
    each = {device: torch.cuda.get_rng_state(device) for device in devices}
    try:
        yield
    except ReadingChangedError:
        torch.set_rng_state(before)
        for device, state in each.items():
            torch.cuda.set_rng_state(state, device)
        raise
