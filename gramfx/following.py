"""Capture by following one call: a trace that reads the tensors of that call, and writes down what it read.

For models whose control flow or shapes depend on tensor values. Beside every fake tensor of the trace runs the real
one. What Python reads of it is a number, and the tensor it was read from is an output of the graph, so that later calls
can be held against it; an op with an output of unknown size becomes one of the size that it has here.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gramfx.captured import Captured
from gramfx.errors import DataDependentError
from gramfx.program import Call, Program
from gramfx.readings import Number, Reading
from gramfx.sized import SIZED, unknown
from gramfx.source import user_frame
from gramfx.torch_compat import (
    READS_VALUES,
    DispatchMode,
    FakeTensor,
    WeakTensorKeyDictionary,
    lists_replaced,
    pytree,
    undispatched,
)
from gramfx.tracing import traced


def by_comparisons(program: Program, call: Call, dynamic: bool) -> Captured:
    """Capture for this call, and for others whose numbers compare as its own do. Raises whatever torch raises."""
    return _followed(program, call, Follower(exact=False))


def by_values(program: Program, call: Call, dynamic: bool) -> Captured:
    """The same with numbers that are numbers, for models that do more with them than torch and Python operators do."""
    return _followed(program, call, Follower(exact=True))


def _followed(program: Program, call: Call, follower: Follower) -> Captured:
    captured = traced(program, call, False, follower)
    captured.readings = follower.readings
    return captured


class Follower(DispatchMode):
    """Runs each op on the real tensors too, below autograd, and lets nothing of unknown size through."""

    def __init__(self, *, exact: bool) -> None:
        super().__init__()
        self.exact = exact
        self.real: Any = WeakTensorKeyDictionary()
        self.readings: list[Reading] = []
        #: The tensors that were read, as outputs of the graph.
        self.read_from: list[Tensor] = []

    @contextlib.contextmanager
    def along(self, fakes: Sequence[Tensor], reals: Sequence[Tensor]) -> Iterator[None]:
        """Follow what is run inside, from fake tensors that stand for copies of real ones."""
        with undispatched():
            copies = {id(real): real.detach().clone() for real in reals}
        for fake, real in zip(fakes, reals, strict=True):
            self.real[fake] = copies[id(real)]
        with lists_replaced(self.listed), self, _Reads(self):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(one, FakeTensor) or one in (Tensor, torch.nn.Parameter) for one in types):
            return NotImplemented
        if func in SIZED:
            with self:
                made = SIZED[func](self.number, func, *args, **kwargs)
            if made is not None:
                return made
        elif READS_VALUES.intersection(func.tags):
            raise unknown(func)
        result = func(*args, **kwargs)
        self._run_beside(func, args, kwargs, result)
        return result

    def _run_beside(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        held = pytree.tree_map(self.value_of, (args, kwargs))
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(held)):
            return
        with undispatched():
            found = func(*held[0], **held[1])
        for fake, real in zip(pytree.tree_leaves(result), pytree.tree_leaves(found), strict=True):
            if isinstance(fake, FakeTensor):
                self.real[fake] = real

    def value_of(self, leaf: Any) -> Any:
        """The real tensor beside a fake one."""
        return self.real.get(leaf, leaf) if isinstance(leaf, FakeTensor) else leaf

    def noted(self, tensor: Tensor) -> Tensor:
        """The real value of a tensor, which the graph returns from now on."""
        real = self.value_of(tensor)
        if isinstance(real, FakeTensor):
            raise DataDependentError(
                "the model reads a tensor whose value is not known where it is captured",
                where=user_frame(traceback.extract_stack()),
                remedy="read tensors that are computed by torch operations from the inputs",
            )
        self.read_from.append(tensor.clone())
        with undispatched():
            self.readings.append(Reading(real.detach().clone()))
        return self.readings[-1].value

    def number(self, tensor: Tensor) -> Any:
        """What ``tensor.item()`` is."""
        value = self.noted(tensor)
        with undispatched():
            return value.item()

    def compared(self, tensor: Tensor) -> Number:
        """``tensor.item()`` for a number that may only be compared."""
        at, value = len(self.readings), self.number(tensor)
        self.readings[at].exact = False
        return Number(self.readings, frozenset([at]), value, lambda seen: seen[at].item())

    def listed(self, tensor: Tensor) -> Any:
        """What ``tensor.tolist()`` is."""
        value = self.noted(tensor)
        with undispatched():
            return value.tolist()


class _Reads(TorchFunctionMode):
    """Reads of which more is known here than that they read a number, or that fake tensors refuse."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self.follower = follower

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.__bool__ and args[0].numel() == 1 and args[0].dtype != torch.bool:
            # Of a number no more than whether it is zero.
            return bool(args[0].ne(0))
        if function is Tensor.item and args[0].is_floating_point() and not self.follower.exact:
            return self.follower.compared(args[0])
        if function in (Tensor.numpy, Tensor.__array__) and not args[0].requires_grad:
            value = self.follower.noted(args[0])
            with undispatched():
                return function(value.clone(), *args[1:], **kwargs)
        return function(*args, **kwargs)
