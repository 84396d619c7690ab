"""How each op reads a parameter value: the table of use rules, by algebraic class.

A rule maps ``(node, position)``, position being the flat index of the operand among the node's tensor operands, to a
:class:`Form`, or to ``None`` where the op in this form has none and the one-node fallback serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from gramfx.forms import Dims, Form, FormFactor, OneHot, Windows, letters
from gramfx.graph import argument, arguments, item, value
from gramfx.recurrence import BEFORE, HIDDEN, recurrence
from gramfx.torch_compat import same_size

aten = torch.ops.aten
UseRule = Callable[[Node, Node], "Form | None"]

#: Ops that act on each entry alone, but that torch does not tag so.
_ALSO_POINTWISE = {
    aten.add.Scalar,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.sub.Scalar,
    aten.complex.default,
    aten.hardswish.default,
    aten.log_sigmoid.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.polar.default,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.clone.default,
    aten._to_copy.default,
    aten.huber_loss.default,
}


def is_pointwise(target: Any) -> bool:
    """Whether an op broadcasts its operands and then acts on each entry alone."""
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target in _ALSO_POINTWISE
    )


def form_of(consumer: Node, operand: Node, clone: Node) -> Form | None:
    """The form of the use of ``clone`` by ``consumer``, or ``None`` where only the fallback is exact.

    ``operand`` is what the consumer reads: the clone, or the clone broadcast to the shape of a pointwise consumer.
    """
    several = isinstance(value(consumer), (tuple, list))
    if is_pointwise(consumer.target) and not several:
        return _same_place(operand, clone)
    rule = USE_RULES.get(consumer.target)
    form = rule(consumer, operand) if rule else None
    return form if form is None or (_complete(form) and not _conjugated(form)) else None


def _conjugated(form: Form) -> bool:
    """Whether a gradient has a conjugated factor, which no form spells."""
    return any(factor.node is not None and value(factor.node).is_complex() for factor in form.factors)


def _complete(form: Form) -> bool:
    """Whether the factors tell the gradient of every entry of the parameter."""
    known = {label for factor in form.factors for labels in factor.dims for label in labels}
    return all(label in known for labels in form.parameter for label in labels)


# ---------------------------------------------------------------- entry by entry: the operand's own cotangent


def _same_place(operand: Node, clone: Node) -> Form:
    shape, own = value(operand).shape, value(clone).shape
    dims = letters("d", len(shape))
    parameter = _broadcast(dims, own, shape)
    return Form("operand", (FormFactor(None, dims),), parameter, dims)


def _broadcast(dims: Dims, shape: Sequence[Any], out: Sequence[Any]) -> Dims:
    """The spelling of a tensor of ``shape`` broadcast to ``out``, itself spelled ``dims``: stretched dims are empty."""
    lead = len(out) - len(shape)
    return tuple(dims[lead + i] if same_size(size, out[lead + i]) else () for i, size in enumerate(shape))


def _cat(consumer: Node, operand: Node) -> Form | None:
    rank = value(operand).dim()
    dim = _dim_argument(consumer) % rank
    dims = letters("d", rank)
    return Form("operand", (FormFactor(None, dims),), dims, (*dims[:dim], ("joined",), *dims[dim + 1 :]))


def _stack(consumer: Node, operand: Node) -> Form | None:
    rank = value(operand).dim()
    dim = _dim_argument(consumer) % (rank + 1)
    dims = letters("d", rank)
    return Form("operand", (FormFactor(None, dims),), dims, (*dims[:dim], ("joined",), *dims[dim:]))


def _dim_argument(consumer: Node) -> int:
    return int(argument(consumer, 1, "dim", 0))


# ---------------------------------------------------------------- einsums


def _einsum_form(operands: Sequence[Node], dims: Sequence[Dims], out: Dims, operand: Node) -> Form | None:
    """Of a product of ``operands`` summed over labels that ``out`` lacks, by ``operand``."""
    at = [index for index, other in enumerate(operands) if other is operand]
    if len(at) != 1:
        return None
    factors = [FormFactor(node, dims[i]) for i, node in enumerate(operands) if i != at[0]]
    return Form("output", (*factors, FormFactor(None, out)), dims[at[0]], out)


def _linear(consumer: Node, operand: Node) -> Form | None:
    source, weight = arguments(consumer)[0], arguments(consumer)[1]
    batch = letters("n", value(source).dim() - 1)
    out = (*batch, ("o",)) if value(weight).dim() == 2 else batch
    matrix: Dims = (("o",), ("i",)) if value(weight).dim() == 2 else (("i",),)
    if operand in (source, weight):
        return _einsum_form((source, weight), ((*batch, ("i",)), matrix), out, operand)
    return Form("output", (FormFactor(None, out),), out[-1:] if value(weight).dim() == 2 else (), out)


def _matmul(consumer: Node, operand: Node) -> Form | None:
    left, right = arguments(consumer)[:2]
    shapes = [value(left).shape, value(right).shape]
    full = list(value(consumer).shape)
    rows: Dims = (("m",),) if len(shapes[0]) > 1 else ()
    columns: Dims = (("c",),) if len(shapes[1]) > 1 else ()
    sizes = full[: len(full) - len(rows) - len(columns)]
    batch = letters("n", len(sizes))
    left_dims = (*_broadcast(batch, shapes[0][:-2], sizes), *rows, ("i",))
    right_dims = (*_broadcast(batch, shapes[1][:-2], sizes), ("i",), *columns)
    return _einsum_form((left, right), (left_dims, right_dims), (*batch, *rows, *columns), operand)


def _einsum(consumer: Node, operand: Node) -> Form | None:
    equation, operands = str(arguments(consumer)[0]).replace(" ", ""), arguments(consumer)[1]
    inputs, _, output = equation.partition("->")
    terms = inputs.split(",")
    if "->" not in equation:
        output = "".join(sorted(c for c in set(inputs) if c.isalpha() and inputs.count(c) == 1))
        output = "..." + output if "..." in inputs else output
    if any(len(set(term.replace(".", ""))) != len(term.replace(".", "")) for term in terms):
        return None
    rank = max(value(node).dim() - len(term.replace("...", "")) for node, term in zip(operands, terms, strict=True))
    dims = [_spelled(term, value(node).dim(), rank) for node, term in zip(operands, terms, strict=True)]
    sizes: dict[tuple[str, ...], Any] = {}
    for node, spelled in zip(operands, dims, strict=True):
        for label, size in zip(spelled, value(node).shape, strict=True):
            if not same_size(sizes.setdefault(label, size), size):
                return None
    out = _spelled(output, value(consumer).dim(), rank)
    return _einsum_form(operands, dims, out, operand)


def _spelled(term: str, total: int, rank: int) -> Dims:
    before, dots, after = term.partition("...")
    count = total - len(before) - len(after) if dots else 0
    middle = tuple((f"e{rank - count + i}",) for i in range(count))
    return (*((c,) for c in before), *middle, *((c,) for c in after))


# ---------------------------------------------------------------- convolutions


def _convolution(consumer: Node, operand: Node) -> Form | None:
    arguments = _convolution_arguments(consumer)
    source, weight, transposed = arguments["input"], arguments["weight"], arguments["transposed"]
    spatial = value(weight).dim() - 2
    if value(source).dim() != spatial + 2 or operand is source:
        return None
    if operand is not weight:
        out = (("n",), ("o",), *letters("l", spatial))
        return Form("output", (FormFactor(None, out),), (("o",),), out)
    groups = arguments["groups"]
    small, large = (value(consumer), value(source)) if not transposed else (value(source), value(consumer))
    windows = Windows(
        tuple(value(weight).shape[2:]),
        arguments["stride"],
        arguments["padding"],
        arguments["dilation"],
        tuple(small.shape[2:]),
    )
    grouped: tuple[str, ...] = ("g",) if groups > 1 else ()
    places, taps = letters("l", spatial), letters("k", spatial)
    slid: Dims = (("n",), (*grouped, "wide"), *places, *taps)
    still: Dims = (("n",), (*grouped, "narrow"), *places)
    sizes = (("g", groups), ("wide", large.shape[1] // groups), ("narrow", small.shape[1] // groups))
    seen = FormFactor(None if transposed else source, slid, windows)
    other = FormFactor(source if transposed else None, still)
    output = (("n",), ("channels",), *places)
    return Form("output", (seen, other), ((*grouped, "narrow"), ("wide",), *taps), output, sizes)


def _convolution_arguments(consumer: Node) -> dict[str, Any]:
    """The arguments by name, per-dim ones spread over the spatial dims."""
    assert isinstance(consumer.target, torch._ops.OpOverload)
    schema = consumer.target._schema
    named: dict[str, Any] = {one.name: one.default_value for one in schema.arguments}
    named.update(zip(named, arguments(consumer), strict=False))
    named.update(consumer.kwargs)
    count = value(named["weight"]).dim() - 2
    for name in ("stride", "padding", "dilation"):
        given = named[name]
        given = [given] if isinstance(given, int) else list(given)
        named[name] = tuple(given * count if len(given) == 1 else given)
    named["transposed"] = named.get("transposed", "transpose" in str(consumer.target))
    return named


# ---------------------------------------------------------------- rows chosen by ids


def _embedding(consumer: Node, operand: Node) -> Form | None:
    ignored = arguments(consumer)[2] if len(arguments(consumer)) > 2 else -1
    by_frequency = len(arguments(consumer)) > 3 and arguments(consumer)[3]
    if by_frequency or operand is not arguments(consumer)[0]:
        return None
    return _chosen(consumer, operand, arguments(consumer)[1], int(ignored))


def _index_select(consumer: Node, operand: Node) -> Form | None:
    table, dim, ids = arguments(consumer)
    return _chosen(consumer, operand, ids, -1) if operand is table and dim == 0 else None


def _chosen(consumer: Node, table: Node, ids: Node, ignored: int) -> Form:
    places, inner = letters("n", value(ids).dim()), letters("d", value(table).dim() - 1)
    choice = FormFactor(ids, (*places, ("v",)), OneHot(int(value(table).shape[0]), ignored))
    out = (*places, *inner)
    return Form("output", (choice, FormFactor(None, out)), (("v",), *inner), out)


# ---------------------------------------------------------------- recurrent layers


def _recurrence(consumer: Node, operand: Node) -> Form | None:
    """As of a product of all states with the weight: the cotangents of the gates are those of the probe of zeros."""
    weight, bias, projection = arguments(consumer)[4:7]
    probe, probe_out = arguments(consumer)[8:10]
    out: Dims = (("t",), ("b",), ("o",))
    if operand is weight:
        factors = (FormFactor(item(consumer, BEFORE), (("t",), ("b",), ("i",))), FormFactor(None, out))
        return _probed(probe, factors, (("o",), ("i",)), out)
    if operand is bias:
        return _probed(probe, (FormFactor(None, out),), (("o",),), out)
    if operand is projection:
        factors = (FormFactor(item(consumer, HIDDEN), (("t",), ("b",), ("i",))), FormFactor(None, out))
        return _probed(probe_out, factors, (("o",), ("i",)), out)
    return None


def _probed(probe: Node, factors: tuple[FormFactor, ...], parameter: Dims, out: Dims) -> Form | None:
    return Form(probe, factors, parameter, out) if len(probe.users) == 1 else None


USE_RULES: dict[Any, UseRule] = {
    recurrence: _recurrence,
    aten.linear.default: _linear,
    aten.einsum.default: _einsum,
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
    **dict.fromkeys(
        (aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default), _matmul
    ),
    **dict.fromkeys(
        (
            aten.conv1d.default,
            aten.conv2d.default,
            aten.conv3d.default,
            aten.conv_transpose1d.default,
            aten.conv_transpose2d.input,
            aten.conv_transpose3d.input,
            aten.convolution.default,
        ),
        _convolution,
    ),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
}
