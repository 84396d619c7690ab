"""Ops that meet parameters in a compound way, written as simpler ones: normalise, then multiply, then add.

A rewrite maps ``(node, build)`` to the node that replaces it, or to ``None`` where it is simple enough already. Of an
op with several outputs it changes the call in place, and maps ``(node, item, build)``, item being output 0 of the call,
to the node that replaces the item.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from gramfx.graph import Builder, argument, arguments, value

aten = torch.ops.aten
Rewrite = Callable[[Node, Builder], "Node | None"]
ItemRewrite = Callable[[Node, Node, Builder], "Node | None"]


def _affine(build: Builder, normal: Node, weight: Any, bias: Any, shape: Sequence[int] | None = None) -> Node:
    """``normal * weight + bias`` with both reshaped to ``shape``, in the dtype that the fused op has."""
    dtype = value(normal).dtype
    for held, op in ((weight, aten.mul.Tensor), (bias, aten.add.Tensor)):
        if held is not None:
            held = build(aten.reshape.default, held, list(shape)) if shape else held
            normal = build(op, normal, held)
    return normal if value(normal).dtype == dtype else build(aten._to_copy.default, normal, dtype=dtype)


def _channels(rank: int) -> list[int]:
    """The shape that puts a vector on the channel dim of a tensor of ``rank`` dims."""
    return [-1] + [1] * (rank - 2)


def _without(node: Node, build: Builder, *positions: int) -> Node:
    """The same call with the arguments at ``positions`` absent."""
    args, kwargs = _absent(node, positions)
    assert callable(node.target)
    return build(node.target, *args, **kwargs)


def _absent(node: Node, positions: Sequence[int]) -> tuple[list[Any], dict[str, Any]]:
    args = [None if i in positions else arg for i, arg in enumerate(arguments(node))]
    return args, {name: None if name in ("weight", "bias") else held for name, held in node.kwargs.items()}


def _layer_norm(node: Node, build: Builder) -> Node:
    weight, bias = argument(node, 2, "weight"), argument(node, 3, "bias")
    return _affine(build, _without(node, build, 2, 3), weight, bias)


def _native_layer_norm(node: Node, item: Node, build: Builder) -> Node:
    weight, bias = arguments(node)[2:4]
    node.args = tuple(_absent(node, (2, 3))[0])
    return _affine(build, item, weight, bias)


def _rms_norm(node: Node, build: Builder) -> Node:
    return _affine(build, _without(node, build, 2), argument(node, 2, "weight"), None)


def _group_norm(node: Node, build: Builder) -> Node:
    weight, bias = argument(node, 2, "weight"), argument(node, 3, "bias")
    return _affine(build, _without(node, build, 2, 3), weight, bias, _channels(value(node).dim()))


def _batch_norm(node: Node, build: Builder) -> Node:
    """``batch_norm`` and ``instance_norm``: a single output."""
    normal = _without(node, build, 1, 2)
    return _affine(build, normal, arguments(node)[1], arguments(node)[2], _channels(value(node).dim()))


def _norm_of_channels(node: Node, item: Node, build: Builder) -> Node:
    """Norms that also return statistics, which do not see weight and bias."""
    weight, bias = arguments(node)[1:3]
    node.args = tuple(_absent(node, (1, 2))[0])
    return _affine(build, item, weight, bias, _channels(value(item).dim()))


def _prelu(node: Node, build: Builder) -> Node:
    source, weight = arguments(node)
    rank = value(source).dim()
    if value(weight).numel() > 1 and rank > 1:
        weight = build(aten.reshape.default, weight, _channels(rank))
    elif rank == 0:
        weight = build(aten.reshape.default, weight, [])
    return build(aten.where.self, build(aten.gt.Scalar, source, 0), source, build(aten.mul.Tensor, source, weight))


def _bilinear(node: Node, build: Builder) -> Node:
    left, right, weight = arguments(node)[:3]
    product = build(aten.einsum.default, "...i,oij,...j->...o", [left, weight, right])
    return _affine(build, product, None, argument(node, 3, "bias"))


def _added_product(node: Node, build: Builder) -> Node:
    """``beta * input + alpha * (a @ b)``."""
    source, left, right = arguments(node)[:3]
    product = build(aten.matmul.default, left, right)
    if (alpha := node.kwargs.get("alpha", 1)) != 1:
        product = build(aten.mul.Scalar, product, alpha)
    if (beta := node.kwargs.get("beta", 1)) == 0:
        return product
    if beta != 1:
        source = build(aten.mul.Scalar, source, beta)
    return build(aten.add.Tensor, product, source)


def _attention(node: Node, build: Builder) -> Node:
    """``softmax(q kᵀ scale + mask) v``, in the order of torch's own reference path."""
    query, key, held = arguments(node)[:3]
    mask, dropout, causal = (
        argument(node, 3, "attn_mask"),
        argument(node, 4, "dropout_p", 0.0),
        argument(node, 5, "is_causal", False),
    )
    if node.kwargs.get("enable_gqa"):
        key, held = (_repeated_heads(build, query, heads) for heads in (key, held))
    scale: Any = node.kwargs.get("scale")
    scale = value(query).shape[-1] ** -0.5 if scale is None else scale
    keys = build(aten.transpose.int, build(aten.mul.Scalar, key, scale**0.5), -2, -1)
    scores = build(aten.matmul.default, build(aten.mul.Scalar, query, scale**0.5), keys)
    if causal:
        shape = [int(size) for size in value(scores).shape[-2:]]
        mask = build(aten.tril.default, build(aten.ones.default, shape, dtype=torch.bool, device=value(query).device))
    if mask is not None and value(mask).dtype == torch.bool:
        scores = build(aten.masked_fill.Scalar, scores, build(aten.logical_not.default, mask), float("-inf"))
    elif mask is not None:
        scores = build(aten.add.Tensor, scores, mask)
    weights = build(aten.softmax.int, scores, -1)
    if dropout:
        weights = _masked(
            weights, build(aten.native_dropout.default, build(aten.detach.default, weights), dropout, True), build
        )
    return build(aten.matmul.default, weights, held)


def _repeated_heads(build: Builder, query: Node, heads: Any) -> Node:
    times = int(value(query).shape[-3]) // int(value(heads).shape[-3])
    return build(aten.repeat_interleave.self_int, heads, times, -3)


def _dropout(node: Node, item: Node, build: Builder) -> Node:
    """``x * mask * scale``: the random draw is the mask alone."""
    source = arguments(node)[0]
    assert isinstance(source, Node)
    if len(arguments(node)) > 2 and arguments(node)[2] is False:
        return source
    node.args = (Builder(node)(aten.detach.default, source), *arguments(node)[1:])
    return _masked(source, node, build)


def _masked(source: Node, drawn: Node, build: Builder) -> Node:
    probability = float(arguments(drawn)[1])
    mask = build(operator.getitem, drawn, 1)
    scale = 0.0 if probability == 1 else 1 / (1 - probability)
    return build(aten.mul.Scalar, build(aten.mul.Tensor, source, mask), scale)


def _index(node: Node, build: Builder) -> Node | None:
    """Rows chosen by one tensor of ids, or by ids of several leading dims, as ``embedding`` does."""
    table, indices = arguments(node)
    given = [index for index in indices if index is not None]
    if value(table).is_complex():
        return None  # which embedding cannot differentiate
    if list(indices[: len(given)]) != given or any(value(i).dtype == torch.bool for i in given):
        return None
    shape = [int(size) for size in value(table).shape]
    ids = build(aten.remainder.Scalar, given[0], shape[0])
    for index, size in zip(given[1:], shape[1:], strict=False):
        ids = build(aten.add.Tensor, build(aten.mul.Scalar, ids, size), build(aten.remainder.Scalar, index, size))
    count, rest = len(given), shape[len(given) :]
    flat = build(aten.reshape.default, table, [-1, *rest]) if count > 1 else table
    if len(rest) == 1:
        return build(aten.embedding.default, flat, ids)
    rows = build(aten.reshape.default, flat, [_product(shape[:count]), -1])
    chosen = build(aten.embedding.default, rows, ids)
    return build(aten.unflatten.int, chosen, -1, rest) if rest else build(aten.squeeze.dim, chosen, -1)


def _embedding_bag(node: Node, item: Node, build: Builder) -> Node | None:
    """Bags of equal size, as 2-D ids make them: rows chosen, then summed. Other bags are left to the fallback."""
    table, flat, offsets = arguments(node)[:3]
    mode, weights, ignored = arguments(node)[4], argument(node, 6), argument(node, 8)
    regular = offsets.target is aten.arange.start_step and arguments(offsets)[0] == 0
    if not regular or mode == 2 or argument(node, 3) or argument(node, 7):
        return None
    shape = [-1, int(arguments(offsets)[2])]
    ids = build(aten.reshape.default, flat, shape)
    rows = build(aten.embedding.default, table, ids)
    count: Node | None = None
    if ignored is not None:
        counted = build(aten.ne.Scalar, ids, ignored)
        rows = build(aten.mul.Tensor, rows, build(aten.unsqueeze.default, counted, -1))
        count = build(aten.clamp.default, build(aten.sum.dim_IntList, counted, [1], True), 1)
    if weights is not None:
        scales = build(aten.unsqueeze.default, build(aten.reshape.default, weights, shape), -1)
        rows = build(aten.mul.Tensor, rows, scales)
    total = build(aten.sum.dim_IntList, rows, [1])
    return total if mode == 0 else build(aten.div.Tensor, total, shape[1] if count is None else count)


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _padded_convolution(node: Node, build: Builder) -> Node:
    """``padding='same'`` as a pad and a convolution without."""
    source, weight = arguments(node)[:2]
    bias, stride, padding = (
        argument(node, 2, "bias"),
        argument(node, 3, "stride", 1),
        argument(node, 4, "padding", "valid"),
    )
    dilation, groups = argument(node, 5, "dilation", 1), argument(node, 6, "groups", 1)
    kernel = value(weight).shape[2:]
    stride, dilation = (_per_dim(given, len(kernel)) for given in (stride, dilation))
    if padding == "same":
        totals = [d * (int(k) - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
        source = build(aten.constant_pad_nd.default, source, sides)
    plain = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)[len(kernel) - 1]
    return build(plain, source, weight, bias, stride, [0] * len(kernel), dilation, groups)


def _per_dim(given: Any, count: int) -> list[int]:
    listed = [given] if isinstance(given, int) else list(given)
    return listed * count if len(listed) == 1 else listed


#: Rewritten where an operand at one of the positions comes from parameters alone.
REWRITES: dict[Any, tuple[Rewrite, tuple[int, ...]]] = {
    aten.layer_norm.default: (_layer_norm, (2, 3)),
    aten.rms_norm.default: (_rms_norm, (2,)),
    aten.group_norm.default: (_group_norm, (2, 3)),
    aten.batch_norm.default: (_batch_norm, (1, 2)),
    aten.instance_norm.default: (_batch_norm, (1, 2)),
    aten.prelu.default: (_prelu, (1,)),
    aten._prelu_kernel.default: (_prelu, (1,)),
    aten.bilinear.default: (_bilinear, (2, 3)),
    aten.addmm.default: (_added_product, (0, 1, 2)),
    aten.addmv.default: (_added_product, (0, 1, 2)),
    aten.baddbmm.default: (_added_product, (0, 1, 2)),
    aten.scaled_dot_product_attention.default: (_attention, (3,)),
    aten.index.Tensor: (_index, (0,)),
    **dict.fromkeys((aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding), (_padded_convolution, (1, 2))),
}

#: The same for ops with several outputs. Dropout is rewritten always.
ITEM_REWRITES: dict[Any, tuple[ItemRewrite, tuple[int, ...]]] = {
    aten.native_layer_norm.default: (_native_layer_norm, (2, 3)),
    **dict.fromkeys(
        (
            aten.native_group_norm.default,
            aten._native_batch_norm_legit_functional.default,
            aten._native_batch_norm_legit_no_training.default,
            aten._native_batch_norm_legit.no_stats,
            aten.native_batch_norm.default,
        ),
        (_norm_of_channels, (1, 2)),
    ),
    aten.native_dropout.default: (_dropout, ()),
    **dict.fromkeys((aten.embedding_bag.padding_idx, aten.embedding_bag.default), (_embedding_bag, (0,))),
}

#: Ops that no parameter may reach at these positions once the graph is canonical: their rewrites always apply.
AFFINE: dict[Any, tuple[int, ...]] = {
    op: positions
    for op, (_, positions) in {**REWRITES, **ITEM_REWRITES}.items()
    if op is not aten.index.Tensor and op.overloadpacket not in (aten.embedding_bag, aten.native_dropout)
}
