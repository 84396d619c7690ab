"""Runs the kernels of ``gramfx::pairwise_gram`` and its kin. Imported where these run on a GPU: it needs triton."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton
from triton.runtime.jit import JITFunction

from gramfx.pairwise_kernels import SQUARE, fold, gathered_tiles, norm_tiles, tiles
from gramfx.pairwise_mend import mend, mend_gathered
from gramfx.pairwise_tiles import (
    ALIGNED,
    LIMITS,
    Tiling,
    exact_tiling_of,
    norm_tiling_of,
    pairs_of,
    ragged_slots,
    slots_of,
    tiling_of,
)

#: Entries of the Gramian to a side that one program of ``fold``, or of ``mend``, looks at.
FOLDED, MENDED = 16, 4
#: In triton's interpreter a product of bfloat16 tiles multiplies their bits, and nothing can be timed.
INTERPRETED = not isinstance(tiles, JITFunction)


def aligned(tensor: Tensor) -> Tensor:
    """With rows that begin every 16 numbers and end in zeros: copied where they do not."""
    missing = -tensor.shape[-1] % ALIGNED
    if missing:
        return shared(torch.nn.functional.pad(tensor, (0, missing)))
    good = tensor.stride(-1) == 1 and all(step % ALIGNED == 0 for step in tensor.stride()[:-1])
    return shared(tensor if good else tensor.contiguous())


def shared(tensor: Tensor) -> Tensor:
    """The same tensor, for several kernels: Inductor would write what it computes elementwise once for each of them,
    but not what a view of given strides is taken of."""
    return tensor.as_strided(tensor.shape, tensor.stride())


def precision_of(factor: Tensor, precision: str) -> str:
    """What a product loses: of 16-bit factors it is exact, whatever is asked for float32 ones."""
    return "ieee" if factor.dtype.itemsize == 2 else precision


class Rows:
    """Both factors of a use of a parameter, and what kernels ask of them.

    act: ``[samples, tokens, d]``, or ids ``[samples, tokens]``. cot: ``[samples, tokens, p]``. With offsets the first
    two dims are one.
    """

    def __init__(self, act: Tensor, cot: Tensor, offsets: Tensor | None, longest: int, ignored: int) -> None:
        one_hot = not act.is_floating_point()
        self.act, self.cot = shared(act.contiguous()) if one_hot else aligned(act), aligned(cot)
        self.offsets, self.ragged = offsets, offsets is not None
        self.samples = cot.shape[0] if offsets is None else offsets.shape[0] - 1
        self.tokens = cot.shape[1] if offsets is None else longest
        self.count = cot.shape[0] if self.ragged else self.samples * self.tokens
        self.average = self.count // self.samples if self.ragged else self.tokens
        by_token = 1 if one_hot else self.act.stride(-2)
        self.arguments = {
            "act": self.act,
            "cot": self.cot,
            "tokens": self.tokens,
            "act_by_sample": 0 if self.ragged else self.act.stride(0),
            "act_by_token": by_token,
            "cot_by_sample": 0 if self.ragged else self.cot.stride(0),
            "cot_by_token": self.cot.stride(-2),
            "act_width": 0 if one_hot else self.act.shape[-1],
            "cot_width": self.cot.shape[-1],
            "ignored": ignored,
            "ONE_HOT": one_hot,
            "RAGGED": self.ragged,
        }

    def empty(self, *shape: Any) -> Tensor:
        """Float32 on the same device."""
        return self.cot.new_empty(shape, dtype=torch.float32)


@dataclass(frozen=True)
class Runs:
    """Where ragged samples lie: the sample of each row, where tiles start, and the tiles of each sample."""

    owners: Tensor | None = None
    starts: Tensor | None = None
    first_tiles: Tensor | None = None
    last_tiles: Tensor | None = None


def runs_of(offsets: Tensor, count: Any, rows: int, slots: int) -> Runs:
    """Tiles start at every ``rows``-th row and with every ``slots``-th sample, so that none holds more samples."""
    samples, device = offsets.shape[0] - 1, offsets.device
    first, last = offsets.narrow(0, 0, samples).to(torch.int64), offsets.narrow(0, 1, samples).to(torch.int64) - 1
    cuts = first.index_select(0, torch.arange(0, samples, slots, device=device))
    starts = torch.cat([torch.arange(0, count, rows, device=device), cuts]).sort().values
    owners = torch.searchsorted(last, torch.arange(count, device=device))
    first_tiles = torch.searchsorted(starts, first, right=True) - 1
    last_tiles = torch.searchsorted(starts, last, right=True) - 1
    last_tiles = torch.where(last < first, -1, last_tiles)
    starts = torch.cat([starts, starts.new_full([1], count)])
    return Runs(*(made.to(torch.int32) for made in (owners, starts, first_tiles, last_tiles)))


@functools.cache
def _tuned(kernel: Any, launches: tuple[Any, ...]) -> Any:
    configs = [
        triton.Config({"INNER": one.inner}, num_warps=one.warps, num_stages=one.stages)
        for one in (launches[:1] if INTERPRETED else launches)
    ]
    return triton.autotune(configs, key=[name for name in kernel.arg_names if name.endswith("width")])(kernel)


def tuned(kernel: Any, tiling: Tiling) -> Any:
    """The kernel with its fastest launch, found at its first call with new widths; the default one where results have
    to be the same in every process."""
    fixed = torch.are_deterministic_algorithms_enabled()
    return _tuned(kernel, tiling.launches[:1] if fixed else tiling.launches)


# ---------------------------------------------------------------- the Gramian


def gram_on_gpu(act: Tensor, cot: Tensor, offsets: Tensor | None, longest: int, ignored: int, precision: str) -> Tensor:
    """See :func:`gramfx.pairwise.pairwise_gram`."""
    precision = precision_of(cot, precision)
    rows = Rows(act, cot, offsets, longest, ignored)
    tiling = tiling_of(cot.dtype, precision, rows.average)
    tile_count, runs = triton.cdiv(rows.count, tiling.rows), Runs()
    if offsets is None:
        slots, whole = slots_of(rows.tokens, tiling.rows)
    else:
        slots, whole = ragged_slots(rows.samples, rows.count, tiling.rows), 0
        runs = runs_of(offsets, rows.count, tiling.rows, slots)
        tile_count = tile_count + triton.cdiv(rows.samples, slots)
    partial, magnitude = (rows.empty(pairs_of(tile_count), slots, slots) for _ in range(2))
    run = tuned(tiles, tiling)
    wrap_triton(run)[(pairs_of(triton.cdiv(tile_count, SQUARE.value)) * SQUARE.value**2,)](
        **rows.arguments, owners=runs.owners, starts=runs.starts, partial=partial, magnitude=magnitude,
        count=rows.count, tile_count=tile_count, TOKENS=whole, SLOTS=slots, ROWS=tiling.rows, PRECISION=precision,
        UPCAST=INTERPRETED,
    )  # fmt: skip
    gram, total = (rows.empty(rows.samples, rows.samples) for _ in range(2))
    wrap_triton(fold)[(pairs_of(triton.cdiv(rows.samples, FOLDED)),)](
        partial, magnitude, gram, total, runs.owners, runs.starts, runs.first_tiles, runs.last_tiles, rows.samples,
        rows.tokens, rows.tokens, tile_count, reach(rows.tokens, tiling.rows), RAGGED=rows.ragged, SYMMETRIC=True,
        SLOTS=slots, ROWS=tiling.rows, BLOCK=FOLDED,
    )  # fmt: skip
    limit = LIMITS[precision]
    sizes, terms = gram.diagonal(), total.diagonal()
    squares = torch.where(terms > limit * sizes, 0, sizes)
    wrap_triton(mend)[(pairs_of(triton.cdiv(rows.samples, MENDED)),)](
        **rows.arguments, **exact(rows.tokens), offsets=rows.offsets, gram_out=gram, total=total, squares=squares,
        samples=rows.samples, limit=limit, DIAGONAL=False, BLOCK=MENDED,
    )  # fmt: skip
    return gram


def exact(tokens: int) -> dict[str, int]:
    """How ``mend`` is run."""
    tiling = exact_tiling_of(tokens)
    (launch,) = tiling.launches
    return {"ROWS": tiling.rows, "INNER": launch.inner, "num_warps": launch.warps, "num_stages": launch.stages}


def reach(tokens: int, rows: int) -> int:
    """How many tiles one sample's rows may lie in."""
    return max(0, tokens - 2) // rows + 2


# ---------------------------------------------------------------- its diagonal


def norms_on_gpu(
    act: Tensor, cot: Tensor, offsets: Tensor | None, longest: int, ignored: int, precision: str
) -> Tensor:
    """See :func:`gramfx.pairwise.pairwise_norms`."""
    precision = precision_of(cot, precision)
    rows = Rows(act, cot, offsets, longest, ignored)
    tiling = norm_tiling_of(cot.dtype, precision, rows.tokens)
    pairs = pairs_of(triton.cdiv(rows.tokens, tiling.rows))
    partial, magnitude = (rows.empty(rows.samples, pairs) for _ in range(2))
    run = tuned(norm_tiles, tiling)
    wrap_triton(run)[(rows.samples, pairs)](
        **rows.arguments, offsets=rows.offsets, partial=partial, magnitude=magnitude, ROWS=tiling.rows,
        PRECISION=precision, UPCAST=INTERPRETED,
    )  # fmt: skip
    norms, total = (one.sum(1, dtype=torch.float64) for one in (partial, magnitude))
    wrap_triton(mend)[(rows.samples,)](
        **rows.arguments, **exact(rows.tokens), offsets=rows.offsets, gram_out=norms, total=total,
        squares=norms.clone(), samples=rows.samples, limit=LIMITS[precision], DIAGONAL=True, BLOCK=1,
    )  # fmt: skip
    return norms.to(torch.float32)


# ---------------------------------------------------------------- a table read by ids and multiplied with


def gathered_on_gpu(
    ids: Tensor, left: Tensor, head: Tensor, right: Tensor, squares: Tensor, ignored: int, precision: str
) -> Tensor:
    """See :func:`gramfx.pairwise.pairwise_gathered`."""
    precision = precision_of(left, precision)
    (samples, left_tokens), right_tokens = ids.shape, right.shape[1]
    ids, left, right = shared(ids.reshape(-1)), aligned(left.flatten(0, 1)), aligned(right.flatten(0, 1))
    by_id = aligned(head.flatten(0, 1).t().contiguous())
    tiling = tiling_of(left.dtype, precision, min(left_tokens, right_tokens))
    left_tiles, right_tiles = (triton.cdiv(samples * one, tiling.rows) for one in (left_tokens, right_tokens))
    slots = max(slots_of(one, tiling.rows)[0] for one in (left_tokens, right_tokens))
    partial, magnitude = (left.new_empty(left_tiles * right_tiles, slots, slots, dtype=torch.float32) for _ in range(2))
    given = {
        "ids": ids, "left": left, "head": by_id, "right": right, "left_tokens": left_tokens,
        "right_tokens": right_tokens, "left_by_row": left.stride(0), "head_by_id": by_id.stride(0),
        "right_by_row": right.stride(0), "width": left.shape[-1], "ignored": ignored,
    }  # fmt: skip
    run = tuned(gathered_tiles, tiling)
    wrap_triton(run)[(left_tiles * right_tiles,)](
        **given, partial=partial, magnitude=magnitude, left_count=samples * left_tokens,
        right_count=samples * right_tokens, right_tiles=right_tiles, SLOTS=slots, ROWS=tiling.rows,
        PRECISION=precision, UPCAST=INTERPRETED,
    )  # fmt: skip
    gram, total = (left.new_empty(samples, samples, dtype=torch.float32) for _ in range(2))
    wrap_triton(fold)[(triton.cdiv(samples, FOLDED) ** 2,)](
        partial, magnitude, gram, total, None, None, None, None, samples, left_tokens, right_tokens, right_tiles,
        max(reach(left_tokens, tiling.rows), reach(right_tokens, tiling.rows)), RAGGED=False, SYMMETRIC=False,
        SLOTS=slots, ROWS=tiling.rows, BLOCK=FOLDED,
    )  # fmt: skip
    gram, total = gram + gram.t(), total + total.t()
    wrap_triton(mend_gathered)[(pairs_of(triton.cdiv(samples, MENDED)),)](
        **given, **exact(max(left_tokens, right_tokens)), gram_out=gram, total=total, squares=squares,
        samples=samples, limit=LIMITS[precision], BLOCK=MENDED,
    )  # fmt: skip
    return gram
