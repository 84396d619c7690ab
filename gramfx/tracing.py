"""Capture by tracing below autograd: for models that differentiate inside their own forward."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from gramfx.captured import Captured, Slot, normal_form, slot_of_input, slot_of_state
from gramfx.errors import CaptureError, DataDependentError, GramfxError
from gramfx.graph import placeholders
from gramfx.program import Call, Program
from gramfx.ragged import with_derivatives
from gramfx.recurrence import recurrences_whole
from gramfx.source import user_frame
from gramfx.substitutes import as_captured
from gramfx.torch_compat import (
    DATA_DEPENDENT,
    fake_mode_of,
    in_functorch,
    nesting_traced,
    new_fake_inputs,
    on_rows,
    pytree,
    size_conditions,
    trace,
)

aten = torch.ops.aten


@torch.library.custom_op("gramfx::stop_gradient", mutates_args=())
def stop_gradient(tensor: Tensor) -> Tensor:
    """A copy that no gradient passes: marks where the user's code stopped one."""
    return tensor.clone()


@stop_gradient.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


@stop_gradient.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], tensor: Tensor) -> tuple[Tensor, int | None]:
    return stop_gradient(tensor), in_dims[0]


stop_gradient.register_autograd(lambda ctx, gradient: None)


_ALWAYS_STOP = {torch.detach, Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]


class _MarkStops(TorchFunctionMode):
    """Puts :func:`stop_gradient` where an output lost the gradient that an input had."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = function(*args, **(kwargs or {}))
        if in_functorch():
            # Wrapped tensors do not tell whether they require grad; only what always stops one is marked.
            if function not in _ALWAYS_STOP and torch.is_grad_enabled():
                return result
        elif not any(tensor.requires_grad for tensor in given):
            return result

        def mark(leaf: Any) -> Any:
            stopped = isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.requires_grad
            return on_rows(stop_gradient, leaf) if stopped and not any(leaf is tensor for tensor in given) else leaf

        return pytree.tree_map(mark, result)


class Following(Protocol):
    """What runs beside a trace, and what it has the graph return besides the objectives."""

    read_from: list[Tensor]

    def along(self, fakes: Sequence[Tensor], reals: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
        """A context around the run of the program on fake tensors, which stand for real ones."""


def by_tracing(program: Program, call: Call, dynamic: bool) -> Captured:
    """Capture by running the program on fake tensors, recording below autograd. Raises whatever torch raises."""
    return traced(program, call, dynamic)


def traced(program: Program, call: Call, dynamic: bool, following: Following | None = None) -> Captured:
    """A trace; what ``following`` read are its second and further outputs, before new values of mutated slots."""
    state = [*program.named_parameters(), *program.named_buffers()]
    own, loose = list(call.tensors), list(program.loose)
    dims = [*(None for _ in state), *call.batch_dims, *(None for _ in loose)]
    real = [*(tensor for _, tensor in state), *own, *loose]
    fakes = new_fake_inputs(real, dims, dynamic)
    names = [name for name, _ in state]

    def run(*tensors: Tensor) -> Any:
        leaves = [t.detach().requires_grad_(r.requires_grad) for t, r in zip(tensors, real, strict=True)]
        with _MarkStops(), following.along(leaves, real) if following else contextlib.nullcontext():
            objectives = torch.func.functional_call(
                program, dict(zip(names, leaves[: len(names)], strict=True)), tuple(leaves[len(names) :])
            )
        return (objectives, *following.read_from) if following else objectives

    with as_captured(program), recurrences_whole(), nesting_traced() if call.nested else contextlib.nullcontext():
        graph_module = trace(run, fakes, stack_traces=True)
    if dynamic and (conditions := size_conditions(fakes)):
        # Export checks this of itself; a trace only writes it down.
        raise CaptureError("the model's graph depends on the batch size", got=", ".join(conditions))
    _only_users_stops(graph_module)
    with_derivatives(graph_module)
    slots = [slot_of_state(name, tensor.requires_grad) for name, tensor in state]
    slots += [slot_of_input(index, call) for index in range(len(own) + len(loose))]
    constants = _lifted_constants(graph_module)
    slots += [Slot("constant", index, f"constant{index}") for index in range(len(constants))]
    outputs = _separate_mutations(graph_module)
    return normal_form(
        graph_module, slots, outputs, program, call, constants, method="guarded" if following else "trace"
    )


def _lifted_constants(graph_module: GraphModule) -> list[Tensor]:
    """Turn tensors that the forward made from numbers, which the graph holds, into inputs; these in order."""
    mode = fake_mode_of(graph_module)
    last = placeholders(graph_module)[-1]
    found: list[Tensor] = []
    for node in [node for node in graph_module.graph.nodes if node.op == "get_attr"]:
        held = getattr(graph_module, str(node.target))
        if isinstance(held, Tensor):
            with graph_module.graph.inserting_after(last):
                last = graph_module.graph.placeholder(f"constant{len(found)}")
            last.meta = {**node.meta, "val": mode.from_tensor(held)}
            node.replace_all_uses_with(last)
            graph_module.graph.erase_node(node)
            found.append(held)
    return found


def _only_users_stops(graph_module: GraphModule) -> None:
    """Autograd detaches what it saved, which is no stop of the user's; those are marked."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in graph.nodes:
        if node.target is torch.ops.gramfx.stop_gradient.default:
            node.target = aten.detach.default
    graph_module.recompile()


def _separate_mutations(graph_module: GraphModule) -> list[int | None]:
    """Turn trailing copies into placeholders into outputs; say which placeholder each output renews."""
    graph = graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    copies = [node for node in graph.nodes if node.target is aten.copy_.default]
    output = next(node for node in graph.nodes if node.op == "output")
    returned = output.args[0] if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    renewed: list[int | None] = []
    values: list[Node] = []
    for copy in copies:
        if copy.args[0] not in placeholders:
            raise CaptureError("an in-place operation could not be made functional", got=str(copy))
        renewed.append(placeholders.index(copy.args[0]))
        values.append(copy.args[1])
        copy.replace_all_uses_with(copy.args[1])
        graph.erase_node(copy)
    output.args = ((*returned, *values),)
    return [*(None for _ in returned), *renewed]


def explain(failures: Sequence[Exception]) -> GramfxError:
    """The error to show when every way of capturing failed."""
    for failure in failures:
        if isinstance(failure, DATA_DEPENDENT):
            return DataDependentError(
                "the model's control flow or shapes depend on tensor values",
                expected="a graph that is the same for all values",
                got=_first_line(failure),
                where=user_frame(traceback.extract_tb(failure.__traceback__)),
                remedy="use torch.where, masks or fixed shapes instead of Python branches, .item() and nonzero()",
            )
    for failure in failures:
        if isinstance(failure, GramfxError):
            return failure
    first = failures[0]
    return CaptureError(
        "the model could not be captured as a graph",
        expected="a model that torch.export or tracing can follow",
        got=f"{type(first).__name__}: {_first_line(first)}",
        where=user_frame(traceback.extract_tb(first.__traceback__)),
        remedy="move what torch cannot follow out of the model, or write it with torch operations",
    )


def _first_line(failure: Exception) -> str:
    return next((line for line in str(failure).splitlines() if line.strip()), type(failure).__name__)
