"""What a plain forward and backward of the same model needs: the measure that budgets and totals go by."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.fx import Node

from gramfx.cost import flops_of, seconds_of
from gramfx.fallback import parameters_behind
from gramfx.graph import named
from gramfx.machine import Machine
from gramfx.memory import Added, nbytes, profile
from gramfx.passes.differentiate import Joint
from gramfx.terms import SYMBOLIC, ParameterTerms, Term
from gramfx.uses import Use


def plain_peak(joint: Joint, uses: Sequence[Use], batch: int) -> int:
    """Bytes alive above parameters and inputs at the worst moment, gradients of the parameters included.

    The backward pass with one cotangent, and each use's weight gradient as soon as its cotangent is there.
    """
    nodes = named(joint.plain)
    order = {node: position for position, node in enumerate(joint.plain.graph.nodes)}
    runs = [node for node in joint.plain.graph.nodes if node.op == "call_function"]
    if not runs:
        return 0
    added: dict[Node, Added] = {}
    seen: set[str] = set()
    for use in reversed(uses):
        found = [nodes[joint.tapped[tap.name]] for tap in use.taps if tap.name in joint.tapped]
        if not found:
            continue
        at = max(found, key=order.__getitem__)
        at = at if at.op == "call_function" else runs[-1]
        reads = [nodes[joint.plain_forward[node.name]] for node in use.needed if node.name in joint.plain_forward]
        for parameter in parameters_behind(use.parameter_value):
            size = nbytes((parameter, 0), batch)
            more = Added(tuple(reads), kept=size) if parameter.name not in seen else Added(tuple(reads), scratch=size)
            added[at] = added.get(at, Added()).plus(more)
            seen.add(parameter.name)
    kept = [nodes[joint.plain_forward[name]] for name in joint.returned if name in joint.plain_forward]
    return profile(joint.plain, batch, added, kept).peak


def plain_flops(joint: Joint, terms: Sequence[ParameterTerms], batch: int) -> int:
    """Forward, backward with one cotangent, and the weight gradients."""
    weights = sum(_weight_flops(term, batch) for held in terms for term in held.terms)
    return flops_of(joint.plain.graph.nodes, batch) + weights


def plain_seconds(joint: Joint, terms: Sequence[ParameterTerms], batch: int, machine: Machine) -> float:
    """The predicted time of the same."""
    weights = sum(_weight_flops(term, batch) for held in terms for term in held.terms)
    return seconds_of(joint.plain.graph.nodes, batch, machine) + weights / machine.flops["float32"]


def _weight_flops(term: Term, batch: int) -> int:
    """Of one use's weight gradient: the einsum with all samples summed."""
    if sum(factor.view is None or hasattr(factor.view, "kernel") for factor in term.factors) < 2:
        return 0
    axes = {axis for factor in term.factors for axis in factor.axes if axis not in ("k0", "k1")}
    return 2 * math.prod(batch if term.sizes[axis] == SYMBOLIC else term.sizes[axis] for axis in axes)
