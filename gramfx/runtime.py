"""Running a lowered program as part of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule, Interpreter, Node

from gramfx.captured import Captured
from gramfx.graph import named, placeholders, results, value
from gramfx.pipeline import Lowering
from gramfx.plan import Plan
from gramfx.program import Program
from gramfx.torch_compat import (
    autocast_off,
    compile_graph,
    contiguous,
    fake_batch_size,
    fake_mode_of,
    is_symbolic,
    trace,
)

Runnable = Callable[..., Any]


@dataclass
class Compiled:
    """One lowered capture, ready to run on the tensors of its slots.

    Its gradient, ``(*slots, *random draws, weights) -> gradients``, is made at the first backward.
    """

    captured: Captured
    lowering: Lowering
    use_inductor: bool
    run: Runnable = field(init=False)
    learned: tuple[int, ...] = field(init=False)
    static: bool = field(init=False)
    _gradient: Runnable | None = None

    def __post_init__(self) -> None:
        graph_module = self.lowering.stages["lowered"]
        self.run = self._runnable(graph_module)
        inputs = placeholders(graph_module)
        self.static = not is_symbolic(fake_batch_size(self.captured.graph_module))
        self.learned = tuple(index for index, node in enumerate(inputs) if "parameter" in node.meta)

    def _runnable(self, graph_module: GraphModule) -> Runnable:
        if not self.use_inductor:
            return graph_module
        return compile_graph(graph_module, random=bool(self.lowering.draws))

    def __call__(self, program: Program, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """``(objectives, gramian)``; buffers and inputs that the forward changes are changed."""
        tensors = self.captured.fetch(program, inputs)
        parameters = [tensors[index] for index in self.learned]
        return _Objectives.apply(self, tensors, *parameters)

    @property
    def plan(self) -> Plan:
        """How its Gramian is contracted."""
        assert self.lowering.plan is not None
        return self.lowering.plan

    @property
    def gradient(self) -> Runnable:
        """The replayed backward, made when first asked for."""
        if self._gradient is None:
            self._gradient = self._make_gradient()
        return self._gradient

    def _make_gradient(self) -> Runnable:
        """Traced and compiled as the step is; a symbolic batch that a trace cannot keep is replayed op by op."""
        replay, fakes = replayed_gradient(self.lowering)
        size = fake_batch_size(self.lowering.stages["canonical"])
        if not is_symbolic(size):
            return self._runnable(trace(replay, fakes))
        try:
            traced = trace(replay, fakes)
        except Exception:
            return replay
        return self._runnable(traced) if is_symbolic(size) else replay


class _Objectives(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compiled: Compiled, tensors: list[Tensor], *parameters: Tensor) -> tuple[Tensor, Tensor]:
        given = [tensor.detach() for tensor in tensors]
        with torch.no_grad(), autocast_off():
            # Inductor takes strides for granted; a graph run op by op is given the same for one behaviour of both.
            objectives, gramian, *rest = compiled.run(*(tensor.contiguous() for tensor in given))
            mutated = compiled.captured.mutated
            before = {index: given[index].clone() for index in mutated}
            for index, new in zip(mutated, rest, strict=False):
                given[index].copy_(new)
        kept = [before.get(index, tensor) for index, tensor in enumerate(tensors)]
        ctx.compiled = compiled
        ctx.save_for_backward(*kept, *rest[len(mutated) :])
        ctx.mark_non_differentiable(gramian)
        return objectives, gramian

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor, _: Tensor) -> tuple[Any, ...]:
        saved = [tensor.detach().contiguous() for tensor in ctx.saved_tensors]
        with torch.no_grad(), autocast_off():
            gradients = ctx.compiled.gradient(*saved, weights.contiguous())
        return (None, None, *gradients)


class _Replayed(Interpreter):
    """Runs a graph with some of its nodes' values given."""

    def __init__(self, graph_module: GraphModule, given: dict[Node, Any]) -> None:
        super().__init__(graph_module)
        self.given = given

    def run_node(self, n: Node) -> Any:
        return self.given[n] if n in self.given else super().run_node(n)


def replayed_gradient(lowering: Lowering) -> tuple[Runnable, list[Any]]:
    """``(*slots, *random draws, weights) -> Jᵀ weights`` for each trainable slot, and fakes to trace it with.

    Zeros where nothing depends on a slot.
    """
    graph_module = lowering.stages["canonical"]
    inputs = placeholders(graph_module)
    learned = [index for index, node in enumerate(inputs) if "parameter" in node.meta]
    drawn = [named(graph_module)[name] for name in lowering.draws]
    fakes = [contiguous(value(node)) for node in (*inputs, *drawn)]
    with fake_mode_of(graph_module):
        weights = torch.empty_like(value(results(graph_module)[0]), memory_format=torch.contiguous_format)

    def run(*tensors: Tensor) -> list[Tensor]:
        *given, seed = tensors
        leaves = [t.detach() for t in given[: len(inputs)]]
        for index in learned:
            leaves[index].requires_grad_()
        with torch.enable_grad():
            replay = _Replayed(graph_module, dict(zip(drawn, given[len(inputs) :], strict=True)))
            objectives = replay.run(*leaves)[0]
            wanted = [leaves[index] for index in learned]
            if not objectives.requires_grad:
                return [torch.zeros_like(leaf) for leaf in wanted]
            found = torch.autograd.grad(objectives, wanted, seed, allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, wanted, strict=True)]

    return run, [*fakes, weights]
