"""The first stage: a program as a functional ATen graph, by the first method whose graph agrees with the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from gramfx.agreement import check, unmark_lengths
from gramfx.attributes import changed, plain_state, put_back, readings_left, run_anew
from gramfx.captured import Captured
from gramfx.discovery import Attribute, attributes_kept, tensor_attributes
from gramfx.eager import Reference, random_state_kept, reference_of, with_noise
from gramfx.errors import (
    CaptureMismatchError,
    DataDependentError,
    GramfxError,
    UnsupportedError,
)
from gramfx.export import by_export
from gramfx.following import by_comparisons, by_values
from gramfx.functions import functions_recorded
from gramfx.graph import where
from gramfx.program import Call, Program
from gramfx.torch_compat import (
    DATA_DEPENDENT,
    data_dependent,
    functorch_levels_closed,
    numberless,
)
from gramfx.tracing import by_tracing, explain


def capture(program: Program, call: Call, *, dynamic: bool, trial: bool = True, reads: bool = False) -> Captured:
    """Capture ``program`` for calls like ``call``; with ``dynamic`` for any batch size of at least 2.

    trial: whether to compare the graph with the model itself; without, the model is seen on fake tensors alone.
    reads: whether the model is known to read tensor values, so that only following it can succeed.
    Raises a :class:`CaptureError` where no way of capturing gives a graph that agrees with the model, an
    :class:`ObjectiveError` or :class:`NoTrainableParameterError` where there is nothing to differentiate.
    """
    program.call = call
    before, tensors = plain_state(program), tensor_attributes(program)
    try:
        with contextlib.nullcontext() if trial else _fakes_alone():
            reference = reference_of(program, call)
        _refuse_carried_tensors(program, tensors)
        lasting = not changed(before, plain_state(program))
        with run_anew(before, program):
            captured = _captured(program, call, reference, dynamic, trial, reads)
    except BaseException:
        put_back(before)
        raise
    captured.differentiable, captured.lasting = reference.differentiable, lasting and captured.lasting
    return captured


def _captured(program: Program, call: Call, reference: Reference, dynamic: bool, trial: bool, reads: bool) -> Captured:
    found = plain_state(program)
    if trial:
        with run_anew(found, program):
            reference = with_noise(reference, program, call)
    failures: list[Exception] = []
    # Export does not follow a nested tensor that is made inside.
    others = () if reads else (by_tracing,) if call.nested else (by_export, by_tracing)
    for method in (*others, by_comparisons, by_values):
        follows = method in (by_comparisons, by_values)
        if follows and not reads and (dynamic or not trial or not any(map(_may_read_values, failures))):
            break
        try:
            with _traces_leave_nothing(program, call), run_anew(found, program), readings_left(program) as left:
                captured = method(program, call, dynamic)
            captured.lasting = not any(left)
            _refuse_data_dependent(captured)
            if trial:
                check(captured, program, call, reference)
            unmark_lengths(captured)
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
        random_state_kept(program, call),
        functions_recorded(),
        functorch_levels_closed(),
        attributes_kept(program),
    ):
        yield


def _refuse_carried_tensors(program: Program, before: dict[Attribute, tuple[nn.Module, Tensor]]) -> None:
    """Raise where the forward read a tensor from an attribute that it then set anew."""
    read, after = {id(tensor) for tensor in program.loose}, tensor_attributes(program)
    for key, (module, tensor) in before.items():
        if id(tensor) in read and (key not in after or after[key][1] is not tensor):
            raise UnsupportedError(
                "the forward carries a tensor from one call to the next in an attribute",
                got=f"attribute {key[1]!r} of a {type(module).__name__}",
                remedy="make it a buffer, and change it in place",
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
