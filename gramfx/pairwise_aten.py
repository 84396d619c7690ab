"""``gramfx::pairwise_gram`` and its kin in ATen, for devices that the kernels are not for: in float64, by few tokens.

Sums over pairs of tokens cancel far more than gradients do, so that float32 would not do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gramfx.torch_compat import is_symbolic

#: Numbers that products of a few tokens of all samples may take, and so many tokens at least.
MOST, FEW = 2**20, 4


def padded(rows: Tensor, offsets: Tensor | None, longest: int, filled: int = 0) -> Tensor:
    """``[count, ...] -> [samples, longest, ...]``, ``filled`` behind the samples; without offsets as it is."""
    if offsets is None:
        return rows
    first = offsets[:-1].to(torch.int64).unsqueeze(1)
    places = first + torch.arange(longest, device=rows.device)
    inside = places < offsets[1:].unsqueeze(1)
    if rows.shape[0] == 0:
        return rows.new_full((*places.shape, *rows.shape[1:]), filled)
    taken = rows[places.clamp(max=rows.shape[0] - 1)]
    return torch.where(inside.reshape(*inside.shape, *(1,) * (rows.dim() - 1)), taken, filled)


def parts_of(tokens: int, samples: Any, pairs: Any) -> list[slice]:
    """Tokens, a few at a time. pairs: of samples, whose products are alive at once."""
    few = FEW if is_symbolic(samples) else max(FEW, math.isqrt(MOST // max(1, pairs)))
    return [slice(at, min(at + few, tokens)) for at in range(0, tokens, few)]


def _pairs(parts: list[slice]) -> Iterator[tuple[slice, slice]]:
    return ((left, right) for i, left in enumerate(parts) for right in parts[: i + 1])


def _products(left: Tensor, right: Tensor) -> Tensor:
    """``[N, T, d], [N, S, d] -> [N, T, N, S]`` in float64."""
    flat = left.flatten(0, 1).double() @ right.flatten(0, 1).double().t()
    return flat.reshape(left.shape[0], left.shape[1], right.shape[0], right.shape[1])


def _products_inside(left: Tensor, right: Tensor) -> Tensor:
    """``[N, T, d], [N, S, d] -> [N, T, S]`` in float64."""
    return left.double() @ right.double().transpose(1, 2)


def gram(act: Tensor, cot: Tensor, ignored: int) -> Tensor:
    """``[N, T, d]`` or ids ``[N, T]``, ``[N, T, p] -> [N, N]`` in float64."""
    samples = cot.shape[0]
    total = cot.new_zeros(samples, samples, dtype=torch.float64)
    for left, right in _pairs(parts_of(cot.shape[1], samples, samples * samples)):
        made = _products(cot[:, left], cot[:, right])
        if act.is_floating_point():
            made = made * _products(act[:, left], act[:, right])
        else:
            mine, theirs = act[:, left], act[:, right]
            equal = mine.reshape(*mine.shape, 1, 1) == theirs
            made = made * (equal & (mine != ignored).reshape(*mine.shape, 1, 1))
        block = made.sum((1, 3))
        total = total + (block if left == right else block + block.t())
    return total


def norms(act: Tensor, cot: Tensor, ignored: int) -> Tensor:
    """``[N, T, d]`` or ids ``[N, T]``, ``[N, T, p] -> [N]`` in float64: the diagonal of :func:`gram`."""
    samples = cot.shape[0]
    total = cot.new_zeros(samples, dtype=torch.float64)
    for left, right in _pairs(parts_of(cot.shape[1], samples, samples)):
        made = _products_inside(cot[:, left], cot[:, right])
        if act.is_floating_point():
            made = made * _products_inside(act[:, left], act[:, right])
        else:
            mine, theirs = act[:, left].unsqueeze(2), act[:, right].unsqueeze(1)
            made = made * ((mine == theirs) & (mine != ignored))
        total = total + made.sum((1, 2)) * (1 if left == right else 2)
    return total


def gathered(ids: Tensor, left: Tensor, head: Tensor, right: Tensor, ignored: int) -> Tensor:
    """``[N, T], [N, T, d], [N, S, v], [N, S, d] -> [N, N]`` in float64."""
    samples = ids.shape[0]
    total = left.new_zeros(samples, samples, dtype=torch.float64)
    for mine in parts_of(ids.shape[1], samples, samples * samples):
        for theirs in parts_of(right.shape[1], samples, samples * samples):
            chosen = ids[:, mine]
            kept = chosen != ignored
            seen = head[:, theirs][..., torch.where(kept, chosen, 0)].permute(2, 3, 0, 1).double()
            seen = seen * kept.reshape(*kept.shape, 1, 1)
            total = total + (seen * _products(left[:, mine], right[:, theirs])).sum((1, 3))
    return total + total.t()
