"""Capture by ``torch.export``: whole, functional ATen ops with module paths and source lines."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gramfx.captured import Captured, Slot, normal_form, slot_of_input, slot_of_state
from gramfx.program import Call, Program
from gramfx.recurrent import CELLS, LAYERS
from gramfx.substitutes import as_captured
from gramfx.torch_compat import InputKind, OutputKind, export_program


def by_export(program: Program, call: Call, dynamic: bool) -> Captured:
    """Capture by export. Raises whatever torch raises."""
    tensors = [tensor.detach().contiguous() for tensor in (*call.tensors, *program.loose)]
    dims = [*call.batch_dims, *(None for _ in program.loose)]
    with as_captured(program):
        exported = export_program(program, tensors, dims, dynamic, {**CELLS, **LAYERS})
    slots, names, constants = _slots(exported, call)
    outputs = [_renewed(spec, names) for spec in exported.graph_signature.output_specs]
    return normal_form(exported.graph_module, slots, outputs, program, call, constants, "export")


def _slots(exported: Any, call: Call) -> tuple[list[Slot], dict[str, int], list[Tensor]]:
    slots: list[Slot] = []
    names: dict[str, int] = {}
    constants: list[Tensor] = []
    for index, spec in enumerate(exported.graph_signature.input_specs):
        names[spec.target or spec.arg.name] = index
        names[spec.arg.name] = index
        if spec.kind == InputKind.USER_INPUT:
            slots.append(slot_of_input(sum(slot.kind == "input" for slot in slots), call))
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            slots.append(Slot("constant", len(constants), spec.target))
            constants.append(exported.constants[spec.target])
        else:
            slots.append(slot_of_state(spec.target, spec.kind == InputKind.PARAMETER))
    return slots, names, constants


def _renewed(spec: Any, names: dict[str, int]) -> int | None:
    """The placeholder whose new value an output is; ``None`` for the objectives."""
    return None if spec.kind == OutputKind.USER_OUTPUT else names[spec.target]
