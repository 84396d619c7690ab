"""Hand-written autograd Functions: each call is one op of a capture, with the author's backward as another op.

An op runs the author's forward. Where it is differentiated it runs the Function itself, so that a joint graph holds the
ATen ops of its forward and of its backward; what the backward does to samples says what it couples.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramfx.constants import PLAIN
from gramfx.errors import CaptureError
from gramfx.torch_compat import (
    autocast_as,
    autocast_state,
    below_autograd,
    function_applied,
    functions_replaced,
    in_functorch,
    is_checkpoint,
    is_symbolic,
    is_torchs_own,
    pytree,
)
from gramfx.trials import refused, returned_by

_library = torch.library.Library("gramfx_function", "DEF")
_numbers = itertools.count()
#: The ops of the capture that is running, by what their Functions were called with; None outside of captures.
_recording: dict[Any, Any] | None = None

#: What each op is taken apart into, where its parts are to speak for it.
PARTS: dict[Any, Callable[..., Any]] = {}
#: The op of a Function's backward, ``(*inputs, *cotangents) -> gradients of the inputs``, by the op of its forward.
BACKWARD: dict[Any, Any] = {}


@dataclass(frozen=True, eq=False)
class UserFunction:
    """A Function with all arguments but tensors: a function of tensors.

    ``wanted`` says for each tensor argument whether it needs a gradient; ``autocast``, the casts it was called under.
    """

    cls: type
    tree: Any
    plain: tuple[Any, ...]
    wanted: tuple[bool, ...]
    autocast: tuple[Any, ...]

    def __call__(self, *tensors: Tensor) -> Any:
        """What the Function gives, as its author wrote it."""
        left = iter(tensors)
        leaves = [next(left) if leaf is Tensor else leaf for leaf in self.plain]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        with autocast_as(self.autocast), _as_written():
            return function_applied(self.cls, *args, **kwargs)

    def outputs(self, *tensors: Tensor) -> list[Tensor]:
        """Its tensors, none of them an input."""
        given = {id(tensor) for tensor in tensors}
        found = [one for one in pytree.tree_leaves(self(*tensors)) if isinstance(one, Tensor)]
        return [one.view_as(one) if id(one) in given else one for one in found]

    def forward(self, *tensors: Tensor) -> Any:
        """The outputs in memory of their own, without their derivative."""
        with torch.no_grad():
            return _packed([one.clone() for one in self.outputs(*tensors)])

    def backward(self, *tensors: Tensor) -> Any:
        """Gradients of the inputs, zero for those that have none."""
        inputs, cotangents = tensors[: len(self.wanted)], tensors[len(self.wanted) :]
        with torch.enable_grad(), _as_written():
            leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(inputs, self.wanted, strict=True)]
            outs = self.outputs(*leaves)
            pairs = [(out, c) for out, c in zip(outs, cotangents, strict=True) if out.requires_grad]
            learned = [leaf for leaf in leaves if leaf.requires_grad]
            reached = [out for out, _ in pairs], learned, [cotangent for _, cotangent in pairs]
            found = torch.autograd.grad(*reached, allow_unused=True) if pairs else [None] * len(learned)
        each = iter(found)
        gradients = [next(each) if wanted else None for wanted in self.wanted]
        return _packed(
            [torch.zeros_like(t) if g is None else g.clone() for g, t in zip(gradients, inputs, strict=True)]
        )


def _packed(tensors: list[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


# ---------------------------------------------------------------- a call in a capture


@contextlib.contextmanager
def functions_recorded() -> Iterator[None]:
    """While a model is captured, let each of its Functions' calls be one op.

    Ops belong to one capture: what a Function reads of its class or its module may be another thing at the next. Raises
    :class:`CustomFunctionError` for Functions that an op could not repeat.
    """
    global _recording
    before, _recording = _recording, {}
    try:
        with functions_replaced(_recorded, _Kept):
            yield
    finally:
        _recording = before


def _as_written() -> Any:
    """A context in which Functions are applied: those that a Function runs are part of it."""
    return functions_replaced(function_applied)


@contextlib.contextmanager
def checkpoints_run() -> Iterator[None]:
    """Run what reentrant checkpoints hold at once: ``autograd.grad`` finds no gradients of what they close over."""
    with functions_replaced(
        lambda cls, *args, **kwargs: (
            _run_checkpoint(*args) if is_checkpoint(cls) else function_applied(cls, *args, **kwargs)
        )
    ):
        yield


def _run_checkpoint(run: Callable[..., Any], preserves_random_state: bool, *args: Any) -> Any:
    with torch.enable_grad():
        return run(*args)


def _recorded(cls: type, *args: Any, **kwargs: Any) -> Any:
    if is_checkpoint(cls):
        return _run_checkpoint(*args)
    if is_torchs_own(cls):
        return function_applied(cls, *args, **kwargs)
    return _run(*_function_of(cls, args, kwargs))


def _function_of(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[UserFunction, list[Tensor]]:
    if in_functorch():
        raise refused(_named(cls), "a torch.func transform runs over it, where no graph keeps its backward")
    leaves, tree = pytree.tree_flatten((args, kwargs))
    if any(map(is_symbolic, leaves)):
        raise CaptureError("a hand-written Function is given a size that depends on the batch size", got=cls.__name__)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return UserFunction(cls, tree, plain, _wanted(tensors), autocast_state()), tensors


def _run(function: UserFunction, tensors: list[Tensor]) -> Any:
    with _as_written():
        kept, shape = returned_by(_named(function.cls), function, tensors, function.wanted)
    made = _op_of(function, sum(leaf is Tensor for leaf in kept))(*tensors)
    left = iter(made if isinstance(made, (tuple, list)) else [made])
    return pytree.tree_unflatten([next(left) if leaf is Tensor else leaf for leaf in kept], shape)


def _named(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _wanted(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which arguments need a gradient; where none shows that it does, as when nothing is recorded, all that can."""
    found = tuple(tensor.requires_grad for tensor in tensors)
    return found if any(found) else tuple(t.is_floating_point() or t.is_complex() for t in tensors)


def _op_of(function: UserFunction, count: int) -> Any:
    """The op of a Function that returns ``count`` tensors; one for equal arguments."""
    assert _recording is not None
    key = (function.cls, function.tree, tuple(map(_key, function.plain)), function.wanted, function.autocast, count)
    if key not in _recording:
        _recording[key] = _defined(function, count)
    return _recording[key]


def _key(leaf: Any) -> Any:
    # By how they are written: 0.0 and -0.0 are equal, and nan is not equal to itself.
    return (type(leaf), repr(leaf)) if isinstance(leaf, PLAIN) else id(leaf)


def _defined(function: UserFunction, count: int) -> Any:
    name = f"{re.sub(r'[^0-9A-Za-z_]', '_', function.cls.__name__)}_{next(_numbers)}"
    given = len(function.wanted)
    inputs, outputs = (_typed(letter, number) for letter, number in (("a", given), ("c", count)))
    results, gradients = map(_results, (count, given))
    _library.define(f"{name}({inputs}) -> {results}")
    _library.define(f"{name}_backward({', '.join(filter(None, (inputs, outputs)))}) -> {gradients}")
    ops = torch.ops.gramfx_function
    op, backward = getattr(ops, name).default, getattr(ops, f"{name}_backward").default
    for one, kernel in ((name, function.forward), (f"{name}_backward", function.backward)):
        _library.impl(one, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gramfx_function::{one}", kernel, lib=_library)
    _library.impl(name, _looked_into(op, function), "Autograd")
    PARTS[op], PARTS[backward], BACKWARD[op] = function.forward, function.backward, backward
    return op


def _typed(letter: str, count: int) -> str:
    return ", ".join(f"Tensor {letter}{i}" for i in range(count))


def _results(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


class _Whole(torch.autograd.Function):
    """The op as a capture below autograd sees it; its derivative is the Function's own."""

    @staticmethod
    def forward(ctx: Any, op: Any, function: UserFunction, *tensors: Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return op(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        found = ctx.function.backward(*ctx.saved_tensors, *cotangents)
        return None, None, *(found if isinstance(found, tuple) else (found,))


class _Kept(torch.autograd.Function):
    """A call by a kept ``cls.apply`` in a capture: the op, with what autograd wants for each argument and output."""

    @staticmethod
    def forward(ctx: Any, cls: type, *args: Any) -> Any:
        ctx.function, tensors = _function_of(cls, args, {})
        ctx.save_for_backward(*tensors)
        made = _run(ctx.function, tensors)
        ctx.given, ctx.made = _held(args), _held(made if isinstance(made, tuple) else (made,))
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        pairs = zip(ctx.made, cotangents, strict=True)
        wanted = [c if alone else None for (alone, count), c in pairs for _ in range(count)]
        found = ctx.function.backward(*ctx.saved_tensors, *wanted)
        left = iter(found if isinstance(found, tuple) else (found,))
        gradients = [[next(left) for _ in range(count)] for _, count in ctx.given]
        return tuple(ours[0] if alone else None for ours, (alone, _) in zip(gradients, ctx.given, strict=True))


def _held(values: tuple[Any, ...]) -> list[tuple[bool, int]]:
    """Of each value whether it is a tensor, and how many tensors it holds."""
    return [(isinstance(v, Tensor), sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(v))) for v in values]


def _looked_into(op: Any, function: UserFunction) -> Callable[..., Any]:
    def run(*tensors: Tensor) -> Any:
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            with below_autograd():
                return op(*tensors)
        if _recording is not None:
            return function_applied(_Whole, op, function, *tensors)
        return _packed(function.outputs(*tensors))

    return run
