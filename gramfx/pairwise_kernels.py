"""Triton kernels behind ``gramfx::pairwise_gram``: products of tiles of rows, summed by pairs of samples.

A tile is some rows that follow each other, whatever samples they are of. ``tiles`` leaves sums by pairs of samples for
each pair of tiles, and ``fold`` adds up what several of these hold of one pair: no two programs write to one place.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from gramfx.pairwise_pieces import equal, gathered, gram, places_of, rows_of, span, start, store_by_sample, triangle

#: Pairs of tiles that share rows run one after the other, in squares of so many, so that rows stay in the cache.
SQUARE = tl.constexpr(8)


# ---------------------------------------------------------------- tiles


@triton.jit
def tiles(
    act,
    cot,
    owners,
    starts,
    partial,
    magnitude,
    count,
    tokens,
    act_by_sample,
    act_by_token,
    cot_by_sample,
    cot_by_token,
    act_width,
    cot_width,
    tile_count,
    ignored,
    ONE_HOT: tl.constexpr,
    RAGGED: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    INNER: tl.constexpr,
):
    """``Σ (a·a')(c·c')`` and ``Σ |(a·a')(c·c')|`` over the rows of two tiles, by pairs of samples.

    act: rows ``[count, act_width]``, or ids ``[count]``. cot: ``[count, cot_width]``. partial and magnitude:
    ``[pairs of tiles on and below the diagonal, SLOTS, SLOTS]``.
    """
    square, within = tl.program_id(0) // (SQUARE * SQUARE), tl.program_id(0) % (SQUARE * SQUARE)
    down, across = triangle(square)
    i, j = down * SQUARE + within // SQUARE, across * SQUARE + within % SQUARE
    if i >= tile_count or j > i:
        return
    rows_i, owner_i, slot_i = rows_of(i, owners, starts, count, tokens, RAGGED, ROWS)
    rows_j, owner_j, slot_j = rows_of(j, owners, starts, count, tokens, RAGGED, ROWS)
    cot_i = cot + places_of(rows_i, owner_i, tokens, cot_by_sample, cot_by_token, RAGGED)
    cot_j = cot + places_of(rows_j, owner_j, tokens, cot_by_sample, cot_by_token, RAGGED)
    product = gram(cot_i, cot_j, cot_width, ROWS, INNER, PRECISION, False, UPCAST)
    act_i = act + places_of(rows_i, owner_i, tokens, act_by_sample, act_by_token, RAGGED)
    act_j = act + places_of(rows_j, owner_j, tokens, act_by_sample, act_by_token, RAGGED)
    if ONE_HOT:
        product = tl.where(equal(tl.load(act_i), tl.load(act_j), ignored), product, 0.0)
    else:
        product *= gram(act_i, act_j, act_width, ROWS, INNER, PRECISION, False, UPCAST)
    to = (i.to(tl.int64) * (i + 1) // 2 + j) * SLOTS * SLOTS
    store_by_sample(product, slot_i, slot_j, partial, magnitude, to, TOKENS, SLOTS, ROWS)


@triton.jit
def gathered_tiles(
    ids,
    left,
    head,
    right,
    partial,
    magnitude,
    left_count,
    left_tokens,
    right_count,
    right_tokens,
    left_by_row,
    head_by_id,
    right_by_row,
    width,
    right_tiles,
    ignored,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    INNER: tl.constexpr,
):
    """``Σ head[id_t, s] (left_t · right_s)``, and of ``|…|``, over the rows of a tile of either side.

    ids: ``[left_count]``. left: ``[left_count, width]``. right: ``[right_count, width]``. head:
    ``[vocabulary, right_count]``, so that what one id meets lies together.
    """
    i, j = tl.program_id(0) // right_tiles, tl.program_id(0) % right_tiles
    rows_i, _, slot_i = rows_of(i, None, None, left_count, left_tokens, False, ROWS)
    rows_j, _, slot_j = rows_of(j, None, None, right_count, right_tokens, False, ROWS)
    from_i = left + rows_i.to(tl.int64) * left_by_row
    from_j = right + rows_j.to(tl.int64) * right_by_row
    product = gram(from_i, from_j, width, ROWS, INNER, PRECISION, False, UPCAST)
    product *= gathered(head, tl.load(ids + rows_i), rows_j, head_by_id, ignored).to(tl.float32)
    to = (i.to(tl.int64) * right_tiles + j) * SLOTS * SLOTS
    store_by_sample(product, slot_i, slot_j, partial, magnitude, to, 0, SLOTS, ROWS)


@triton.jit
def norm_tiles(
    act,
    cot,
    offsets,
    partial,
    magnitude,
    tokens,
    act_by_sample,
    act_by_token,
    cot_by_sample,
    cot_by_token,
    act_width,
    cot_width,
    ignored,
    ONE_HOT: tl.constexpr,
    RAGGED: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    INNER: tl.constexpr,
):
    """``tiles`` for pairs of tiles of one sample's own tokens: sums to ``[samples, pairs of tiles]``."""
    sample = tl.program_id(0)
    i, j = triangle(tl.program_id(1))
    to = sample.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    first, length = span(sample, offsets, tokens, RAGGED)
    if i * ROWS >= length:
        tl.store(partial + to, 0.0)
        tl.store(magnitude + to, 0.0)
        return
    tokens_i, tokens_j = i * ROWS + tl.arange(0, ROWS), j * ROWS + tl.arange(0, ROWS)
    inside = (tokens_i < length)[:, None] & (tokens_j < length)[None, :]
    tokens_i, tokens_j = tl.minimum(tokens_i, length - 1), tl.minimum(tokens_j, length - 1)
    act += start(sample, first, act_by_sample, act_by_token, RAGGED)
    cot += start(sample, first, cot_by_sample, cot_by_token, RAGGED)
    cot_i, cot_j = cot + tokens_i.to(tl.int64) * cot_by_token, cot + tokens_j.to(tl.int64) * cot_by_token
    act_i, act_j = act + tokens_i.to(tl.int64) * act_by_token, act + tokens_j.to(tl.int64) * act_by_token
    product = gram(cot_i, cot_j, cot_width, ROWS, INNER, PRECISION, False, UPCAST)
    if ONE_HOT:
        inside &= equal(tl.load(act_i), tl.load(act_j), ignored)
    else:
        product *= gram(act_i, act_j, act_width, ROWS, INNER, PRECISION, False, UPCAST)
    product = tl.where(inside, product, 0.0)
    times = tl.where(i == j, 1.0, 2.0)
    tl.store(partial + to, times * tl.sum(tl.sum(product, 1), 0))
    tl.store(magnitude + to, times * tl.sum(tl.sum(tl.abs(product), 1), 0))


# ---------------------------------------------------------------- fold


@triton.jit
def fold(
    partial,
    magnitude,
    gram,
    total,
    owners,
    starts,
    first_tiles,
    last_tiles,
    samples,
    left_tokens,
    right_tokens,
    right_tiles,
    reach,
    RAGGED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``[samples, samples]`` of what tiles hold, summed in float64 and always in the same order.

    reach: how many tiles one sample's rows may lie in. SYMMETRIC: only pairs of tiles on and below the diagonal are
    there, and both halves are written.
    """
    if SYMMETRIC:
        down, across = triangle(tl.program_id(0))
    else:
        blocks = tl.cdiv(samples, BLOCK)
        down, across = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b = (down * BLOCK + tl.arange(0, BLOCK))[:, None]
    c = (across * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (b < samples) & (c < samples) & ((c <= b) | (not SYMMETRIC))
    b_first, b_last = _tiles_of(b, samples, first_tiles, last_tiles, left_tokens, RAGGED, ROWS)
    c_first, c_last = _tiles_of(c, samples, first_tiles, last_tiles, right_tokens, RAGGED, ROWS)
    summed = tl.zeros([BLOCK, BLOCK], tl.float64)
    sizes = tl.zeros([BLOCK, BLOCK], tl.float64)
    for step in range(reach * reach):
        i, j = b_first + step // reach, c_first + step % reach
        seen = inside & (i <= b_last) & (j <= c_last)
        if SYMMETRIC:
            # Only where b = c do tiles of both sides come in both orders.
            i, j = tl.maximum(i, j), tl.minimum(i, j)
            pair = i.to(tl.int64) * (i + 1) // 2 + j
        else:
            pair = i.to(tl.int64) * right_tiles + j
        slot_b = b - _first_sample(i, seen, owners, starts, left_tokens, RAGGED, ROWS)
        slot_c = c - _first_sample(j, seen, owners, starts, right_tokens, RAGGED, ROWS)
        at = (pair * SLOTS + slot_b) * SLOTS + slot_c
        summed += tl.load(partial + at, mask=seen, other=0.0).to(tl.float64)
        sizes += tl.load(magnitude + at, mask=seen, other=0.0).to(tl.float64)
    at, mirrored = b.to(tl.int64) * samples + c, c.to(tl.int64) * samples + b
    tl.store(gram + at, summed.to(tl.float32), mask=inside)
    tl.store(total + at, sizes.to(tl.float32), mask=inside)
    if SYMMETRIC:
        tl.store(gram + mirrored, summed.to(tl.float32), mask=inside & (c < b))
        tl.store(total + mirrored, sizes.to(tl.float32), mask=inside & (c < b))


@triton.jit
def _tiles_of(sample, samples, first_tiles, last_tiles, tokens, RAGGED: tl.constexpr, ROWS: tl.constexpr):
    """The first and the last tile that hold rows of a sample; the last before the first where it has none."""
    if RAGGED:
        first = tl.load(first_tiles + sample, mask=sample < samples, other=0)
        last = tl.load(last_tiles + sample, mask=sample < samples, other=-1)
    else:
        first = sample * tokens // ROWS
        last = ((sample + 1) * tokens - 1) // ROWS
    return first, last


@triton.jit
def _first_sample(tile, seen, owners, starts, tokens, RAGGED: tl.constexpr, ROWS: tl.constexpr):
    """The sample that a tile's slots are counted from."""
    if RAGGED:
        first = tl.load(owners + tl.load(starts + tile, mask=seen, other=0), mask=seen, other=0)
    else:
        first = tile * ROWS // tokens
    return first
