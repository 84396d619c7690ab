"""Hand-written autograd Functions: each call is one op of a capture, with the author's backward as another op.

An op runs the author's forward. Where it is differentiated it runs the Function itself, so that a joint graph holds the
ATen ops of its forward and of its backward; what the backward does to samples says what it couples.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gramfx.errors import CustomFunctionError
from gramfx.source import user_frame
from gramfx.torch_compat import (
    below_autograd,
    function_applied,
    functions_replaced,
    in_functorch,
    is_checkpoint,
    on_fresh_fakes,
    pytree,
    random_ops_seen,
)

_library = torch.library.Library("gramfx_function", "DEF")
_numbers = itertools.count()
_made: dict[Any, UserFunction] = {}
_capturing = False

#: What each op is taken apart into, where its parts are to speak for it.
PARTS: dict[Any, Callable[..., Any]] = {}
#: The op of a Function's backward, ``(*inputs, *cotangents) -> gradients of the inputs``, by the op of its forward.
BACKWARD: dict[Any, Any] = {}


@dataclass(frozen=True, eq=False)
class UserFunction:
    """A Function with all arguments but tensors: a function of tensors.

    ``tensors`` counts its tensor arguments, ``returned`` says which of the things it returns are tensors.
    """

    cls: type
    tree: Any
    plain: tuple[Any, ...]
    tensors: int
    returned: Any = None

    def __call__(self, *tensors: Tensor) -> Any:
        """What the Function gives, as its author wrote it."""
        left = iter(tensors)
        leaves = [next(left) if leaf is Tensor else leaf for leaf in self.plain]
        return function_applied(self.cls, *pytree.tree_unflatten(leaves, self.tree))

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
        inputs, cotangents = tensors[: self.tensors], tensors[self.tensors :]
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in inputs]
            outs = self.outputs(*leaves)
            pairs = [(out, c) for out, c in zip(outs, cotangents, strict=True) if out.requires_grad]
            learned = [leaf for leaf in leaves if leaf.requires_grad]
            reached = [out for out, _ in pairs], learned, [cotangent for _, cotangent in pairs]
            found = torch.autograd.grad(*reached, allow_unused=True) if pairs else [None] * len(learned)
        each = iter(found)
        gradients = [next(each) if leaf.requires_grad else None for leaf in leaves]
        return _packed(
            [torch.zeros_like(t) if g is None else g.clone() for g, t in zip(gradients, inputs, strict=True)]
        )


def _packed(tensors: list[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


# ---------------------------------------------------------------- a call in a capture


@contextlib.contextmanager
def functions_recorded() -> Iterator[None]:
    """While a model is captured, let each of its Functions' calls be one op.

    Raises :class:`CustomFunctionError` where a Function reads tensors that it was not given, changes those that it was,
    or draws random numbers: an op could not repeat that.
    """
    global _capturing
    before, _capturing = _capturing, True
    try:
        with functions_replaced(_recorded):
            yield
    finally:
        _capturing = before


@contextlib.contextmanager
def checkpoints_run() -> Iterator[None]:
    """Run what reentrant checkpoints hold at once: ``autograd.grad`` finds no gradients of what they close over."""
    with functions_replaced(
        lambda cls, *args: _run_checkpoint(*args) if is_checkpoint(cls) else function_applied(cls, *args)
    ):
        yield


def _run_checkpoint(run: Callable[..., Any], preserves_random_state: bool, *args: Any) -> Any:
    with torch.enable_grad():
        return run(*args)


def _recorded(cls: type, *args: Any) -> Any:
    if is_checkpoint(cls):
        return _run_checkpoint(*args)
    if cls.__module__.partition(".")[0] == "torch":
        return function_applied(cls, *args)
    if in_functorch():
        raise _refused(cls, "a torch.func transform runs over it, where no graph keeps its backward")
    leaves, tree = pytree.tree_flatten(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    op, returned = _op_of(UserFunction(cls, tree, plain, len(tensors)), tensors)
    made = op(*tensors)
    left = iter(made if isinstance(made, (tuple, list)) else [made])
    kept, shape = returned
    return pytree.tree_unflatten([next(left) if leaf is Tensor else leaf for leaf in kept], shape)


def _refused(cls: type, why: str) -> CustomFunctionError:
    return CustomFunctionError(
        f"the model runs a hand-written torch.autograd.Function that a graph cannot hold: {why}",
        expected="a Function of the tensors that it is given, and of nothing else",
        got=f"{cls.__module__}.{cls.__qualname__}",
        where=user_frame(traceback.extract_stack()),
        remedy="give it every tensor that it reads as an argument, or write it with torch operations and detach()",
    )


def _op_of(function: UserFunction, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    """The op of a Function, and the structure of what it returns; made once for equal arguments of equal kinds."""
    key = (function.cls, function.tree, tuple(map(_key, function.plain)), tuple((t.dtype, t.dim()) for t in tensors))
    if key not in _made:
        returned = _tried(function, tensors)
        _made[key] = UserFunction(function.cls, function.tree, function.plain, function.tensors, returned)
        _define(key)
    return _ops[key], _made[key].returned


_ops: dict[Any, Any] = {}


def _key(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf


def _define(key: Any) -> None:
    function = _made[key]
    name = f"{function.cls.__name__}_{next(_numbers)}"
    count = sum(leaf is Tensor for leaf in function.returned[0])
    inputs, outputs = (_typed(letter, number) for letter, number in (("a", function.tensors), ("c", count)))
    results, gradients = (_results(number) for number in (count, function.tensors))
    _library.define(f"{name}({inputs}) -> {results}")
    _library.define(f"{name}_backward({inputs}, {outputs}) -> {gradients}")
    ops = torch.ops.gramfx_function
    op, backward = getattr(ops, name).default, getattr(ops, f"{name}_backward").default
    for one, kernel in ((name, function.forward), (f"{name}_backward", function.backward)):
        _library.impl(one, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gramfx_function::{one}", kernel, lib=_library)
    _library.impl(name, _looked_into(op, function), "Autograd")
    PARTS[op], PARTS[backward], BACKWARD[op], _ops[key] = function.forward, function.backward, backward, op


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


def _looked_into(op: Any, function: UserFunction) -> Callable[..., Any]:
    def run(*tensors: Tensor) -> Any:
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            with below_autograd():
                return op(*tensors)
        if _capturing:
            return function_applied(_Whole, op, function, *tensors)
        return _packed(function.outputs(*tensors))

    return run


# ---------------------------------------------------------------- what it may not do


class _Strangers(TorchFunctionMode):
    """Notes whether a tensor is read that was neither given nor made here."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {id(tensor): tensor for tensor in given}
        self.found = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(isinstance(one, Tensor) and id(one) not in self.known for one in pytree.tree_leaves((args, kwargs))):
            self.found = True
        result = function(*args, **(kwargs or {}))
        self.known |= {id(one): one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)}
        return result


def _tried(function: UserFunction, tensors: Sequence[Tensor]) -> Any:
    """The structure of what the Function returns, found on tensors of the same sizes that hold no numbers."""

    def run(*given: Tensor) -> Any:
        versions = [tensor._version for tensor in given]
        strangers = _Strangers(given)
        try:
            with random_ops_seen() as random, strangers, torch.no_grad():
                result = function(*given)
        except Exception as problem:
            if strangers.found:
                raise _refused(function.cls, "it reads tensors that it is not given") from problem
            raise
        if strangers.found:
            raise _refused(function.cls, "it reads tensors that it is not given")
        if random:
            raise _refused(function.cls, "it draws random numbers")
        if versions != [tensor._version for tensor in given]:
            raise _refused(function.cls, "it changes what it is given in place")
        leaves, shape = pytree.tree_flatten(result)
        return [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves], shape

    return on_fresh_fakes(run, tensors)
