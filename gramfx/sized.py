"""Ops whose results have a size that tensor values make, as ops of the size that is read where they are met."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gramfx.errors import DataDependentError
from gramfx.source import user_frame
from gramfx.torch_compat import READS_VALUES

aten = torch.ops.aten

#: What reads the number that a tensor holds.
Read = Callable[[Tensor], Any]


def _item(number: Read, func: Any, tensor: Tensor) -> Any:
    return number(tensor)


def _places(number: Read, mask: Tensor) -> Tensor:
    """``nonzero(mask)``."""
    return aten.nonzero_static.default(mask, size=number(mask.count_nonzero()))


def _nonzero(number: Read, func: Any, tensor: Tensor) -> Any:
    return _places(number, tensor)


def _masked(indices: Sequence[Tensor | None]) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices)


def _numbered(number: Read, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices with the places of masks for masks."""
    made: list[Tensor | None] = []
    for one in indices:
        if one is not None and _masked([one]):
            made += _places(number, one).unbind(1)
        else:
            made.append(one)
    return made


def _index(number: Read, func: Any, source: Tensor, indices: Sequence[Tensor | None]) -> Any:
    if not _masked(indices):
        return None
    return func(source, _numbered(number, indices))


def _index_put(
    number: Read, func: Any, source: Tensor, indices: Sequence[Tensor | None], values: Tensor, *flags: bool
) -> Any:
    # One number for all places needs no count of them.
    if not _masked(indices) or (values.numel() == 1 and not values.requires_grad):
        return None
    return func(source, _numbered(number, indices), values, *flags)


def _masked_select(number: Read, func: Any, source: Tensor, mask: Tensor) -> Any:
    source, mask = torch.broadcast_tensors(source, mask)
    return aten.index.Tensor(source, _numbered(number, [mask]))


def _repeat_interleave(number: Read, func: Any, repeats: Tensor, output_size: int | None = None) -> Any:
    if output_size is not None:
        return None
    count = number(repeats.sum())
    ends = repeats.cumsum(0)
    made = torch.searchsorted(ends, torch.arange(count, device=ends.device, dtype=ends.dtype), right=True)
    return made.clamp(max=max(len(repeats) - 1, 0)).to(repeats.dtype)


def _bincount(number: Read, func: Any, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    length = max(minlength, 1 + number(tensor.max()) if tensor.numel() else 0)
    zeros = torch.zeros(length, dtype=torch.int64 if weights is None else torch.float64, device=tensor.device)
    if weights is not None and weights.dtype == torch.float32:
        zeros = zeros.to(weights.dtype)
    added = torch.ones_like(tensor, dtype=zeros.dtype) if weights is None else weights.to(zeros.dtype)
    return zeros.index_add(0, tensor.long(), added)


def _equal(number: Read, func: Any, left: Tensor, right: Tensor) -> Any:
    if left.shape != right.shape:
        return False
    return number(left.eq(right).all())


def _runs(number: Read, ordered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of values in order: where runs of equal ones start, in which run each is, and how long each run is."""
    first = torch.ones_like(ordered[:1], dtype=torch.bool)
    starting = torch.cat([first, ordered[1:] != ordered[:-1]])
    starts = _places(number, starting)[:, 0]
    ends = torch.cat([starts[1:], starts.new_full((1,), len(ordered))])[: len(starts)]
    return starts, starting.cumsum(0) - 1, ends - starts


def _unique(
    number: Read,
    func: Any,
    tensor: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    """As on a CPU: in ascending order, asked for or not."""
    ordered, order = tensor.reshape(-1).sort(stable=True)
    starts, runs, counts = _runs(number, ordered)
    inverse = torch.zeros_like(runs).scatter(0, order, runs).reshape(tensor.shape)
    empty = starts.new_empty(0)
    return ordered[starts], inverse if return_inverse else empty, counts if return_counts else empty


def _unique_consecutive(
    number: Read,
    func: Any,
    tensor: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    if dim is not None:
        raise unknown(func)
    flat = tensor.reshape(-1)
    starts, runs, counts = _runs(number, flat)
    empty = starts.new_empty(0)
    return flat[starts], runs.reshape(tensor.shape) if return_inverse else empty, counts if return_counts else empty


def unknown(func: Any) -> DataDependentError:
    """The error for an op that has no form here."""
    return DataDependentError(
        "an op makes a tensor whose size depends on tensor values",
        expected=", ".join(sorted({str(op).split(".")[1] for op in SIZED if READS_VALUES.intersection(op.tags)})),
        got=str(func),
        where=user_frame(traceback.extract_stack()),
        remedy="write it with one of these, or with fixed shapes and masks",
    )


#: For a call that reads values, its result; ``None`` where a call of the op does not.
SIZED: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _item,
    aten.nonzero.default: _nonzero,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.masked_select.default: _masked_select,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.bincount.default: _bincount,
    aten.equal.default: _equal,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_consecutive,
}
