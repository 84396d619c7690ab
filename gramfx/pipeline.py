"""The compiler, as one list of stages. Read this first."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch.fx import GraphModule, Node

from gramfx.axes import Loc, Ragged, Value
from gramfx.baseline import plain_flops, plain_peak, plain_seconds
from gramfx.captured import Captured
from gramfx.errors import CoupledObjectivesError, CoupledObjectivesWarning
from gramfx.fitting import DEFAULT, Lowering, Planning, replanned
from gramfx.gradients import kept_gradient, wanted_slots
from gramfx.gramians import gramian_nodes, terms_of
from gramfx.graph import named, placeholders, results, value, verify_functional, where
from gramfx.passes.canonicalize import canonicalize, verify_canonical
from gramfx.passes.differentiate import Joint, Seeded, differentiate, verify_joint
from gramfx.passes.insert_gramians import insert_gramians, verify_gramian
from gramfx.passes.separate_uses import separate_uses
from gramfx.passes.trace_axes import Coupling, trace_axes, verify_batched
from gramfx.source import warn_user
from gramfx.torch_compat import is_symbolic
from gramfx.uses import Rows, StaticBatchNeeded, Use, uses_of

STAGES = ("captured", "canonical", "separated", "batched", "joint", "gramian", "planned", "lowered")


def lower(
    captured: Captured,
    batch_size: int | torch.SymInt | None,
    *,
    exact: bool = True,
    coupled: Literal["warn", "error"] = "warn",
    planning: Planning = DEFAULT,
) -> Lowering:
    """Run every stage on a captured graph.

    The lowered graph returns ``(objectives, gramian, *readings, *new values of mutated tensors, *saved)``, where saved
    is what the backward needs besides the inputs: random draws, or activations and cotangents. Raises
    :class:`StaticBatchNeeded` where a symbolic batch cannot be kept, and what :func:`replanned` raises.
    """
    done = Lowering()
    symbolic = is_symbolic(batch_size)
    done.stages["captured"] = captured.graph_module
    verify_functional(captured.graph_module)
    done.stages["canonical"] = canonicalize(captured.graph_module)
    verify_canonical(done.stages["canonical"])
    insert(done, batch_size, exact=exact)
    report_coupling(done, coupled)
    done = replanned(done, hint_of(1 if batch_size is None else batch_size), planning)
    if symbolic and not is_symbolic(batch_size):
        raise StaticBatchNeeded("an op of the model fixes the batch size")
    return done


def insert(
    done: Lowering,
    batch_size: int | torch.SymInt | None,
    *,
    exact: bool = True,
    seeds: Mapping[str, int] = MappingProxyType({}),
) -> Joint:
    """Run the stages from the canonical graph on, until its Gramian is inserted.

    seeds: placeholders that are cotangents, each of the result of this number, to take gradients from as well; then
    these are returned last, and no gradient is kept. Raises :class:`StaticBatchNeeded` where a symbolic batch cannot
    be kept.
    """
    stages = done.stages
    stages["separated"] = separate_uses(stages["canonical"])
    stages["batched"] = batched = copy.deepcopy(stages["separated"])
    done.coupling = trace_batch(batched, batch_size)
    rows = rows_of(batched, batch_size, done.coupling)
    done.uses = uses = uses_of(batched, done.coupling.coupled, rows) if _any_rows(batched) else []
    if any(use.coupled for use in uses) and is_symbolic(value(results(batched)[0]).numel()):
        raise StaticBatchNeeded("the objectives are coupled")
    joint = differentiate(batched, rows, *_taps(uses), _needed(batched, uses), _seeded(batched, seeds))
    verify_joint(joint)
    stages["joint"] = joint.graph_module
    size = 1 if batch_size is None else batch_size
    done.draws = tuple(joint.random)
    done.kept = None if seeds else kept_gradient(batched, joint, uses, rows, size)
    saved = [joint.forward[name] for name in done.draws] + list(done.kept.saved if done.kept else ())
    saved += [name for name in joint.gradients.values() if name]
    done.inserted = insert_gramians(joint, uses, rows, size, exact=exact, saved=saved)
    verify_gramian(done.inserted)
    terms = [terms_of(node) for node in gramian_nodes(done.inserted)]
    done.plain_peak = functools.cache(lambda batch: plain_peak(joint, uses, batch))
    done.plain_flops = lambda batch: plain_flops(joint, terms, batch)
    done.plain_seconds = lambda batch, machine: plain_seconds(joint, terms, batch, machine)
    return joint


def _seeded(graph_module: GraphModule, seeds: Mapping[str, int]) -> Seeded:
    nodes, returned, inputs = named(graph_module), results(graph_module), placeholders(graph_module)
    wanted = [inputs[index] for index in wanted_slots(graph_module)] if seeds else []
    return Seeded(tuple(returned[i] for i in seeds.values()), tuple(nodes[name] for name in seeds), tuple(wanted))


def trace_batch(graph_module: GraphModule, batch_size: int | torch.SymInt | None) -> Coupling:
    """Write every value's dims as products of axes, from the inputs' batch dims; say what couples the first result."""
    inputs = placeholders(graph_module)
    dims = {n.name: n.meta["batch_dim"] for n in inputs if n.meta.get("batch_dim") is not None}
    rows = {n.name: _rows_place(n) for n in inputs if "rows" in n.meta and value(n).numel()}
    learned = [node.name for node in inputs if "parameter" in node.meta]
    if batch_size is None or not _several(batch_size):
        # One sample, or none, is nothing to tell apart; no dim has this size, so nothing is taken for a batch.
        dims, rows, batch_size = {}, {}, -1
    coupling = trace_axes(graph_module, dims, batch_size, learned, results(graph_module)[0], rows)
    verify_batched(graph_module, batch_size)
    return coupling


def _rows_place(node: Node) -> Loc:
    offsets, dim = node.meta["rows"]
    return Loc(dim, Ragged(offsets, int(value(node).shape[dim])).unit)


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
    """Forward values that terms, fallbacks, pullbacks and weight gradients read; clones too, for their names."""
    nodes = [node for use in uses for node in (use.clone, *use.needed, *use.op.all_input_nodes)]
    return [*placeholders(graph_module), *nodes]


def report_coupling(done: Lowering, wanted: str) -> None:
    """Say which op couples the samples, where some use pays for it."""
    uses = done.uses
    first = done.coupling.first if done.coupling else None
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


def hint_of(size: int | torch.SymInt) -> int:
    """The number that a symbolic size was traced at."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
