"""The first stage: a program as a functional ATen graph, checked against the eager model.

A capture can prove things about a wrong graph, so each is run once beside the model itself: the objectives and the
gradient of a random combination of them must agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from gramfx.captured import Captured, Probe
from gramfx.discovery import Recorder, attributes_kept
from gramfx.distributed import wrappers_of, wrappers_passed
from gramfx.errors import (
    CaptureError,
    CaptureMismatchError,
    DataDependentError,
    GramfxError,
    NoTrainableParameterError,
    ObjectiveError,
    UnsupportedError,
    VerificationError,
)
from gramfx.export import by_export
from gramfx.following import by_comparisons, by_values
from gramfx.functions import BACKWARD, checkpoints_run, functions_recorded
from gramfx.graph import target_name, where
from gramfx.nested import Differentiable
from gramfx.program import Call, Program, user_name
from gramfx.recurrent import packed_lengths, shortened
from gramfx.torch_compat import (
    DATA_DEPENDENT,
    autocast_off,
    data_dependent,
    flat_weights_kept,
    functorch_levels_closed,
    lengths_replaced,
    numberless,
)
from gramfx.tracing import by_tracing, explain
from gramfx.trials import check_linear

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


def capture(program: Program, call: Call, *, dynamic: bool, trial: bool = True, reads: bool = False) -> Captured:
    """Capture ``program`` for calls like ``call``; with ``dynamic`` for any batch size of at least 2.

    trial: whether to compare the graph with the model itself; without, the model is seen on fake tensors alone.
    reads: whether the model is known to read tensor values, so that only following it can succeed.
    Raises a :class:`CaptureError` where no way of capturing gives a graph that agrees with the model, an
    :class:`ObjectiveError` or :class:`NoTrainableParameterError` where there is nothing to differentiate.
    """
    program.call = call
    with contextlib.nullcontext() if trial else _fakes_alone():
        reference = _reference(program, call)
    if trial:
        reference = _with_noise(reference, program, call)
    failures: list[Exception] = []
    # Export does not follow a nested tensor that is made inside.
    others = () if reads else (by_tracing,) if call.nested else (by_export, by_tracing)
    for method in (*others, by_comparisons, by_values):
        follows = method in (by_comparisons, by_values)
        if follows and not reads and (dynamic or not trial or not any(map(_may_read_values, failures))):
            break
        try:
            with _traces_leave_nothing(program, call):
                captured = method(program, call, dynamic)
            _refuse_data_dependent(captured)
            if trial:
                with _random_state_kept(program, call):
                    _compare(captured, program, call, reference)
                    _check_functions(captured, program, call)
                    _check_packing(captured, program, call)
                captured.probe = _probe(captured, program, reference)
            _unmark_lengths(captured)
            captured.differentiable = reference.differentiable
            return captured
        except Exception as error:
            final = isinstance(error, GramfxError) and not isinstance(error, (CaptureMismatchError, DataDependentError))
            if (final and not failures) or (isinstance(error, GramfxError) and method is by_values):
                raise
            failures.append(error)
    problem = explain(failures)
    raise problem from None if problem in failures else failures[0]


def _may_read_values(failure: Exception) -> bool:
    """Whether a failure may be that of a model that reads tensor values, for which torch has many words."""
    return isinstance(failure, DataDependentError) or not isinstance(failure, GramfxError)


@contextlib.contextmanager
def _random_state_kept(program: Program, call: Call) -> Iterator[None]:
    devices = {tensor.device for tensor in (*call.tensors, *program.parameters()) if tensor.is_cuda}
    state = random.getstate()
    with torch.random.fork_rng(list(devices)), torch.enable_grad():
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


@contextlib.contextmanager
def _fakes_alone() -> Iterator[None]:
    """Tensors have sizes and no numbers; what needs numbers ends in an error of ours."""
    try:
        with numberless():
            yield
    except DATA_DEPENDENT as error:
        raise explain([error]) from error


@contextlib.contextmanager
def _traces_leave_nothing(program: Program, call: Call) -> Iterator[None]:
    with (
        _random_state_kept(program, call),
        functions_recorded(),
        functorch_levels_closed(),
        attributes_kept(program),
    ):
        yield


def trainable(program: Program) -> dict[int, tuple[str, Tensor]]:
    """The trainable leaves by identity, each with the first name it has."""
    found: dict[int, tuple[str, Tensor]] = {}
    named = [(user_name(name), tensor) for name, tensor in program.named_parameters()]
    for name, tensor in [*named, *((f"closure{i}", t) for i, t in enumerate(program.loose))]:
        if tensor.requires_grad and tensor.is_leaf:
            found.setdefault(id(tensor), (name, tensor))
    return found


def _reference(program: Program, call: Call, last_bits: bool = False) -> Reference:
    try:
        with _random_state_kept(program, call):
            return _run_eagerly(program, call, last_bits)
    except RuntimeError as problem:
        if not call.nested:
            raise
        return _reference_of_nested(program, call, problem)


def _reference_of_nested(program: Program, call: Call, problem: RuntimeError) -> Reference:
    """With reductions of nested tensors written out, which torch computes and does not differentiate."""
    with _random_state_kept(program, call), torch.no_grad():
        returned = _as_tuple(program(*(_copy(t) for t in call.tensors)))
    try:
        with _random_state_kept(program, call), Differentiable():
            reference = _run_eagerly(program, call)
    except RuntimeError:
        raise UnsupportedError(
            "torch cannot differentiate the model with a nested tensor for an input",
            expected="operations on nested tensors that have a derivative in torch",
            got=f"{type(problem).__name__}: {problem}",
            remedy="pool by torch.nested.to_padded_tensor(x, 0.0).sum(1), or pass padded tensors and a mask",
        ) from problem
    for mine, other in zip(reference.returned, returned, strict=True):
        _compare_group([("objectives", mine, other.detach())], TOLERANCE.get(other.dtype, 0.0))
    return reference


def _with_noise(reference: Reference, program: Program, call: Call) -> Reference:
    """Say what rounding may leave where the gradient is zero, as at the top of a symmetric loss.

    Only a gradient that is lost in the rounding of the objectives is suspected; then it is what the gradient changes by
    with the last bits of the parameters.
    """
    found = [16 * torch.finfo(one.dtype).eps * _largest(one) for one in reference.returned if one.is_floating_point()]
    if _largest_of(reference) > max(found, default=0.0):
        return reference
    other = _reference(program, call, last_bits=True)
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
    gradients = _gradients(returned, weights, {key: copies.get(key, tensor) for key, (_, tensor) in leaves.items()})
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


def _gradients(
    returned: Sequence[Tensor], weights: Sequence[Tensor], leaves: dict[int, Tensor]
) -> dict[int, Tensor | None]:
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


def _refuse_data_dependent(captured: Captured) -> None:
    for node in captured.graph_module.graph.nodes:
        if data_dependent(node.meta.get("val")):
            raise DataDependentError(
                "a shape in the model depends on tensor values",
                expected="shapes that follow from the shapes of the inputs",
                where=where(node),
                remedy="use torch.where and masks instead of nonzero() and boolean indices",
            )


def _compare(
    captured: Captured, program: Program, call: Call, reference: Reference, run: Callable[..., Any] | None = None
) -> None:
    leaves = trainable(program)
    tensors = [tensor.detach() for tensor in call.tensors]
    with autocast_off():
        found = (run or captured.graph_module)(*captured.fetch(program, [*tensors, *program.loose]))
    returned = found[: len(reference.returned)]
    got = _gradients(returned, reference.weights, {key: tensor for key, (_, tensor) in leaves.items()})
    for mine, other in zip(returned, reference.returned, strict=True):
        if mine.shape != other.shape:
            raise _mismatch("shape of the objectives", tuple(other.shape), tuple(mine.shape))
    tolerance = _tolerance(captured, program)
    for mine, other in zip(returned, reference.returned, strict=True):
        _compare_group([("objectives", mine.detach(), other)], tolerance)
    pairs = [
        (leaves[k][0], _zero_if_none(got[k], t), _zero_if_none(reference.gradients[k], t))
        for k, (_, t) in leaves.items()
    ]
    _compare_group(pairs, tolerance, reference.noise)


def _marked_lengths(captured: Captured) -> list[Node]:
    return [node for node in captured.graph_module.graph.nodes if node.target is packed_lengths._opoverload]


def _unmark_lengths(captured: Captured) -> None:
    for node in _marked_lengths(captured):
        node.replace_all_uses_with(node.all_input_nodes[0])
        captured.graph_module.graph.erase_node(node)
    captured.graph_module.recompile()


def _check_packing(captured: Captured, program: Program, call: Call) -> None:
    """Compare with other lengths of packed sequences: the graph keeps their padding, which nothing may count."""
    marks = _marked_lengths(captured)
    if not marks:
        return
    # What a capture that reads values serves is of sequences that are as long.
    change = functools.partial(shortened, longest=not captured.readings)
    try:
        with lengths_replaced(change):
            reference = _reference(program, call)
        _compare(captured, program, call, reference, _Shortened(captured.graph_module, change).run)
    except Exception as problem:
        raise DataDependentError(
            "what the model makes of a packed sequence depends on how many rows are left of it",
            expected="packed sequences that only recurrent layers, pad_packed_sequence and operations row by row read",
            got=str(problem).partition("\n")[0],
            where=where(marks[0]),
            remedy="pad the sequence again, with total_length, and mask it by the lengths",
        ) from problem


class _Shortened(Interpreter):
    """Runs a graph with other lengths of packed sequences."""

    def __init__(self, graph_module: GraphModule, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(graph_module)
        self.change = change

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        return self.change(result) if n.target is packed_lengths._opoverload else result


def _check_functions(captured: Captured, program: Program, call: Call) -> None:
    """Let the backward of each hand-written Function show, on the numbers at hand, that it is linear."""
    if any(node.target in BACKWARD for node in captured.graph_module.graph.nodes):
        tensors = [tensor.detach() for tensor in (*call.tensors, *program.loose)]
        with torch.no_grad(), autocast_off():
            runner = _FunctionsChecked(captured.graph_module)
            # An error of ours says where it is, and needs no word of the interpreter's.
            runner.extra_traceback = False
            runner.run(*captured.fetch(program, tensors))


class _FunctionsChecked(Interpreter):
    """Runs a graph, and tries the backward of each hand-written Function on the way."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.target in BACKWARD:
            inputs, _ = self.fetch_args_kwargs_from_env(n)
            outs = list(result) if isinstance(result, tuple) else [result]
            check_linear(target_name(n), BACKWARD[n.target], inputs, outs, where(n))
        return result


def _tolerance(captured: Captured, program: Program) -> float:
    values = [node.meta.get("val") for node in captured.graph_module.graph.nodes]
    tensors = [*(tensor for _, tensor in trainable(program).values()), *values]
    return max(TOLERANCE.get(tensor.dtype, 0.0) for tensor in tensors if isinstance(tensor, Tensor))


def _probe(captured: Captured, program: Program, reference: Reference) -> Probe:
    squares = [float(g.abs().double().square().sum()) for g in reference.gradients.values() if g is not None]
    weights = reference.weights[0].flatten()
    return Probe(weights, sum(squares), _tolerance(captured, program), reference.noise)


def probe_of(captured: Captured, program: Program, call: Call) -> Probe:
    """What the eager model says of a random combination of the objectives of another call of the same capture."""
    program.call = call
    try:
        return _probe(captured, program, _with_noise(_reference(program, call), program, call))
    finally:
        program.call = None


def confirm(captured: Captured, lowered: GraphModule, program: Program, call: Call, probe: Probe | None = None) -> None:
    """Run a lowered graph once: ``wᵀ G w`` must be ``|Jᵀ w|²``, which the eager model gave for random ``w``.

    A wrong rule, pass or kernel anywhere on the way shows here, with probability one. probe: what the model gave, where
    the call is not the one captured. Raises :class:`VerificationError`.
    """
    probe = probe or captured.probe
    assert probe is not None
    gramian = _results(captured, lowered, program, call)[1].double()
    weights = probe.weights.to(gramian)
    got, scale = float(weights @ gramian @ weights), float(weights @ gramian.abs() @ weights)
    error = abs(got - probe.squared_norm)
    if math.isfinite(probe.squared_norm) and not error <= probe.tolerance * scale + probe.noise**2:
        raise VerificationError(
            "the Gramian does not fit the model's own gradient: a bug in gramfx",
            expected=f"wᵀ G w = {probe.squared_norm:.9g} for the weights that were tried",
            got=f"{got:.9g}",
            remedy="please report the model; coupled or symbolic batches are the first things to try without",
        )


def settle(captured: Captured, lowered: GraphModule, program: Program, call: Call) -> None:
    """Let a capture go by what its lowered graph reads. Raises :class:`CaptureMismatchError`."""
    found = _results(captured, lowered, program, call)[2:]
    for index, reading in enumerate(captured.readings):
        reading.settle(found[: index + 1], _tolerance(captured, program))


def _results(captured: Captured, lowered: GraphModule, program: Program, call: Call) -> tuple[Tensor, ...]:
    """What a lowered graph returns, with the random state as it was."""
    tensors = [tensor.detach() for tensor in (*call.tensors, *program.loose)]
    with _random_state_kept(program, call), torch.no_grad(), autocast_off():
        found: tuple[Tensor, ...] = lowered(*(tensor.contiguous() for tensor in captured.fetch(program, tensors)))
    return found


def _zero_if_none(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _compare_group(pairs: Sequence[tuple[str, Tensor, Tensor]], tolerance: float, noise: float = 0.0) -> None:
    scale = max([_largest(want) for _, _, want in pairs], default=0.0)
    for name, got, want in pairs:
        if not (want.is_floating_point() or want.is_complex()):
            got, want = got.double(), want.double()
        # Infinite or undefined entries are the model's own and must stand in the same places.
        finite = torch.isfinite(want)
        same = torch.equal(torch.isfinite(got), finite)
        error = _largest((got - want).masked_fill(~finite, 0))
        if not same or error > tolerance * scale + noise:
            raise _mismatch(name, f"difference up to {tolerance:.0e} of {scale:.3g}", f"{error:.3g}")


def _largest(tensor: Tensor) -> float:
    kept = tensor.detach().masked_fill(~torch.isfinite(tensor), 0)
    return float(kept.abs().max()) if kept.numel() else 0.0


def _mismatch(what: str, expected: object, got: object) -> CaptureMismatchError:
    return CaptureMismatchError(
        f"the captured graph and the model disagree on {what!r}",
        expected=str(expected),
        got=str(got),
        remedy="look for randomness outside torch, state kept between calls, or gradients that are written by hand",
    )
