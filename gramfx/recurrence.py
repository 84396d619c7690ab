"""One direction of a recurrent layer as one op, forward and backward; its loop over time never enters a graph.

``gramfx::recurrence`` is what captures hold. Where it is differentiated it runs ``recurrence_forward`` and
``recurrence_backward``, so that a joint graph holds these. With ``h`` the state before each step and ``a`` what the
gates see of it, ``a = h Wᵀ + b``, the gradients by ``W`` and ``b`` are ``Σ_t ȧ_tᵀ h_t`` and ``Σ_t ȧ_t``: one product
over all steps, which the op leaves to whoever wants it by giving ``ȧ`` as the cotangent of a ``probe`` of zeros.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gramfx.recurrence_kernels import GATES, backward, forward
from gramfx.torch_compat import below_autograd, function_applied

OUT, LAST, LAST_CELL, BEFORE, HIDDEN = range(5)
_OUTPUTS = "(Tensor out, Tensor last, Tensor last_cell, Tensor before, Tensor hidden, Tensor gates, Tensor cells)"
_INPUTS = (
    "Tensor rows, Tensor start, Tensor? start_cell, Tensor weight, Tensor? bias, Tensor? projection, Tensor? alive"
)

_library = torch.library.Library("gramfx", "FRAGMENT")
_library.define(f"recurrence(str kind, {_INPUTS}, Tensor probe, Tensor? probe_out, bool reverse) -> {_OUTPUTS}")
_library.define(f"recurrence_forward(str kind, {_INPUTS}, bool reverse) -> {_OUTPUTS}")
_library.define(
    "recurrence_backward(str kind, Tensor d_out, Tensor d_last, Tensor d_last_cell, Tensor weight, Tensor? projection, "
    "Tensor? alive, Tensor? start_cell, Tensor before, Tensor gates, Tensor cells, bool reverse) "
    "-> (Tensor d_seen, Tensor d_rows, Tensor d_start, Tensor d_start_cell, Tensor d_projected)"
)
recurrence = torch.ops.gramfx.recurrence.default
_forward_op = torch.ops.gramfx.recurrence_forward.default
_backward_op = torch.ops.gramfx.recurrence_backward.default


def _shapes(
    kind: str,
    rows: Tensor,
    start: Tensor,
    start_cell: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    steps, batch, width = rows.shape
    units, of = width // GATES[kind], rows.new_empty
    state = of(steps, batch, start.shape[-1])
    hidden = of(0) if projection is None else of(steps, batch, units)
    cells = of(steps, batch, units) if kind in ("lstm", "gru") else of(0)
    last_cell = of(batch, units) if kind == "lstm" else of(0)
    return state, torch.empty_like(start), last_cell, torch.empty_like(state), hidden, of(steps, batch, width), cells


def _shapes_backward(
    kind: str,
    d_out: Tensor,
    d_last: Tensor,
    d_last_cell: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    alive: Tensor | None,
    start_cell: Tensor | None,
    before: Tensor,
    gates: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    lead, of = d_out.shape[:-3], d_out.new_empty
    seen = of(*lead, *gates.shape)
    d_rows = torch.empty_like(seen) if kind == "gru" else of(0)
    d_projected = of(0) if projection is None else of(*d_out.shape)
    d_start_cell = of(*d_last_cell.shape) if kind == "lstm" else of(0)
    return seen, d_rows, of(*d_last.shape), d_start_cell, d_projected


_traced = False


@contextlib.contextmanager
def recurrences_whole() -> Iterator[None]:
    """While a model is traced, let each layer and direction be one op of the trace, which is differentiated later."""
    global _traced
    before, _traced = _traced, True
    try:
        yield
    finally:
        _traced = before


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, *given: Any) -> Any:
        *inputs, _, _, reverse = given
        made = recurrence(kind, *given) if _traced else _forward_op(kind, *inputs, reverse)
        ctx.kind, ctx.reverse = kind, reverse
        ctx.save_for_backward(*inputs, *made[BEFORE:])
        ctx.mark_non_differentiable(*made[BEFORE:])
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        rows, start, start_cell, weight, _, projection, alive, before, hidden, gates, cells = ctx.saved_tensors
        d_out = rows.new_zeros(before.shape) if cotangents[OUT] is None else cotangents[OUT]
        d_last = torch.zeros_like(start) if cotangents[LAST] is None else cotangents[LAST]
        d_cell = cotangents[LAST_CELL]
        d_cell = (
            (rows.new_zeros(0) if start_cell is None else torch.zeros_like(start_cell)) if d_cell is None else d_cell
        )
        held = (weight, projection, alive, start_cell, before, gates, cells, ctx.reverse)
        seen, d_rows, d_start, d_start_cell, d_projected = _backward_op(ctx.kind, d_out, d_last, d_cell, *held)
        wanted = ctx.needs_input_grad
        return (
            None,
            d_rows if ctx.kind == "gru" else seen,
            d_start,
            None if start_cell is None else d_start_cell,
            seen.flatten(0, 1).t() @ before.flatten(0, 1) if wanted[4] else None,
            seen.sum((0, 1)) if wanted[5] else None,
            d_projected.flatten(0, 1).t() @ hidden.flatten(0, 1) if wanted[6] else None,
            None,
            seen,
            None if projection is None else d_projected,
            None,
        )


def _autograd(*arguments: Any) -> Any:
    """What stays one op in a capture, which has no gradients, is looked into where it is differentiated."""
    needed = any(isinstance(one, Tensor) and one.requires_grad for one in arguments)
    if torch.is_grad_enabled() and needed:
        return function_applied(_Differentiated, *arguments)
    with below_autograd():
        return recurrence(*arguments)


def _whole(kind: str, *given: Any) -> Any:
    *inputs, _, _, reverse = given
    return _forward_op(kind, *inputs, reverse)


def _several(info: Any, in_dims: tuple[Any, ...], kind: str, *given: Any) -> Any:
    """Cotangents under ``vmap``: one more leading dim."""
    cotangents, held = given[:3], given[3:]
    if any(dim is not None for dim in in_dims[4:]):
        raise NotImplementedError("batching rule of recurrence_backward for what the forward kept")
    lead = [
        one.movedim(dim, 0) if dim is not None else one.expand(info.batch_size, *one.shape)
        for one, dim in zip(cotangents, in_dims[1:4], strict=True)
    ]
    made = _backward_op(kind, *lead, *held)
    return made, tuple(None if one.dim() == 1 else 0 for one in made)


def _numel(shape: Any) -> Any:
    return 0 if shape is None else math.prod(shape)


for _name, _kernel in (("recurrence", _whole), ("recurrence_forward", forward), ("recurrence_backward", backward)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
_library.impl("recurrence", _autograd, "Autograd")
torch.library.register_fake("gramfx::recurrence", _shapes, lib=_library)
torch.library.register_fake("gramfx::recurrence_forward", _shapes, lib=_library)
torch.library.register_fake("gramfx::recurrence_backward", _shapes_backward, lib=_library)
torch.library.register_vmap("gramfx::recurrence_backward", _several, lib=_library)


# Sizes may be symbols, which a number made of them would fix.
@register_flop_formula(torch.ops.gramfx.recurrence_forward)
def _(kind: str, rows: Any, start: Any, cell: Any, weight: Any, bias: Any, projection: Any, *_: Any, **__: Any) -> Any:
    """One product with the recurrent weight a step, and one with the projection."""
    return 2 * math.prod(rows[:2]) * (_numel(weight) + _numel(projection))


@register_flop_formula(torch.ops.gramfx.recurrence_backward)
def _(kind: str, d_out: Any, last: Any, cell: Any, weight: Any, projection: Any, *_: Any, **__: Any) -> Any:
    """The same for each cotangent."""
    return 2 * math.prod(d_out[:-1]) * (_numel(weight) + _numel(projection))
