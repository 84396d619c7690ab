"""The compiler, as one list of stages. Read this first."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import GraphModule, Node

from gramfx.axes import Value
from gramfx.baseline import plain_flops, plain_peak
from gramfx.captured import Captured
from gramfx.cost import flops_of
from gramfx.errors import CoupledObjectivesError, CoupledObjectivesWarning, MemoryBudgetError
from gramfx.gramians import gramian_nodes, terms_of
from gramfx.graph import placeholders, results, value, verify_functional, where
from gramfx.machine import machine_of
from gramfx.memory import Profile, profile
from gramfx.passes.canonicalize import canonicalize, verify_canonical
from gramfx.passes.differentiate import differentiate, verify_joint
from gramfx.passes.erase_clones import erase_clones
from gramfx.passes.insert_gramians import insert_gramians, verify_gramian
from gramfx.passes.lower_contractions import lower_contractions, verify_lowered
from gramfx.passes.plan_contractions import (
    Bounds,
    Order,
    fastest_predicted,
    plan_contractions,
    verify_planned,
)
from gramfx.passes.schedule import schedule
from gramfx.passes.separate_uses import separate_uses
from gramfx.passes.trace_axes import Coupling, trace_axes, verify_batched
from gramfx.plan import Plan, Totals
from gramfx.source import warn_user
from gramfx.torch_compat import is_symbolic
from gramfx.uses import Rows, StaticBatchNeeded, Use, uses_of

#: The least default budget.
LEAST_BUDGET = 64 * 2**20
#: How often to plan anew, with more room left, until the lowered graph keeps the limit.
MOST_ATTEMPTS = 4

STAGES = ("captured", "canonical", "separated", "batched", "joint", "gramian", "planned", "lowered")


@dataclass(frozen=True)
class Planning:
    """What a plan goes by: bytes above a plain forward and backward (``None``: a tenth of what that needs, at least 64
    MiB), a plan made before, and the order of preference among candidates."""

    memory_budget: int | None = None
    given: Plan | None = None
    order: Order = fastest_predicted

    def budget(self, plain: int) -> int:
        """Bytes above ``plain``."""
        return max(LEAST_BUDGET, plain // 10) if self.memory_budget is None else self.memory_budget


DEFAULT = Planning()


@dataclass
class Lowering:
    """All stages of one program by name, the plan, the nodes whose random draws the last one returns, what couples,
    and what a plain forward and backward needs at a batch size."""

    stages: dict[str, GraphModule] = field(default_factory=dict)
    plan: Plan | None = None
    draws: tuple[str, ...] = ()
    coupling: Coupling | None = None
    plain_peak: Callable[[int], int] = lambda batch: 0
    plain_flops: Callable[[int], int] = lambda batch: 0


def lower(
    captured: Captured,
    batch_size: int | torch.SymInt | None,
    *,
    exact: bool = True,
    coupled: Literal["warn", "error"] = "warn",
    planning: Planning = DEFAULT,
) -> Lowering:
    """Run every stage on a captured graph.

    The lowered graph returns ``(objectives, gramian, *new values of mutated tensors, *random draws)``. Raises
    :class:`StaticBatchNeeded` where a symbolic batch cannot be kept, and what :func:`replanned` raises.
    """
    done = Lowering()
    symbolic = is_symbolic(batch_size)
    stages = done.stages
    stages["captured"] = captured.graph_module
    verify_functional(stages["captured"])
    stages["canonical"] = canonicalize(stages["captured"])
    verify_canonical(stages["canonical"])
    stages["separated"] = separate_uses(stages["canonical"])
    stages["batched"] = batched = copy.deepcopy(stages["separated"])
    done.coupling = _trace(batched, batch_size)
    rows = rows_of(batched, batch_size, done.coupling)
    uses = uses_of(batched, done.coupling.coupled, rows) if _any_rows(batched) else []
    if any(use.coupled for use in uses) and is_symbolic(value(results(batched)[0]).numel()):
        raise StaticBatchNeeded("the objectives are coupled")
    _report_coupling(done.coupling, uses, coupled)
    joint = differentiate(batched, rows, *_taps(uses), _needed(batched, uses))
    verify_joint(joint)
    stages["joint"] = joint.graph_module
    size = 1 if batch_size is None else batch_size
    stages["gramian"] = insert_gramians(joint, uses, rows, size, exact=exact)
    verify_gramian(stages["gramian"])
    terms = [terms_of(node) for node in gramian_nodes(stages["gramian"])]
    done.plain_peak = functools.cache(lambda batch: plain_peak(joint, uses, batch))
    done.plain_flops = lambda batch: plain_flops(joint, terms, batch)
    done.draws = tuple(joint.random)
    done = replanned(done, _hint(size), planning)
    if symbolic and not is_symbolic(batch_size):
        raise StaticBatchNeeded("an op of the model fixes the batch size")
    return done


def replanned(lowering: Lowering, batch: int, planning: Planning) -> Lowering:
    """The same program planned for another batch size, and lowered.

    Raises :class:`MemoryBudgetError` where no plan keeps the budget, by the memory profile of the lowered graph.
    """
    bounds = Bounds(lowering.plain_peak, lambda size: planning.budget(lowering.plain_peak(size)))
    planned, lowered, plan, alive = _within(lowering.stages["gramian"], batch, bounds, planning)
    verify_lowered(lowered)
    if plan is not planning.given:
        totals = Totals(
            flops_of(lowered.graph.nodes, batch), alive.peak, lowering.plain_flops(batch), bounds.plain(batch)
        )
        plan = dataclasses.replace(plan, totals=totals)
    stages = {**lowering.stages, "planned": planned, "lowered": lowered}
    return dataclasses.replace(lowering, stages=stages, plan=plan)


def _within(
    gramian: GraphModule, batch: int, bounds: Bounds, planning: Planning
) -> tuple[GraphModule, GraphModule, Plan, Profile]:
    """The planned and the lowered graph, the plan, and what is alive: planned anew, with more room left free, until the
    lowered graph keeps the limit, since that copies where a plan saw a view."""
    scheduled = schedule(gramian)
    machine = machine_of(value(results(scheduled)[0]).device)
    plan_for = functools.partial(
        plan_contractions, scheduled, batch, bounds, machine, given=planning.given, order=planning.order
    )
    reserve = 0
    for attempt in range(MOST_ATTEMPTS):
        # The last one takes what needs the fewest bytes, so that an error can say what would do.
        made = plan_for(reserve=reserve) if attempt < MOST_ATTEMPTS - 1 else None
        found = made or plan_for(reserve=None)
        assert found is not None
        planned, plan = found
        verify_planned(planned)
        lowered = erase_clones(lower_contractions(planned))
        alive = profile(lowered, batch)
        if alive.peak <= bounds.limit(batch):
            break
        if made is None or plan is planning.given:
            raise _too_small(alive, bounds, batch)
        reserve += alive.peak - bounds.limit(batch)
    return planned, lowered, plan, alive


def _too_small(alive: Profile, bounds: Bounds, batch: int) -> MemoryBudgetError:
    worst = max(alive.during, key=alive.during.__getitem__)
    return MemoryBudgetError(alive.peak - bounds.plain(batch), bounds.budget(batch), where(worst))


def _trace(graph_module: GraphModule, batch_size: int | torch.SymInt | None) -> Coupling:
    inputs = placeholders(graph_module)
    dims = {n.name: n.meta["batch_dim"] for n in inputs if n.meta.get("batch_dim") is not None}
    learned = [node.name for node in inputs if "parameter" in node.meta]
    if batch_size is None or not _several(batch_size):
        # One sample, or none, is nothing to tell apart; no dim has this size, so nothing is taken for a batch.
        dims, batch_size = {}, -1
    coupling = trace_axes(graph_module, dims, batch_size, learned, results(graph_module)[0])
    verify_batched(graph_module, batch_size)
    return coupling


def _several(batch_size: int | torch.SymInt | None) -> bool:
    """Whether there are samples to tell apart."""
    return batch_size is not None and (is_symbolic(batch_size) or int(batch_size) > 1)


def rows_of(graph_module: GraphModule, batch_size: int | torch.SymInt | None, coupling: Coupling) -> Rows:
    """Where the samples are among the objectives; none where the batch is one sample, unknown, or lost."""
    objectives = results(graph_module)[0]
    axes = objectives.meta["axes"]
    shape = value(objectives).shape
    loc = axes.batch if isinstance(axes, Value) else None
    if loc is None or batch_size is None or objectives in coupling.coupled or not isinstance(loc.inner, int):
        count = value(objectives).numel()
        if is_symbolic(count):
            raise StaticBatchNeeded("the objectives are coupled")
        return Rows(int(count), 1, False)
    before = after = 1
    for dim, size in enumerate(shape):
        if dim < loc.dim:
            before *= int(size)
        elif dim > loc.dim:
            after *= int(size)
    return Rows(before * int(shape[loc.dim] // (batch_size * loc.inner)), after * loc.inner, True)


def _any_rows(graph_module: GraphModule) -> bool:
    size = value(results(graph_module)[0]).numel()
    return is_symbolic(size) or int(size) > 0


def _taps(uses: list[Use]) -> tuple[list[Node], list[Node]]:
    single = [tap for use in uses if not use.coupled for tap in use.taps]
    full = [tap for use in uses if use.coupled for tap in use.taps]
    return list(dict.fromkeys(single)), list(dict.fromkeys(full))


def _needed(graph_module: GraphModule, uses: list[Use]) -> list[Node]:
    """Forward values that terms, fallbacks and pullbacks read; clones too, for their names in the joint graph."""
    nodes = [node for use in uses for node in (use.clone, *use.needed)]
    return [*placeholders(graph_module), *nodes]


def _report_coupling(coupling: Coupling, uses: list[Use], wanted: str) -> None:
    """Say which op couples the samples, where some use pays for it."""
    first = coupling.first
    if first is None or not any(use.coupled for use in uses):
        return
    many = sum(use.coupled for use in uses)
    message = (
        f"the objectives are coupled: {first.reason}; {many} of {len(uses)} uses of parameters need one cotangent per "
        f"objective instead of one per sample. The Gramian is exact all the same.\n  where: {where(first.node)}"
    )
    if wanted == "error":
        raise CoupledObjectivesError(
            f"the objectives are coupled: {first.reason}",
            expected="objectives of which each depends on its own sample only",
            got=f"{many} of {len(uses)} uses of parameters upstream of a coupling op",
            where=where(first.node),
            remedy="remove the coupling, or pass coupled='warn' to pay one cotangent per objective",
        )
    warn_user(CoupledObjectivesWarning(message))


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
