"""What a hand-written autograd Function may not do, found by trying it.

First on tensors without numbers, where nothing of the user's can be read or changed, forward and backward. Then its
backward on the numbers at hand: a Jacobian has ``Jᵀ (a + b) = Jᵀ a + Jᵀ b``, and so must it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gramfx.errors import CaptureError, CustomFunctionError, GramfxError
from gramfx.source import user_frame
from gramfx.torch_compat import DATA_DEPENDENT, FakeTensor, is_symbolic, on_fresh_fakes, pytree, random_ops_seen

Structure = tuple[list[Any], Any]

#: Sizes of cotangents that are tried: a gradient that is clipped shows at one of them.
_SCALES = {torch.float16: (1e-2, 1.0, 1e2)}
_TOLERANCE = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.bfloat16: 1e-1, torch.float16: 5e-2}


def refused(name: str, why: str, where: str | None = None) -> CustomFunctionError:
    """The error that a Function ends in."""
    return CustomFunctionError(
        f"the model runs a hand-written torch.autograd.Function that a graph cannot hold: {why}",
        expected="a Function of the tensors that it is given and of nothing else, with a linear backward",
        got=name,
        where=where or user_frame(traceback.extract_stack()),
        remedy="give it every tensor that it reads as an argument, or write it with torch operations and detach()",
    )


def returned_by(
    name: str, function: Callable[..., Any], tensors: Sequence[Tensor], wanted: Sequence[bool]
) -> Structure:
    """The structure of what a Function returns for tensors of these sizes: ``Tensor`` for tensors, all else as it is.

    Raises :class:`CustomFunctionError` where it, or its backward, reads tensors that it was not given, changes those
    that it was, or draws random numbers; :class:`CaptureError` where what is no tensor depends on a symbolic size.
    """

    def run(mode: Any, *given: Tensor) -> Structure:
        versions = [tensor._version for tensor in given]
        found = _watched(name, mode, lambda: _forward(function, given))
        if versions != [tensor._version for tensor in given]:
            raise refused(name, "it changes what it is given in place")
        # A checkpoint around the call would recompute what it saves.
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            _watched(name, mode, lambda: _backward(function, given, wanted))
        return found

    found: Structure = on_fresh_fakes(run, tensors)
    if any(is_symbolic(size) for tensor in tensors for size in tensor.shape):
        other: Structure = on_fresh_fakes(run, tensors, more=1)
        if repr(found) != repr(other):
            raise CaptureError("what a hand-written Function returns depends on the batch size", got=name)
    return found


def _forward(function: Callable[..., Any], given: Sequence[Tensor]) -> Structure:
    with torch.no_grad():
        leaves, shape = pytree.tree_flatten(function(*given))
    return [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves], shape


def _backward(function: Callable[..., Any], given: Sequence[Tensor], wanted: Sequence[bool]) -> None:
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_(flag) for tensor, flag in zip(given, wanted, strict=True)]
        outs = [out for out in pytree.tree_leaves(function(*leaves)) if isinstance(out, Tensor) and out.requires_grad]
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    if outs and learned:
        torch.autograd.grad(outs, learned, [torch.ones_like(out) for out in outs], allow_unused=True)


class _Strangers(TorchFunctionMode):
    """Notes whether a tensor is read that was neither given nor made here, all of which are fakes of one mode."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode, self.found = mode, False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        self.found |= any(not isinstance(one, FakeTensor) or one.fake_mode is not self.mode for one in tensors)
        return function(*args, **(kwargs or {}))


def _watched(name: str, mode: Any, run: Callable[[], Any]) -> Any:
    strangers = _Strangers(mode)
    problem: Exception | None = None
    result = None
    with random_ops_seen() as random, strangers:
        try:
            result = run()
        except (*DATA_DEPENDENT, GramfxError):
            raise
        except Exception as raised:
            problem = raised
    # A backward runs where the mode does not see it, and torch finds out itself.
    if strangers.found or "convert all Tensors to FakeTensors" in str(problem):
        raise refused(name, "it reads tensors that it is not given") from problem
    if problem is not None:
        raise refused(name, f"it fails on tensors without numbers, by {type(problem).__name__}: {problem}") from problem
    if random:
        raise refused(name, "it draws random numbers")
    return result


def check_linear(
    name: str, backward: Callable[..., Any], inputs: Sequence[Any], outs: Sequence[Tensor], where: str
) -> None:
    """Raise :class:`CustomFunctionError` where ``backward(*inputs, *cotangents)`` is not linear in the cotangents."""
    if not any(out.is_floating_point() or out.is_complex() for out in outs):
        return
    generator = torch.Generator().manual_seed(0)

    def drawn(out: Tensor, scale: float) -> Tensor:
        return (torch.randn(out.shape, generator=generator, dtype=torch.float64) * scale).to(out)

    scales = next((_SCALES[out.dtype] for out in outs if out.dtype in _SCALES), (1e-6, 1.0, 1e6))
    tolerance = max(_TOLERANCE.get(out.dtype, 1e-3) for out in outs if out.is_floating_point() or out.is_complex())
    for scale in scales:
        one, other = ([drawn(out, scale) for out in outs] for _ in range(2))
        apart = zip(_run(backward, inputs, one), _run(backward, inputs, other), strict=True)
        sums = [a + b for a, b in apart]
        together = _run(backward, inputs, [a + b for a, b in zip(one, other, strict=True)])
        for got, want in zip(together, sums, strict=True):
            known = torch.isfinite(want)
            error, size = (
                t.masked_fill(~known, 0).abs().double().amax() if t.numel() else 0.0 for t in (got - want, want)
            )
            if error > tolerance * size:
                raise refused(name, "its backward is not linear in the gradient that it is given", where)


def _run(backward: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Tensor]) -> list[Tensor]:
    found = backward(*inputs, *cotangents)
    return list(found) if isinstance(found, tuple) else [found]
