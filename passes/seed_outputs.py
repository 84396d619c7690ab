"""Outputs whose cotangents are given from outside: objectives as their products with inputs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from gramfx.graph import Builder, output_node, placeholders, rename, results, value
from gramfx.torch_compat import fake_mode_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Places:
    """Where the samples are in each output, ``None`` for one in which no sample's rows can be told.

    ``count``: how many cotangents each output is given, stacked; 0 for one, not stacked. ``batched``: whether a
    cotangent holds one objective of every sample, of those outputs that have samples, or one objective alone.
    """

    dims: tuple[int | None, ...]
    count: int = 0
    batched: bool = True


def seed_outputs(graph_module: GraphModule, outputs: Sequence[int], places: Places) -> GraphModule:
    """Put objectives first: ``y[k, b] = Σ_i <output_i[b], cotangent_i[k, b]>``, or without samples
    ``y[k] = Σ_i <output_i, cotangent_i[k]>``.

    The Jacobian of ``y`` is that of whatever has these cotangents, by the chain rule. outputs: which results of the
    graph; their cotangents are new placeholders, after all others.
    """
    graph_module = copy.deepcopy(graph_module)
    returned = results(graph_module)
    if not places.batched:
        for node in placeholders(graph_module):
            # Parameters and buffers have no such entry, which is what tells them from data.
            if "batch_dim" in node.meta:
                node.meta["batch_dim"] = None
    build = Builder(output_node(graph_module))
    summands = []
    for number, (index, dim) in enumerate(zip(outputs, places.dims, strict=True)):
        seed = _cotangent(graph_module, returned[index], dim, places, number)
        if dim is not None or not places.batched:
            summands.append(_product(returned[index], seed, dim, places, build))
    widest = functools.reduce(torch.promote_types, (value(one).dtype for one in summands))
    cast = [one if value(one).dtype == widest else build(aten._to_copy.default, one, dtype=widest) for one in summands]
    total = functools.reduce(lambda a, b: build(aten.add.Tensor, a, b), cast)
    output_node(graph_module).args = ((total, *returned),)
    graph_module.recompile()
    return graph_module


def _product(node: Node, seed: Node, dim: int | None, places: Places, build: Builder) -> Node:
    """Sums of products over all but the samples and the stacked cotangents."""
    lead = 1 if places.count else 0
    if value(node).is_complex():
        # <z, c> is the real part of z times the conjugate of c.
        node, seed = (build(aten.view_as_real.default, one) for one in (node, seed))
    product = build(aten.mul.Tensor, build(aten.unsqueeze.default, node, 0) if lead else node, seed)
    kept = {*range(lead), *([dim + lead] if dim is not None and places.batched else [])}
    summed = [d for d in range(value(product).dim()) if d not in kept]
    return build(aten.sum.dim_IntList, product, summed) if summed else product


def _cotangent(graph_module: GraphModule, node: Node, dim: int | None, places: Places, number: int) -> Node:
    with graph_module.graph.inserting_after(placeholders(graph_module)[-1]):
        seed = graph_module.graph.placeholder(f"cotangent{number}")
    held = value(node)
    lead = (places.count,) if places.count else ()
    with fake_mode_of(graph_module):
        made = torch.empty((*lead, *held.shape), dtype=held.dtype, device=held.device)
    batch_dim = dim + len(lead) if dim is not None and places.batched else None
    seed.meta = {"val": made, "requires_grad": False, "batch_dim": batch_dim}
    rename(seed, f"cotangent{number}")
    seed.target = seed.name
    return seed
