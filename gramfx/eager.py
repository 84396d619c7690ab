"""What the eager model gives for one call: its objectives, and the gradient of a combination of them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramfx.devices import cuda_devices, reproducible
from gramfx.discovery import Recorder
from gramfx.distributed import wrappers_of, wrappers_passed
from gramfx.errors import (
    CaptureError,
    CaptureMismatchError,
    NoTrainableParameterError,
    ObjectiveError,
    UnsupportedError,
)
from gramfx.functions import checkpoints_run
from gramfx.nested import Differentiable
from gramfx.program import Call, Program, user_name
from gramfx.torch_compat import (
    failures_unlogged,
    flat_weights_kept,
)

#: Largest difference of a gradient, relative to the largest gradient of all, by the narrowest dtype in play.
#: Every wrong capture seen was off by 3e-3 or more.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
TOLERANCE |= {torch.complex128: 1e-6, torch.complex64: 1e-3}


@dataclass(frozen=True)
class Reference:
    """What the eager model returns, and the gradient of ``Σ (weights * returned).sum()`` by leaf.

    ``noise``: entries of the gradient of this size may be rounding alone.
    """

    returned: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    gradients: dict[int, Tensor | None]
    differentiable: tuple[bool, ...]
    noise: float = 0.0


@contextlib.contextmanager
def random_state_kept(program: Program, call: Call) -> Iterator[None]:
    """Put torch's random state back; raise :class:`CaptureError` where Python's own was used."""
    devices = cuda_devices((*call.tensors, *program.loose, *program.parameters(), *program.buffers()))
    state = random.getstate()
    with reproducible(devices), torch.enable_grad():
        try:
            yield
            moved = random.getstate() != state
        finally:
            random.setstate(state)
    if moved:
        raise CaptureError(
            "the forward draws from Python's random module, and a graph would freeze what it drew",
            expected="randomness from torch",
            remedy="draw with torch.rand or torch.randint",
        )


def trainable(program: Program) -> dict[int, tuple[str, Tensor]]:
    """The trainable leaves by identity, each with the first name it has."""
    found: dict[int, tuple[str, Tensor]] = {}
    named = [(user_name(name), tensor) for name, tensor in program.named_parameters()]
    for name, tensor in [*named, *((f"closure{i}", t) for i, t in enumerate(program.loose))]:
        if tensor.requires_grad and tensor.is_leaf:
            found.setdefault(id(tensor), (name, tensor))
    return found


def reference_of(program: Program, call: Call, last_bits: bool = False) -> Reference:
    """What the model gives for a call; ``last_bits``: with other last bits of its parameters."""
    try:
        with random_state_kept(program, call), failures_unlogged():
            return _run_eagerly(program, call, last_bits)
    except RuntimeError as problem:
        if not call.nested:
            raise
        return _reference_of_nested(program, call, problem)


def _reference_of_nested(program: Program, call: Call, problem: RuntimeError) -> Reference:
    """With reductions of nested tensors written out, which torch computes and does not differentiate."""
    with random_state_kept(program, call), torch.no_grad():
        returned = _as_tuple(program(*(_copy(t) for t in call.tensors)))
    try:
        with random_state_kept(program, call), Differentiable():
            reference = _run_eagerly(program, call)
    except RuntimeError:
        raise UnsupportedError(
            "torch cannot differentiate the model with a nested tensor for an input",
            expected="operations on nested tensors that have a derivative in torch",
            got=f"{type(problem).__name__}: {problem}",
            remedy="pool by torch.nested.to_padded_tensor(x, 0.0).sum(1), or pass padded tensors and a mask",
        ) from problem
    for mine, other in zip(reference.returned, returned, strict=True):
        compare_group([("objectives", mine, other.detach())], TOLERANCE.get(other.dtype, 0.0))
    return reference


def with_noise(reference: Reference, program: Program, call: Call) -> Reference:
    """Say what rounding may leave where the gradient is zero, as at the top of a symmetric loss.

    Only a gradient that is lost in the rounding of the objectives is suspected; then it is what the gradient changes by
    with the last bits of the parameters.
    """
    found = [16 * torch.finfo(one.dtype).eps * _largest(one) for one in reference.returned if one.is_floating_point()]
    if _largest_of(reference) > max(found, default=0.0):
        return reference
    other = reference_of(program, call, last_bits=True)
    pairs = zip(reference.gradients.values(), other.gradients.values(), strict=True)
    noise = 4 * max((_largest(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)
    return dataclasses.replace(reference, noise=noise)


def _largest_of(reference: Reference) -> float:
    return max((_largest(one) for one in reference.gradients.values() if one is not None), default=0.0)


def _run_eagerly(program: Program, call: Call, last_bits: bool = False) -> Reference:
    """On copies of everything the forward might change; ``last_bits``: of the parameters with other last bits."""
    wrappers_of(program)
    program.loose = ()
    named = [*program.named_parameters(), *program.named_buffers()]
    state = {name: _copy(tensor) for name, tensor in named}
    if last_bits:
        _change_last_bits(state)
    copies = {id(tensor): state[name] for name, tensor in named}
    # A parameter may be given as an input, and is differentiated there too.
    tensors = [copies[id(tensor)] if id(tensor) in copies else _copy(tensor) for tensor in call.tensors]
    with Recorder([*state.values(), *tensors]) as recorder, flat_weights_kept(program), _plainly():
        returned = _as_tuple(torch.func.functional_call(program, state, tuple(tensors)))
    program.loose = tuple(recorder.loose.values())
    leaves = trainable(program)
    _check_differentiable(returned, leaves)
    generator = torch.Generator().manual_seed(0)
    weights = tuple(torch.rand(one.shape, generator=generator, dtype=torch.float64) + 0.5 for one in returned)
    gradients = weighted_gradients(
        returned, weights, {key: copies.get(key, tensor) for key, (_, tensor) in leaves.items()}
    )
    differentiable = tuple(one.requires_grad for one in returned)
    return Reference(tuple(one.detach() for one in returned), weights, gradients, differentiable)


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Without what only saves memory or talks to other processes."""
    with checkpoints_run(), wrappers_passed():
        yield


def _as_tuple(returned: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


def _change_last_bits(state: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for tensor in state.values():
        if tensor.requires_grad:
            eps = torch.finfo(tensor.dtype).eps
            # Nine bits, of which coarse dtypes have no more than some.
            change = min(512 * eps, max(4 * eps, 1e-2)) * (2 * torch.rand(tensor.shape, generator=generator) - 1)
            tensor.data.mul_(1 + change.to(tensor))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def weighted_gradients(
    returned: Sequence[Tensor], weights: Sequence[Tensor], leaves: dict[int, Tensor]
) -> dict[int, Tensor | None]:
    """The gradient of ``Σ (weights * returned).sum()`` by each leaf, None where it does not depend on it."""
    reached = [(one, weight.to(one)) for one, weight in zip(returned, weights, strict=True) if one.requires_grad]
    if not reached:
        return dict.fromkeys(leaves)
    outs, seeds = zip(*reached, strict=True)
    found = torch.autograd.grad(outs, list(leaves.values()), seeds, allow_unused=True)
    return {key: g.to_dense() if g is not None and g.is_sparse else g for key, g in zip(leaves, found, strict=True)}


def _check_differentiable(returned: Sequence[Tensor], leaves: dict[int, tuple[str, Tensor]]) -> None:
    if not leaves:
        raise NoTrainableParameterError(
            "the model has no trainable parameters",
            expected="at least one parameter with requires_grad=True",
            got="none",
            remedy="call requires_grad_(True) on those the Jacobian is taken by",
        )
    if not any(one.requires_grad for one in returned):
        raise ObjectiveError(
            "the objectives are not differentiable",
            expected="objectives that depend on trainable parameters by a differentiable path",
            got=f"a tensor of shape {tuple(returned[0].shape)} that does not require grad",
            remedy="look for detach(), no_grad(), argmax or conversions to numbers in the model or the objective",
        )


def compare_group(pairs: Sequence[tuple[str, Tensor, Tensor]], tolerance: float, noise: float = 0.0) -> None:
    """Raise :class:`CaptureMismatchError` where ``(name, got, wanted)`` differ by more than a part of the largest."""
    scale = max([_largest(want) for _, _, want in pairs], default=0.0)
    for name, got, want in pairs:
        if not (want.is_floating_point() or want.is_complex()):
            got, want = got.double(), want.double()
        # Infinite or undefined entries are the model's own and must stand in the same places.
        finite = torch.isfinite(want)
        same = torch.equal(torch.isfinite(got), finite)
        error = _largest((got - want).masked_fill(~finite, 0))
        if not same or error > tolerance * scale + noise:
            raise mismatch(name, f"difference up to {tolerance:.0e} of {scale:.3g}", f"{error:.3g}")


def _largest(tensor: Tensor) -> float:
    kept = tensor.detach().masked_fill(~torch.isfinite(tensor), 0)
    return float(kept.abs().max()) if kept.numel() else 0.0


def mismatch(what: str, expected: object, got: object) -> CaptureMismatchError:
    """The error of a graph that does something else than the model."""
    return CaptureMismatchError(
        f"the captured graph and the model disagree on {what!r}",
        expected=str(expected),
        got=str(got),
        remedy="look for randomness outside torch, state kept between calls, or gradients that are written by hand",
    )
