"""What the Triton kernels behind ``gramfx::pairwise_gram`` are made of.

Kernels are imported where they are launched, since triton comes with torch's CUDA builds only. A sample's rows are its
tokens, one after the other. Arguments carry no types: Inductor copies the source to where these are not known.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def triangle(number):
    """``(i, j)``, ``j <= i``, of an entry counted row by row. The root is a float32 and may be off by one."""
    i = ((tl.sqrt(8.0 * number + 1) - 1) / 2).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    return i, number - i * (i + 1) // 2


@triton.jit
def owner_of(rows, owners, tokens, RAGGED: tl.constexpr):
    """The sample that a row is of."""
    owner = tl.load(owners + rows) if RAGGED else rows // tokens
    return owner


@triton.jit
def gram(
    left,
    right,
    width,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``[ROWS, ROWS]``: products of the rows that begin at ``left`` with those at ``right``. WIDE: in float64."""
    inner = tl.arange(0, INNER)
    total = tl.zeros([ROWS, ROWS], tl.float64 if WIDE else tl.float32)
    for start in range(0, width, INNER):
        inside = inner < width - start
        a = tl.load(left[:, None] + (start + inner)[None, :], mask=inside[None, :], other=0)
        b = tl.load(right[None, :] + (start + inner)[:, None], mask=inside[:, None], other=0)
        if WIDE:
            total = tl.dot(a.to(tl.float64), b.to(tl.float64), total, out_dtype=tl.float64)
        elif UPCAST:
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total)
        else:
            total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def equal(left, right, ignored):
    """``[ROWS, ROWS]``: where ids agree, on anything but ``ignored``."""
    return (left[:, None] == right[None, :]) & (left != ignored)[:, None]


@triton.jit
def span(sample, offsets, tokens, RAGGED: tl.constexpr):
    """The first of a sample's rows, and how many it has."""
    if RAGGED:
        first = tl.load(offsets + sample)
        length = tl.load(offsets + sample + 1) - first
    else:
        first = sample * tokens
        length = tokens
    return first, length


@triton.jit
def start(sample, first, by_sample, by_token, RAGGED: tl.constexpr):
    """How far a sample's first row begins from the start of its tensor."""
    place = first.to(tl.int64) * by_token if RAGGED else sample.to(tl.int64) * by_sample
    return place


@triton.jit
def gathered(head, ids, rows, head_by_id, ignored):
    """``[ROWS, ROWS]``: ``head[id, row]``, zero where an id is ignored."""
    places = ids.to(tl.int64)[:, None] * head_by_id + rows[None, :]
    return tl.load(head + places, mask=(ids != ignored)[:, None], other=0)


@triton.jit
def rows_of(
    tile,
    owners,
    starts,
    count,
    tokens,
    RAGGED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Of a tile: its rows, ``[ROWS]``, the last one again beyond its end; their samples; their samples counted from
    the tile's first, -1 beyond its end."""
    if RAGGED:
        first = tl.load(starts + tile)
        end = tl.load(starts + tile + 1)
    else:
        first = tile * ROWS
        end = tl.minimum(first + ROWS, count)
    rows = first + tl.arange(0, ROWS)
    inside = rows < end
    rows = tl.minimum(rows, count - 1)
    owner = owner_of(rows, owners, tokens, RAGGED)
    base = owner_of(tl.minimum(first, count - 1), owners, tokens, RAGGED)
    return rows, owner, tl.where(inside, owner - base, -1)


@triton.jit
def places_of(rows, owner, tokens, by_sample, by_token, RAGGED: tl.constexpr):
    """How far each row begins from the start of its tensor."""
    if RAGGED:
        places = rows.to(tl.int64) * by_token
    else:
        places = owner.to(tl.int64) * by_sample + (rows - owner * tokens).to(tl.int64) * by_token
    return places


@triton.jit
def store_by_sample(
    product,
    left,
    right,
    partial,
    magnitude,
    to,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums of ``product [ROWS, ROWS]``, and of its size, by pairs of samples: ``[SLOTS, SLOTS]`` from ``to`` on.

    TOKENS: that many rows a sample, where tiles hold whole samples, or rows of one; else 0, and ``left`` and ``right``
    tell the samples. One-hot products would do it too, but spill.
    """
    slots = tl.arange(0, SLOTS)
    if TOKENS > 0:
        at = to + slots[:, None] * SLOTS + slots[None, :]
        tl.store(partial + at, _by_sample(product, TOKENS, SLOTS, ROWS))
        tl.store(magnitude + at, _by_sample(tl.abs(product), TOKENS, SLOTS, ROWS))
    else:
        for slot in range(SLOTS):
            mine = tl.where((left == slot)[:, None], product, 0.0)
            at = to + slot * SLOTS + slots
            seen = right[None, :] == slots[:, None]
            tl.store(partial + at, tl.sum(tl.where(seen, tl.sum(mine, 0)[None, :], 0.0), 1))
            tl.store(magnitude + at, tl.sum(tl.where(seen, tl.sum(tl.abs(mine), 0)[None, :], 0.0), 1))


@triton.jit
def _by_sample(product, TOKENS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.sum(tl.reshape(product, [ROWS, SLOTS, TOKENS]), 2)
    return tl.sum(tl.reshape(rows, [SLOTS, TOKENS, SLOTS]), 1)
