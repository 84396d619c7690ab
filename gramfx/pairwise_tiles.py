"""How the work of ``gramfx::pairwise_gram`` is cut: tiles, what runs them, and the bytes that they leave to fold."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

#: Row strides and widths are multiples of so many numbers: else loads are not asynchronous, and registers spill.
ALIGNED = 16
#: Below so many tokens a sample, small tiles: large ones hold many samples, whose sums one by one take their time.
FEW_TOKENS = 20
#: Of ragged samples, a tile ends early where it would hold more of them.
RAGGED_SLOTS = (4, 32)
#: How far the sizes of the terms of one entry may add up beyond the entry's own before it is taken in float64. Products
#: are exact to 11 bits as ``tf32`` and to 24 otherwise; where terms do not cancel, sizes add up to about 1.
LIMITS = {"ieee": 2.0**11, "tf32x3": 2.0**11, "tf32": 2.0**4}


@dataclass(frozen=True)
class Launch:
    """How a program is run: ``inner`` numbers of each row at a time, by ``warps``, loaded ``stages`` ahead."""

    inner: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiling:
    """``rows`` a tile, and the launches worth trying, the default first."""

    rows: int
    launches: tuple[Launch, ...]


_HALF = {
    128: Tiling(128, (Launch(64, 8, 3), Launch(32, 8, 4))),
    64: Tiling(64, (Launch(64, 4, 3), Launch(32, 4, 4))),
}
_TF32 = {
    128: Tiling(128, (Launch(32, 8, 3), Launch(32, 8, 2))),
    64: Tiling(64, (Launch(32, 4, 3), Launch(32, 4, 2))),
}
_TF32X3 = {64: Tiling(64, (Launch(16, 4, 3), Launch(16, 8, 3)))}
_IEEE = {64: Tiling(64, (Launch(32, 8, 3), Launch(16, 8, 3)))}


def tiling_of(dtype: torch.dtype, precision: str, tokens: Any) -> Tiling:
    """For rows of ``dtype``, ``tokens`` of them a sample."""
    table = _HALF if dtype.itemsize == 2 else {"tf32": _TF32, "tf32x3": _TF32X3, "ieee": _IEEE}[precision]
    return table[64] if tokens < FEW_TOKENS or 128 not in table else table[128]


def norm_tiling_of(dtype: torch.dtype, precision: str, tokens: int) -> Tiling:
    """The same for pairs of tokens of one sample: tiles no larger than a sample needs."""
    found = tiling_of(dtype, precision, tokens)
    return dataclasses.replace(found, rows=min(found.rows, max(16, power_of_two(tokens))))


def exact_tiling_of(tokens: int) -> Tiling:
    """For pairs of tokens of two samples, in float64."""
    return Tiling(16, (Launch(16, 2, 3),)) if tokens <= 16 else Tiling(64, (Launch(16, 8, 3),))


def power_of_two(number: int) -> int:
    """The least that is not below ``number``."""
    return 1 << max(0, int(number) - 1).bit_length()


def slots_of(tokens: int, rows: int) -> tuple[int, int]:
    """``(slots, whole)``: how many samples a tile may hold, a power of two, and, where tiles begin and end with
    samples, or lie inside one, how many rows of a tile are one sample's; else 0."""
    if rows % tokens == 0:
        return rows // tokens, tokens
    if tokens % rows == 0:
        return 1, rows
    return power_of_two(max(0, rows - 2) // tokens + 2), 0


def ragged_slots(samples: Any, count: Any, rows: int) -> int:
    """How many samples a tile of ragged rows may hold: a few times what it holds on average."""
    slots, most = RAGGED_SLOTS
    while slots < most and slots * count < 4 * rows * samples:
        slots *= 2
    return slots


def pairs_of(tiles: Any) -> Any:
    """On and below the diagonal."""
    return tiles * (tiles + 1) // 2


def partial_bytes(samples: Any, tokens: int, rows: int) -> Any:
    """Of the sums that ``fold`` reads, and of their sizes, for many samples; a polynomial of a polynomial."""
    slots, _ = slots_of(tokens, rows)
    each = 2 * 4 * slots**2 * tokens**2
    return samples**2 * -(-each // (2 * rows**2))
