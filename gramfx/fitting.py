"""Plan and lower within a memory budget: the gradient kept where there is room for it, else replayed."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import GraphModule

from gramfx.cost import flops_of
from gramfx.errors import MemoryBudgetError
from gramfx.gradients import KeptGradient
from gramfx.graph import output_node, results, value, where
from gramfx.machine import Machine, machine_of
from gramfx.memory import Profile, profile
from gramfx.passes.erase_clones import erase_clones
from gramfx.passes.lower_contractions import lower_contractions, verify_lowered
from gramfx.passes.plan_contractions import Bounds, Order, fastest_predicted, plan_contractions, verify_planned
from gramfx.passes.schedule import schedule
from gramfx.passes.trace_axes import Coupling
from gramfx.plan import Plan, Regime, Totals
from gramfx.planning import MOST_COMPILED_STEPS
from gramfx.regimes import largest
from gramfx.uses import Use

#: The least default budget.
LEAST_BUDGET = 64 * 2**20
#: How often to plan anew, with more room left, until the lowered graph keeps the limit.
MOST_ATTEMPTS = 4


@dataclass(frozen=True)
class Planning:
    """What a plan goes by: bytes above a plain forward and backward (``None``: a tenth of what that needs, at least 64
    MiB), a plan made before, the order of preference among candidates, and whether a compiler has to take the result:
    then contractions are cut into few steps where the budget allows."""

    memory_budget: int | None = None
    given: Plan | None = None
    order: Order = fastest_predicted
    compiled: bool = False

    def budget(self, plain: int) -> int:
        """Bytes above ``plain``."""
        return max(LEAST_BUDGET, plain // 10) if self.memory_budget is None else self.memory_budget


DEFAULT = Planning()


@dataclass
class Lowering:
    """All stages of one program by name, the plan, what couples, and what a plain forward and backward needs at a batch
    size.

    ``draws`` names the nodes of the canonical graph that draw random numbers. ``inserted`` returns, after objectives,
    Gramian and new values of mutated tensors, first those draws and then what ``kept`` takes; later stages return
    either, as the gradient is replayed or kept.
    """

    stages: dict[str, GraphModule] = field(default_factory=dict)
    plan: Plan | None = None
    draws: tuple[str, ...] = ()
    kept: KeptGradient | None = None
    inserted: GraphModule | None = None
    coupling: Coupling | None = None
    uses: list[Use] = field(default_factory=list)
    plain_peak: Callable[[int], int] = lambda batch: 0
    plain_flops: Callable[[int], int] = lambda batch: 0
    plain_seconds: Callable[[int, Machine], float] = lambda batch, machine: 0.0


def replanned(lowering: Lowering, batch: int, planning: Planning) -> Lowering:
    """The same program planned for another batch size, and lowered.

    Raises :class:`MemoryBudgetError` where no plan keeps the budget, by the memory profile of the lowered graph.
    """
    bounds = Bounds(lowering.plain_peak, lambda size: planning.budget(lowering.plain_peak(size)))
    made = _kept_within(lowering, batch, bounds, planning) or _replayed_within(lowering, batch, bounds, planning)
    verify_lowered(made.lowered)
    plan = made.plan
    if plan is not planning.given:
        flops = flops_of(made.lowered.graph.nodes, batch)
        totals = Totals(flops, made.alive.peak, lowering.plain_flops(batch), bounds.plain(batch))
        plan = dataclasses.replace(plan, totals=totals)
    stages = {"gramian": made.gramian, "planned": made.planned, "lowered": made.lowered}
    return dataclasses.replace(lowering, stages={**lowering.stages, **stages}, plan=plan)


@dataclass(frozen=True)
class Fitted:
    """The last three stages, the plan, and what is alive in the lowered graph."""

    gramian: GraphModule
    planned: GraphModule
    lowered: GraphModule
    plan: Plan
    alive: Profile


def _kept_within(lowering: Lowering, batch: int, bounds: Bounds, planning: Planning) -> Fitted | None:
    """With the cotangents kept for the backward, if there is room for them."""
    given = planning.given
    if lowering.kept is None or (given is not None and given.gradient != "kept"):
        return None
    gramian = _returning(lowering, slice(len(lowering.draws), None))
    after = functools.partial(lowering.kept.peak, gramian)
    if after(batch) > bounds.limit(batch) or profile(gramian, batch).peak > bounds.limit(batch):
        return None
    try:
        made = fitted(gramian, batch, bounds, planning)
    except MemoryBudgetError:
        return None
    regime = made.plan.regime
    if regime.first != regime.last:
        regime = regime.within(Regime(1, largest(lambda size: after(size) <= bounds.limit(size), batch)))
    plan = dataclasses.replace(made.plan, gradient="kept", saved=lowering.kept.kept(gramian, batch), regime=regime)
    return made if made.plan is given else dataclasses.replace(made, plan=plan)


def _replayed_within(lowering: Lowering, batch: int, bounds: Bounds, planning: Planning) -> Fitted:
    """With no more kept than random draws, also where a given plan kept more."""
    made = fitted(_returning(lowering, slice(0, len(lowering.draws))), batch, bounds, planning)
    if made.plan.gradient == "replayed":
        return made
    return dataclasses.replace(made, plan=dataclasses.replace(made.plan, gradient="replayed", saved=0))


def _returning(lowering: Lowering, wanted: slice) -> GraphModule:
    """The graph with its gramian nodes, of what it saves only what is wanted."""
    assert lowering.inserted is not None
    gramian = copy.deepcopy(lowering.inserted)
    returned = results(gramian)
    saved = len(lowering.draws) + (len(lowering.kept.saved) if lowering.kept else 0)
    first = len(returned) - saved
    output_node(gramian).args = ((*returned[:first], *returned[first:][wanted]),)
    gramian.graph.eliminate_dead_code()
    gramian.recompile()
    return gramian


def fitted(gramian: GraphModule, batch: int, bounds: Bounds, planning: Planning) -> Fitted:
    """Planned and lowered; anew, with more room left free, until the lowered graph keeps the limit, since that copies
    where a plan saw a view."""
    scheduled = schedule(gramian)
    machine = machine_of(value(results(scheduled)[0]).device)
    plan_for = functools.partial(
        plan_contractions, scheduled, batch, bounds, machine, given=planning.given, order=planning.order
    )
    reserve = 0
    for attempt in range(MOST_ATTEMPTS):
        # The last one takes what needs the fewest bytes, so that an error can say what would do.
        few = plan_for(reserve=reserve, most_steps=MOST_COMPILED_STEPS) if planning.compiled and not attempt else None
        made = few or (plan_for(reserve=reserve) if attempt < MOST_ATTEMPTS - 1 else None)
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
    return Fitted(gramian, planned, lowered, plan, alive)


def _too_small(alive: Profile, bounds: Bounds, batch: int) -> MemoryBudgetError:
    worst = max(alive.during, key=alive.during.__getitem__)
    return MemoryBudgetError(alive.peak - bounds.plain(batch), bounds.budget(batch), where(worst))
