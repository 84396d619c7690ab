"""Gramians by pairs of tokens as one op each: Triton kernels on CUDA devices, ATen elsewhere.

For a parameter whose gradient is ``Σ_t A[b, t] ⊗ C[b, t]``, an outer product of activation and cotangent a token,

    G[b, c] = Σ_{t, s} (A[b, t] · A[c, s]) (C[b, t] · C[c, s])

and nothing as large as the pairs of tokens is ever in memory. Where the terms of an entry cancel so much that their
rounding would show, the kernels take that entry once more in float64. That is decided on the device, entry by entry:
asking on the host would make it wait for the device, and a ``torch.where`` would do all the work twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op
from torch.utils.flop_counter import register_flop_formula

from gramfx import pairwise_aten

#: How float32 factors are multiplied on tensor cores: see ``input_precision`` of ``triton.language.dot``.
PRECISE = "tf32x3"


def pairwise_gram(
    act: Tensor,
    cot: Tensor,
    offsets: Tensor | None = None,
    longest: int = 0,
    ignored: int = -1,
    precision: str = PRECISE,
) -> Tensor:
    """``[N, N]``: ``Σ_{t, s} (A[b, t] · A[c, s]) (C[b, t] · C[c, s])``, in float32, of float64 factors in float64.

    act: ``A [N, T, d]``, or ids ``[N, T]`` for one-hot rows, of which those equal to ``ignored`` are zero. cot:
    ``C [N, T, p]``. Of ragged samples, the first two dims are one; sample b is the rows from ``offsets[b]`` up to
    ``offsets[b + 1]``, ``longest`` of them at most, and ``offsets[0]`` is 0.
    """
    if _empty(cot, offsets, longest):
        return _zeros(cot, _samples(cot, offsets), _samples(cot, offsets))
    if _by_kernels(cot):
        from gramfx.pairwise_launch import gram_on_gpu

        return gram_on_gpu(act, cot, offsets, longest, ignored, precision)
    act, cot = pairwise_aten.padded(act, offsets, longest), pairwise_aten.padded(cot, offsets, longest)
    return pairwise_aten.gram(act, cot, ignored).to(_accumulated(cot.dtype))


def pairwise_norms(
    act: Tensor,
    cot: Tensor,
    offsets: Tensor | None = None,
    longest: int = 0,
    ignored: int = -1,
    precision: str = PRECISE,
) -> Tensor:
    """``[N]``: the diagonal of :func:`pairwise_gram`, squared norms of the samples' gradients."""
    if _empty(cot, offsets, longest):
        return _zeros(cot, _samples(cot, offsets))
    if _by_kernels(cot):
        from gramfx.pairwise_launch import norms_on_gpu

        return norms_on_gpu(act, cot, offsets, longest, ignored, precision)
    act, cot = pairwise_aten.padded(act, offsets, longest), pairwise_aten.padded(cot, offsets, longest)
    return pairwise_aten.norms(act, cot, ignored).to(_accumulated(cot.dtype))


def pairwise_gathered(
    ids: Tensor,
    left: Tensor,
    head: Tensor,
    right: Tensor,
    squares: Tensor,
    ignored: int = -1,
    precision: str = PRECISE,
) -> Tensor:
    """``[N, N]``: ``X + Xᵀ`` for ``X[b, c] = Σ_{t, s} head[c, s, ids[b, t]] (left[b, t] · right[c, s])``.

    What a table of vectors, read by ids and multiplied with as well (tied embeddings), adds to the Gramians of both
    uses. ids: ``[N, T]``. left: ``[N, T, d]``, cotangents of what was read. head: ``[N, S, v]``, cotangents of the
    products; right: ``[N, S, d]``, what was multiplied. squares: ``[N]``, the diagonal of those two Gramians together:
    what cancelling is measured by.
    """
    if _empty(left, None, 0) or _empty(right, None, 0):
        return _zeros(left, left.shape[0], left.shape[0])
    if _by_kernels(left):
        from gramfx.pairwise_launch import gathered_on_gpu

        return gathered_on_gpu(ids, left, head, right, squares, ignored, precision)
    return pairwise_aten.gathered(ids, left, head, right, ignored).to(_accumulated(left.dtype))


def precision() -> str:
    """That of float32 products, as torch's own are set to: see ``torch.set_float32_matmul_precision``."""
    return PRECISE if torch.get_float32_matmul_precision() == "highest" else "tf32"


def alike(*tensors: Tensor) -> list[Tensor]:
    """Those that are no ids in their common dtype."""
    dtype = functools.reduce(torch.promote_types, (one.dtype for one in tensors if one.is_floating_point()))
    return [one.to(dtype) if one.is_floating_point() else one for one in tensors]


def _by_kernels(cot: Tensor) -> bool:
    return cot.device.type == "cuda" and cot.dtype != torch.float64


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _samples(cot: Tensor, offsets: Tensor | None) -> Any:
    return cot.shape[0] if offsets is None else offsets.shape[0] - 1


def _empty(cot: Tensor, offsets: Tensor | None, longest: int) -> bool:
    """Whether there is nothing to sum: no rows, or none in any sample."""
    return cot.numel() == 0 or (offsets is not None and longest == 0)


def _zeros(cot: Tensor, *shape: Any) -> Tensor:
    return cot.new_zeros(shape, dtype=_accumulated(cot.dtype))


# ---------------------------------------------------------------- shapes


def _gram_shape(act: Tensor, cot: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    samples = _samples(cot, offsets)
    return cot.new_empty(samples, samples, dtype=_accumulated(cot.dtype))


def _norms_shape(act: Tensor, cot: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    return cot.new_empty(_samples(cot, offsets), dtype=_accumulated(cot.dtype))


def _gathered_shape(ids: Tensor, left: Tensor, *_: Any, **__: Any) -> Tensor:
    return left.new_empty(left.shape[0], left.shape[0], dtype=_accumulated(left.dtype))


def _registered(function: Callable[..., Tensor], shape: Callable[..., Tensor]) -> Any:
    """The op of a function. Inductor looks into it; what traces it for shapes alone does not run its loops."""
    op: Any = triton_op(f"gramfx::{function.__name__}", function, mutates_args=())
    op.register_fake(shape)
    return getattr(torch.ops.gramfx, function.__name__).default


PAIRWISE_GRAM = _registered(pairwise_gram, _gram_shape)
PAIRWISE_NORMS = _registered(pairwise_norms, _norms_shape)
PAIRWISE_GATHERED = _registered(pairwise_gathered, _gathered_shape)


# ---------------------------------------------------------------- flops, two a multiply-add


def flops_of_pairs(rows: Any, width: Any) -> Any:
    """Of the products of ``width`` numbers of all pairs of rows, each pair once."""
    return rows * (rows + 1) * width


@register_flop_formula(torch.ops.gramfx.pairwise_gram)
def _(act: Any, cot: Any, *_: Any, **__: Any) -> Any:
    # Ids are compared, not multiplied.
    return flops_of_pairs(math.prod(cot[:-1]), cot[-1] + (act[-1] if len(act) == len(cot) else 0))


@register_flop_formula(torch.ops.gramfx.pairwise_norms)
def _(act: Any, cot: Any, offsets: Any = None, longest: int = 0, *_: Any, **__: Any) -> Any:
    width = cot[-1] + (act[-1] if len(act) == len(cot) else 0)
    if offsets is None:
        return cot[0] * flops_of_pairs(cot[1], width)
    return (offsets[0] - 1) * flops_of_pairs(longest, width)


@register_flop_formula(torch.ops.gramfx.pairwise_gathered)
def _(ids: Any, left: Any, head: Any, right: Any, *_: Any, **__: Any) -> Any:
    return 2 * math.prod(left[:-1]) * math.prod(right[:-1]) * left[-1]
