"""Rows of the Jacobian where no einsum gives them: VJPs of one node, or of the function a parameter went through.

Both are plain functions of tensors, to be traced into a graph; always exact, never cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from gramfx.axes import Loc
from gramfx.graph import ancestors, arguments, value
from gramfx.torch_compat import FakeTensor, contiguous, repeated, trace
from gramfx.uses import Rows, Use

Traceable = Callable[..., Any]
#: The first and the number of the samples wanted, or of the objectives where these are coupled; ``None`` for all.
Part = tuple[int, int] | None


@dataclass(frozen=True)
class Maker:
    """Makes rows of the Jacobian by one parameter, for some samples only.

    ``rows`` takes the first ``count`` of the tensors named by ``inputs``, ``through`` what it made and the others;
    ``number`` is the parameter's place in what ``through`` returns.
    """

    rows: Callable[[Sequence[Tensor], Part], Tensor]
    count: int
    inputs: tuple[str, ...]
    through: Traceable | None = None
    number: int = 0

    def __call__(self, tensors: Sequence[Tensor], part: Part) -> Tensor:
        """``[rows, *parameter.shape]``."""
        rows = self.rows(tensors[: self.count], part)
        return rows if self.through is None else self.through(rows, *tensors[self.count :])[self.number]


def rows_of_node(use: Use, rows: Rows, batch_size: int | torch.SymInt) -> Callable[[Sequence[Tensor], Part], Tensor]:
    """``((*op's inputs, *cotangents of its outputs), part) -> [m, *operand.shape]`` by the VJP of the op alone."""
    inputs = list(use.op.all_input_nodes)
    at = inputs.index(use.operand)
    places = [] if use.coupled else [_place(tap, batch_size) for tap in use.taps]

    def pull(*tensors: Any) -> Tensor:
        held, cotangents = list(tensors[: len(inputs)]), tensors[len(inputs) :]
        outs, leaves = _differentiated(
            lambda *values: outputs_of(use, dict(zip(inputs, values, strict=True))), held, [at]
        )
        reached = [index for index, out in enumerate(outs) if out.requires_grad]
        seeds = [cotangents[index] for index in reached]
        found = torch.autograd.grad(
            [outs[i] for i in reached], leaves, seeds, allow_unused=True, materialize_grads=True
        )
        return found[0]

    pull_all = _over_rows(pull, [value(node) for node in inputs], [value(tap) for tap in use.taps])

    def run(tensors: Sequence[Tensor], part: Part) -> Tensor:
        held, cotangents = tensors[: len(inputs)], tensors[len(inputs) :]
        lead = [
            c if c.dim() > value(tap).dim() else c.unsqueeze(0) for c, tap in zip(cotangents, use.taps, strict=True)
        ]
        if use.coupled:
            return pull_all(held, lead if part is None else [c.narrow(0, *part) for c in lead])
        made = pull_all(held, [_one_sample_each(c, *place, part) for c, place in zip(lead, places, strict=True)])
        made = made.reshape(rows.before, rows.after, -1, *made.shape[1:]).transpose(1, 2)
        return made.reshape(-1, *made.shape[3:])

    return run


def reaching(use: Use) -> list[Node]:
    """The taps that depend on the operand by a differentiable path."""
    inputs = list(use.op.all_input_nodes)
    held = [contiguous(value(node)) for node in inputs]
    mode = next(one.fake_mode for one in held if isinstance(one, FakeTensor))
    with mode:
        outs, _ = _differentiated(
            lambda *values: outputs_of(use, dict(zip(inputs, values, strict=True))), held, [inputs.index(use.operand)]
        )
    return [tap for tap, out in zip(use.taps, outs, strict=True) if out.requires_grad]


def _differentiated(function: Traceable, held: list[Any], at: list[int]) -> tuple[Any, list[Tensor]]:
    """``function(*held)`` as a function of some of its arguments, for autograd."""
    with torch.enable_grad():
        leaves = [held[index].detach().requires_grad_() for index in at]
        for index, leaf in zip(at, leaves, strict=True):
            held[index] = leaf
        return function(*held), leaves


def _over_rows(pull: Traceable, held: list[Any], cotangents: list[Tensor]) -> Traceable:
    """``(held, cotangents with rows) -> rows`` from a pull of one row: traced first, since ``vmap`` of a derivative
    would fix a symbolic batch, and then repeated."""
    single = trace(pull, [*map(contiguous, held), *map(contiguous, cotangents)])
    ops = {node.target for node in single.graph.nodes}

    def run(given: Sequence[Any], rows: Sequence[Tensor]) -> Any:
        in_dims = (*(None for _ in given), *(0 for _ in rows))
        return repeated(single, ops, in_dims)(*given, *rows)

    return run


def outputs_of(use: Use, values: dict[Node, Any]) -> tuple[Tensor, ...]:
    """The tapped outputs of a use's op, run on the values of the nodes it reads."""
    args, kwargs = torch.fx.node.map_arg((arguments(use.op), use.op.kwargs), lambda node: values[node])
    result = use.op.target(*args, **kwargs)  # type: ignore[operator]
    if isinstance(result, (tuple, list)):
        return tuple(result[int(arguments(tap)[1])] for tap in use.taps)
    return (result,)


def _place(tap: Node, batch_size: int | torch.SymInt) -> tuple[Loc, int]:
    """Where the batch is in a value, and how often it repeats there."""
    loc: Loc = tap.meta["axes"].batch
    return loc, int(value(tap).shape[loc.dim] // (batch_size * int(loc.inner)))


def _one_sample_each(cotangent: Tensor, loc: Loc, outer: int, part: Part) -> Tensor:
    """``[K, *shape] -> [K * B, *shape]``, entry ``(k, b)`` zero off sample ``b``, ``b`` one of ``part``."""
    at, inner = loc.dim + 1, int(loc.inner)
    batch = cotangent.shape[at] // (outer * inner)
    owner = torch.arange(cotangent.shape[at], device=cotangent.device) // inner % batch
    start, count = (0, batch) if part is None else part
    mine = owner == torch.arange(start, start + count, device=cotangent.device).unsqueeze(1)
    mine = mine.reshape(1, count, *(1,) * loc.dim, cotangent.shape[at], *(1,) * (cotangent.dim() - at - 1))
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
    """``(rows [m, *node.shape], *inputs_behind(node)) -> [m, *parameter.shape]`` for each of ``parameters_behind``."""
    region = _region(node)
    inputs = inputs_behind(node)
    learned = [index for index, source in enumerate(inputs) if "parameter" in source.meta]

    def pull(*tensors: Any) -> tuple[Tensor, ...]:
        *held, cotangent = tensors
        out, leaves = _differentiated(region, held, learned)
        return torch.autograd.grad(out, leaves, cotangent, allow_unused=True, materialize_grads=True)

    pull_all = _over_rows(pull, [value(source) for source in inputs], [value(node)])
    return lambda rows, *tensors: pull_all(tensors, [rows])


def _region(node: Node) -> GraphModule:
    graph = Graph()
    mapping: dict[Node, Node] = {}
    for source in ancestors(node):
        mapping[source] = graph.node_copy(source, lambda argument: mapping[argument])
    graph.output(mapping[node])
    return GraphModule(torch.nn.Module(), graph)
