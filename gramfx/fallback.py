"""Rows of the Jacobian where no einsum gives them: VJPs of one node, or of the function a parameter went through.

Both are plain functions of tensors, to be traced into a graph; always exact, never cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from gramfx.axes import Loc
from gramfx.graph import ancestors, value
from gramfx.torch_compat import repeated
from gramfx.uses import Rows, Use

Traceable = Callable[..., Any]


def rows_of_node(use: Use, rows: Rows, batch_size: int | torch.SymInt) -> Traceable:
    """``(*op's inputs, *cotangents of its outputs) -> [m, *operand.shape]`` by the VJP of the op alone."""
    inputs = list(use.op.all_input_nodes)
    places = [] if use.coupled else [_place(tap, batch_size) for tap in use.taps]

    def run(*tensors: Any) -> Tensor:
        held, cotangents = tensors[: len(inputs)], tensors[len(inputs) :]
        operand = held[inputs.index(use.operand)]

        def op(replaced: Tensor) -> tuple[Tensor, ...]:
            return _outputs(use, dict(zip(inputs, held, strict=True)) | {use.operand: replaced})

        outs, pull = torch.func.vjp(op, operand)
        lead = [c if c.dim() > out.dim() else c.unsqueeze(0) for c, out in zip(cotangents, outs, strict=True)]
        pull_all = repeated(lambda *one: pull(one)[0], [use.op.target], (0,) * len(lead))
        if use.coupled:
            return pull_all(*lead)
        masked = [_one_sample_each(c, loc, outer) for c, (loc, outer) in zip(lead, places, strict=True)]
        made = pull_all(*masked)
        made = made.reshape(rows.before, rows.after, -1, *operand.shape).transpose(1, 2)
        return made.reshape(-1, *operand.shape)

    return run


def _outputs(use: Use, values: dict[Node, Any]) -> tuple[Tensor, ...]:
    args, kwargs = torch.fx.node.map_arg((use.op.args, use.op.kwargs), lambda node: values[node])
    result = use.op.target(*args, **kwargs)  # type: ignore[operator]
    if isinstance(result, (tuple, list)):
        return tuple(result[int(tap.args[1])] for tap in use.taps)  # type: ignore[call-overload]
    return (result,)


def _place(tap: Node, batch_size: int | torch.SymInt) -> tuple[Loc, int]:
    """Where the batch is in a value, and how often it repeats there."""
    loc: Loc = tap.meta["axes"].batch
    return loc, int(value(tap).shape[loc.dim] // (batch_size * int(loc.inner)))


def _one_sample_each(cotangent: Tensor, loc: Loc, outer: int) -> Tensor:
    """``[K, *shape] -> [K * B, *shape]``, entry ``(k, b)`` zero off sample ``b``."""
    at, inner = loc.dim + 1, int(loc.inner)
    batch = cotangent.shape[at] // (outer * inner)
    owner = torch.arange(cotangent.shape[at], device=cotangent.device) // inner % batch
    mine = owner == torch.arange(batch, device=cotangent.device).unsqueeze(1)
    mine = mine.reshape(1, batch, *(1,) * loc.dim, cotangent.shape[at], *(1,) * (cotangent.dim() - at - 1))
    # A product with zero would make NaN of an infinite cotangent.
    kept = torch.where(mine, cotangent.unsqueeze(1), torch.zeros((), dtype=cotangent.dtype, device=cotangent.device))
    return kept.flatten(0, 1)


def parameters_behind(node: Node) -> list[Node]:
    """The trainable parameters that a parameter value is computed from, in graph order."""
    return [source for source in ancestors(node) if "parameter" in source.meta]


def inputs_behind(node: Node) -> list[Node]:
    """The placeholders that a parameter value is computed from, in graph order."""
    return [source for source in ancestors(node) if source.op == "placeholder"]


def rows_through(node: Node) -> Traceable:
    """``(rows [m, *node.shape], *inputs_behind(node)) -> [m, *parameter.shape] for each of parameters_behind(node)``."""
    region = _region(node)
    inputs = inputs_behind(node)
    learned = [index for index, source in enumerate(inputs) if "parameter" in source.meta]

    def run(rows: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        def function(*parameters: Tensor) -> Tensor:
            values = list(tensors)
            for index, parameter in zip(learned, parameters, strict=True):
                values[index] = parameter
            return region(*values)

        _, pull = torch.func.vjp(function, *(tensors[index] for index in learned))
        return repeated(pull, (node.target for node in region.graph.nodes), (0,))(rows)

    return run


def _region(node: Node) -> GraphModule:
    graph = Graph()
    mapping: dict[Node, Node] = {}
    for source in ancestors(node):
        mapping[source] = graph.node_copy(source, lambda argument: mapping[argument])
    graph.output(mapping[node])
    return GraphModule(torch.nn.Module(), graph)

