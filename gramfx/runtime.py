"""Running a lowered program as part of autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule

from gramfx.captured import Captured
from gramfx.devices import cuda_devices
from gramfx.distributed import Averaging
from gramfx.fitting import Lowering
from gramfx.gradients import replayed_gradient, wanted_slots
from gramfx.plan import Plan
from gramfx.program import Program
from gramfx.readings import Checked, ReadingChangedError, draws_taken_back
from gramfx.torch_compat import (
    autocast_off,
    boxed,
    compile_graph,
    fake_batch_size,
    graph_kept,
    is_symbolic,
    trace,
)

Runnable = Callable[..., Any]
#: What averages gradients over processes, and the leaves that they are of.
Owed = tuple[Averaging, list[Tensor]] | None


@dataclass
class Compiled:
    """One lowered capture, ready to run on the tensors of its slots.

    Its gradient, ``[*slots, *saved, weights] -> gradients``, is compiled at the first backward.
    """

    captured: Captured
    lowering: Lowering
    use_inductor: bool
    run: Runnable = field(init=False)
    wanted: tuple[int, ...] = field(init=False)
    static: bool = field(init=False)
    _gradient: Runnable | None = None

    def __post_init__(self) -> None:
        graph_module = self.lowering.stages["lowered"]
        readings = self.captured.readings
        self.run = Checked(graph_module, readings) if readings else self._runnable(graph_module)
        self.static = not is_symbolic(fake_batch_size(self.captured.graph_module))
        self.wanted = tuple(wanted_slots(graph_module))

    def _runnable(self, graph_module: GraphModule) -> Runnable:
        if not self.use_inductor:
            return graph_module
        return compile_graph(graph_module, random=bool(self.lowering.draws))

    def __call__(self, program: Program, inputs: Sequence[Tensor], averaging: Averaging) -> tuple[Tensor, Tensor]:
        """``(objectives, gramian)``; buffers and inputs that the forward changes are changed.

        Raises :class:`ReadingChangedError`, before anything is changed, where this capture does not serve the call.
        """
        tensors = self.captured.fetch(program, inputs)
        leaves = [self.captured.slots[index].held(program, inputs) for index in self.wanted]
        owed = (averaging, leaves) if averaging.groups else None
        with draws_taken_back(tensors) if self.captured.readings else contextlib.nullcontext():
            return _Objectives.apply(self, tensors, owed, *(tensors[index] for index in self.wanted))

    def serves(self, program: Program, inputs: Sequence[Tensor]) -> bool:
        """Whether the call reads what this capture read."""
        if not self.captured.readings:
            return True
        tensors = [tensor.detach().contiguous() for tensor in self.captured.fetch(program, inputs)]
        with torch.random.fork_rng(cuda_devices(tensors)), torch.no_grad(), autocast_off():
            try:
                self.run(*tensors)
            except ReadingChangedError:
                return False
        return True

    @property
    def plan(self) -> Plan:
        """How its Gramian is contracted."""
        assert self.lowering.plan is not None
        return self.lowering.plan

    @property
    def gradient(self) -> Runnable:
        """From what was kept, or replayed, as planned; made when first asked for."""
        if self._gradient is None:
            graph_module = gradient_graph(self.lowering)
            self._gradient = self._boxed(graph_module) if graph_module else self._replayed()
        return self._gradient

    def _boxed(self, graph_module: GraphModule) -> Runnable:
        """Takes its arguments in a list, which it empties, so that op by op they are freed at their last use."""
        if not self.use_inductor:
            return boxed(graph_module)
        compiled = self._runnable(graph_module)
        # Inductor takes the strides of the trace for granted.
        return lambda tensors: compiled(*(tensor.contiguous() for tensor in tensors))

    def _replayed(self) -> Runnable:
        replay, _ = replayed_gradient(self.lowering.stages["canonical"], self.lowering.draws)
        return lambda tensors: replay(*tensors)


def gradient_graph(lowering: Lowering) -> GraphModule | None:
    """``(*slots, *saved, weights) -> gradients``, from what was kept or replayed, as planned.

    ``None`` where a trace of the replay cannot keep the symbolic batch: then it has to run op by op.
    """
    assert lowering.plan is not None
    if lowering.plan.gradient == "kept" and lowering.kept is not None:
        return lowering.kept.graph_module
    canonical = lowering.stages["canonical"]
    replay, fakes = replayed_gradient(canonical, lowering.draws)
    size = fake_batch_size(canonical)
    if not is_symbolic(size):
        return trace(replay, fakes)
    try:
        traced = trace(replay, fakes)
    except Exception:
        return None
    return traced if is_symbolic(size) else None


class _Objectives(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compiled: Compiled, tensors: list[Tensor], owed: Owed, *wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        given = [tensor.detach() for tensor in tensors]
        with torch.no_grad(), autocast_off():
            # Inductor takes strides for granted; a graph run op by op is given the same for one behaviour of both.
            objectives, gramian, *rest = compiled.run(*(tensor.contiguous() for tensor in given))
            mutated = compiled.captured.mutated
            before = {index: given[index].clone() for index in mutated}
            for index, new in zip(mutated, rest, strict=False):
                given[index].copy_(new)
        saved = [before.get(index, tensor) for index, tensor in enumerate(tensors)] + list(rest[len(mutated) :])
        # What shares memory with no input or result is nobody else's: it is freed as the backward uses it.
        shared = {tensor.untyped_storage().data_ptr() for tensor in (*tensors, objectives, gramian)}
        ctx.own = {
            index: tensor
            for index, tensor in enumerate(saved)
            if index >= len(tensors) and tensor.untyped_storage().data_ptr() not in shared
        }
        ctx.count, ctx.compiled, ctx.owed = len(saved), compiled, owed
        ctx.save_for_backward(*(tensor for index, tensor in enumerate(saved) if index not in ctx.own))
        ctx.mark_non_differentiable(gramian)
        return objectives, gramian

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor, _: Tensor) -> tuple[Any, ...]:
        others = iter(ctx.saved_tensors)
        saved = [(ctx.own[index] if index in ctx.own else next(others)).detach() for index in range(ctx.count)]
        if not graph_kept():
            ctx.own = {}
        with torch.no_grad(), autocast_off():
            gradients = ctx.compiled.gradient([*saved, weights.contiguous()])
        if ctx.owed is not None:
            averaging, leaves = ctx.owed
            averaging.after_backward(leaves)
        return (None, None, None, *gradients)
