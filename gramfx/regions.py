"""A region of a model, compiled with its outputs' cotangents for inputs.

Three programs are cut from one joint graph: the forward, which keeps what the others need; the gradient; and the
Gramian of the objectives whose cotangents come in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gramfx.artifacts import record
from gramfx.axes import Value
from gramfx.captured import Captured
from gramfx.fitting import Fitted, Lowering, Planning, fitted
from gramfx.gradients import wanted_slots
from gramfx.gramians import gramian_nodes
from gramfx.graph import named, output_node, placeholders, rename, results, value
from gramfx.memory import nbytes
from gramfx.passes.canonicalize import canonicalize, verify_canonical
from gramfx.passes.fix_batch import fix_batch
from gramfx.passes.lower_contractions import verify_lowered
from gramfx.passes.partition import extract, residuals
from gramfx.passes.plan_contractions import Bounds
from gramfx.passes.seed_outputs import Places, seed_outputs
from gramfx.pipeline import hint_of, insert, report_coupling, trace_batch
from gramfx.torch_compat import compile_graph, contiguous, is_symbolic
from gramfx.uses import StaticBatchNeeded

Runnable = Callable[..., Any]


@dataclass(frozen=True)
class Mode:
    """Which objectives come in: ``count`` cotangents of each output, stacked, or one where it is 0; each of one
    objective a sample where ``batched``, of one objective else. ``excluded``: parameters by which not to differentiate.
    """

    count: int = 0
    batched: bool = True
    excluded: frozenset[str] = frozenset()


SINGLE = Mode()


@dataclass
class GramianProgram:
    """``(*inputs, *cotangents) -> Gramian``, planned for the batch sizes that come."""

    graph_module: GraphModule
    bounds: Bounds
    lowering: Lowering
    planning: Planning
    compiled: Callable[[GraphModule], Runnable]
    made: list[tuple[Fitted, Runnable]] = field(default_factory=list)
    tried: int = 0

    def at(self, batch: int) -> Runnable:
        """The program for a batch size."""
        for one, runnable in self.made:
            if batch in one.plan.regime:
                return runnable
        one = fitted(self.graph_module, batch, self.bounds, self.planning)
        verify_lowered(one.lowered)
        stages = {**self.lowering.stages, "gramian": one.gramian, "planned": one.planned, "lowered": one.lowered}
        record(dataclasses.replace(self.lowering, stages=stages, plan=one.plan))
        self.made.append((one, self.compiled(one.lowered)))
        return self.made[-1][1]

    @property
    def untried(self) -> bool:
        """Whether the latest program has still to stand its trial."""
        return self.tried < len(self.made)

    def passed(self) -> None:
        """The latest program stood its trial."""
        self.tried = len(self.made)


class CompiledRegion:
    """One capture of a region.

    Its forward takes the slots and gives ``(*outputs, *new values of mutated slots, *saved)``; the gradient takes
    ``(*slots, *saved, *cotangents)``. ``seeded`` numbers the outputs that have cotangents; ``places`` is the dim of
    each that holds the samples.
    """

    def __init__(
        self, captured: Captured, batch_size: int | torch.SymInt | None, planning: Planning, use_inductor: bool
    ) -> None:
        symbolic = is_symbolic(batch_size)
        self.captured, self.planning, self.use_inductor = captured, planning, use_inductor
        self.seeded = [index for index, flag in enumerate(captured.differentiable) if flag]
        self.canonical = canonicalize(captured.graph_module)
        verify_canonical(self.canonical)
        self.places = self._places(batch_size)
        self.batched = any(dim is not None for dim in self.places)
        self.lowering = Lowering()
        self.lowering.stages["canonical"] = seed_outputs(
            self.canonical, self.seeded, Places(self.places, batched=self.batched)
        )
        self.batch_size = batch_size if self.batched else None
        seeds = {f"cotangent{number}": index + 1 for number, index in enumerate(self.seeded)}
        joint = insert(self.lowering, self.batch_size, seeds=seeds)
        if symbolic and not is_symbolic(batch_size):
            raise StaticBatchNeeded("an op of the model fixes the batch size")
        self._cut(joint.gradients)
        #: By mode, and by the batch size where a mode needs one that is no symbol.
        self.gramians: dict[tuple[Mode, int | None], GramianProgram] = {}
        self.static: set[Mode] = set()

    def _places(self, batch_size: int | torch.SymInt | None) -> tuple[int | None, ...]:
        """The dim of each differentiable output that holds the samples, and nothing else."""
        if batch_size is None:
            return (None,) * len(self.seeded)
        traced = _copied(self.canonical)
        trace_batch(traced, batch_size)
        return tuple(_place(results(traced)[index], batch_size) for index in self.seeded)

    def _cut(self, gradients: dict[str, str | None]) -> None:
        """The forward and the gradient, and what the Gramian is made from."""
        graph_module = self.lowering.inserted
        assert graph_module is not None
        nodes, returned = named(graph_module), results(graph_module)
        inputs = placeholders(graph_module)
        self.slots = inputs[: len(inputs) - len(self.seeded)]
        seeds = inputs[len(self.slots) :]
        count = len(self.captured.differentiable) + len(self.captured.mutated)
        drawn = returned[2 + count : 2 + count + len(self.lowering.draws)]
        self.wanted = [inputs[index] for index in wanted_slots(graph_module)]
        made = [nodes[name] for node in self.wanted if (name := gradients[node.name])]
        self.reached = [bool(gradients[node.name]) for node in self.wanted]
        for node in gramian_nodes(graph_module):
            # Its objectives are never read; with them all outputs would be kept, and could not be changed in place.
            node.args = (node.args[0], seeds[0], *node.args[2:])
        kept = residuals(graph_module, seeds, [returned[1], *made])
        self.saved = list(dict.fromkeys([*kept, *drawn]))
        self.draws = [self.saved.index(node) for node in drawn]
        self.forward_graph = extract(graph_module, self.slots, [*returned[2 : 2 + count], *self.saved])
        given = [*self.slots, *self.saved, *seeds]
        self.gradient_graph = extract(graph_module, given, made)
        self.gramian_graph = extract(graph_module, given, [returned[1]])

    # ------------------------------------------------------------ runnables

    def _runnable(self, graph_module: GraphModule) -> Runnable:
        if not self.use_inductor:
            return graph_module
        return compile_graph(graph_module, random=bool(self.lowering.draws))

    @functools.cached_property
    def forward(self) -> Runnable:
        """``(*slots) -> (*outputs, *new values of mutated slots, *saved)``."""
        return self._runnable(self.forward_graph)

    @functools.cached_property
    def gradient(self) -> Runnable:
        """``(*slots, *saved, *cotangents) -> gradients`` of the wanted slots that a gradient reaches."""
        return self._runnable(self.gradient_graph)

    def gramian(self, mode: Mode, batch: int | None, coupled: str) -> GramianProgram:
        """``(*slots, *saved, *cotangents) -> Gramian`` for the single mode, with ``draws`` for ``saved`` in others.

        coupled: ``"error"`` where an op inside shall not mix samples; else the first call for a mode warns of it.
        """
        new = (mode, self._fixed(mode, batch)) not in self.gramians
        if new:
            self._make(mode, batch)
        program = self.gramians[mode, self._fixed(mode, batch)]
        if mode.batched and (new or coupled == "error"):
            report_coupling(program.lowering, "error" if coupled == "error" else "warn")
        return program

    def _fixed(self, mode: Mode, batch: int | None) -> int | None:
        """The batch size that a program for this mode is made for, where it cannot be a symbol."""
        return batch if is_symbolic(self.batch_size) and (not mode.batched or mode in self.static) else None

    def _make(self, mode: Mode, batch: int | None) -> None:
        fixed = self._fixed(mode, batch)
        try:
            self.gramians[mode, fixed] = self._shared() if mode == SINGLE else self._alone(mode, fixed)
        except StaticBatchNeeded:
            if fixed is not None or batch is None:
                raise
            self.static.add(mode)
            self._make(mode, batch)

    def _shared(self) -> GramianProgram:
        kept = [(node, 0) for node in self.saved]

        def rest(batch: int) -> int:
            return max(0, self.lowering.plain_peak(batch) - sum(nbytes(one, batch) for one in kept))

        return self._program(self.gramian_graph, rest, self.lowering, None)

    def _alone(self, mode: Mode, fixed: int | None) -> GramianProgram:
        """Replays the forward, with the draws of the first run. fixed: the only batch size, where it is no symbol."""
        lowering = Lowering()
        drawn = _with_draws_given(self.canonical, self.lowering.draws)
        drawn = drawn if fixed is None else fix_batch(drawn, fixed)
        for node in placeholders(drawn):
            if node.meta.get("parameter") in mode.excluded:
                del node.meta["parameter"]
        places = Places(self.places, mode.count, mode.batched)
        lowering.stages["canonical"] = seed_outputs(drawn, self.seeded, places)
        insert(lowering, (self.batch_size if fixed is None else fixed) if mode.batched else None)
        graph_module = lowering.inserted
        assert graph_module is not None
        output_node(graph_module).args = ((results(graph_module)[1],),)
        graph_module.graph.eliminate_dead_code()
        return self._program(graph_module, lowering.plain_peak, lowering, fixed)

    def _program(
        self, graph_module: GraphModule, plain: Callable[[int], int], lowering: Lowering, fixed: int | None
    ) -> GramianProgram:
        def budget(batch: int) -> int:
            return self.planning.budget(self.lowering.plain_peak(fixed or batch))

        return GramianProgram(graph_module, Bounds(plain, budget), lowering, self.planning, self._runnable)


def _copied(graph_module: GraphModule) -> GraphModule:
    return extract(graph_module, placeholders(graph_module), results(graph_module))


def _place(node: Node, batch_size: int | torch.SymInt) -> int | None:
    axes = node.meta.get("axes")
    loc = axes.batch if isinstance(axes, Value) else None
    if loc is None or loc.inner != 1:
        return None
    size = value(node).shape[loc.dim]
    return loc.dim if hint_of(size) == hint_of(batch_size) else None


def _with_draws_given(graph_module: GraphModule, draws: Sequence[str]) -> GraphModule:
    """Random draws become placeholders, after the slots."""
    graph_module = _copied(graph_module)
    nodes = named(graph_module)
    for number, name in enumerate(draws):
        node = nodes[name]
        with graph_module.graph.inserting_after(placeholders(graph_module)[-1]):
            given = graph_module.graph.placeholder(f"draw{number}")
        given.meta = {"val": contiguous(value(node)), "requires_grad": False, "batch_dim": None}
        rename(given, f"draw{number}")
        given.target = given.name
        node.replace_all_uses_with(given)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def batch_rows(gramian: Tensor, before: int, batch: int, after: int) -> Tensor:
    """From rows ``(before after) batch`` to the objectives' own row-major order ``before batch after``."""
    order = (before, after, batch)
    whole = gramian.reshape(*order, *order).permute(0, 2, 1, 3, 5, 4)
    count = before * batch * after
    return whole.reshape(count, count)
