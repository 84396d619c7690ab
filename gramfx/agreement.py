"""Whether a graph agrees with the eager model: at its capture, and after all passes.

A capture can prove things about a wrong graph, so each is run beside the model itself: the objectives and the
gradient of a random combination of them must agree.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from gramfx.captured import Captured, Probe
from gramfx.eager import (
    TOLERANCE,
    Reference,
    compare_group,
    mismatch,
    random_state_kept,
    reference_of,
    trainable,
    weighted_gradients,
    with_noise,
)
from gramfx.errors import (
    DataDependentError,
    VerificationError,
)
from gramfx.functions import BACKWARD
from gramfx.graph import arguments, target_name, where
from gramfx.program import Call, Program
from gramfx.recurrent import packed_lengths, shortened
from gramfx.torch_compat import (
    autocast_off,
    lengths_replaced,
)
from gramfx.trials import check_linear


def check(captured: Captured, program: Program, call: Call, reference: Reference) -> None:
    """Run a captured graph beside the model, and give it the probe that its lowered graph is held against.

    Raises :class:`CaptureMismatchError` where they differ, and an error of its own kind where they would at another
    call: for backwards that are not linear, and packed sequences of which more than rows are read.
    """
    with random_state_kept(program, call):
        _compare(captured, program, call, reference)
        _check_functions(captured, program, call)
        _check_packing(captured, program, call)
    captured.probe = _probe(captured, program, reference)


def _compare(
    captured: Captured, program: Program, call: Call, reference: Reference, run: Callable[..., Any] | None = None
) -> None:
    leaves = trainable(program)
    tensors = [tensor.detach() for tensor in call.tensors]
    with autocast_off():
        found = (run or captured.graph_module)(*captured.fetch(program, [*tensors, *program.loose]))
    returned = found[: len(reference.returned)]
    got = weighted_gradients(returned, reference.weights, {key: tensor for key, (_, tensor) in leaves.items()})
    for mine, other in zip(returned, reference.returned, strict=True):
        if mine.shape != other.shape:
            raise mismatch("shape of the objectives", tuple(other.shape), tuple(mine.shape))
    tolerance = _tolerance(captured, program)
    for mine, other in zip(returned, reference.returned, strict=True):
        compare_group([("objectives", mine.detach(), other)], tolerance)
    pairs = [
        (leaves[k][0], _zero_if_none(got[k], t), _zero_if_none(reference.gradients[k], t))
        for k, (_, t) in leaves.items()
    ]
    compare_group(pairs, tolerance, reference.noise)


def _check_packing(captured: Captured, program: Program, call: Call) -> None:
    """Compare with other lengths of packed sequences: the graph keeps their padding, which nothing may count."""
    marks = _marked_lengths(captured)
    if not marks:
        return
    # What a capture that reads values serves is of sequences that are as long.
    change = functools.partial(shortened, longest=not captured.readings)
    try:
        with lengths_replaced(change) as tried:
            reference = reference_of(program, call)
        if not captured.readings and not all(tried) and any(arguments(node)[1] > 1 for node in marks):
            raise mismatch("lengths", "sequences of more than one step", "none to try others with")
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


def _marked_lengths(captured: Captured) -> list[Node]:
    return [node for node in captured.graph_module.graph.nodes if node.target is packed_lengths._opoverload]


def unmark_lengths(captured: Captured) -> None:
    """Take out what only marked where lengths of packed sequences enter."""
    for node in _marked_lengths(captured):
        node.replace_all_uses_with(node.all_input_nodes[0])
        captured.graph_module.graph.erase_node(node)
    captured.graph_module.recompile()


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
        return _probe(captured, program, with_noise(reference_of(program, call), program, call))
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
    with random_state_kept(program, call), torch.no_grad(), autocast_off():
        found: tuple[Tensor, ...] = lowered(*(tensor.contiguous() for tensor in captured.fetch(program, tensors)))
    return found


def _zero_if_none(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient
