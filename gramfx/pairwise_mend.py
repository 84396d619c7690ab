"""Triton kernels that take once more, in float64, what cancels too much in ``gramfx::pairwise_gram``.

Whether there is anything is known on the device alone: they are launched always, and end at once where there is not.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from gramfx.pairwise_pieces import equal, gathered, gram, span, start, triangle


@triton.jit
def mend(
    act,
    cot,
    offsets,
    gram_out,
    total,
    squares,
    samples,
    tokens,
    act_by_sample,
    act_by_token,
    cot_by_sample,
    cot_by_token,
    act_width,
    cot_width,
    ignored,
    limit,
    ONE_HOT: tl.constexpr,
    RAGGED: tl.constexpr,
    DIAGONAL: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Takes the pairs of samples that are flagged once more.

    gram_out and total: ``[samples, samples]``, or ``[samples]`` for ``DIAGONAL``. squares: :func:`_flagged`.
    """
    if DIAGONAL:
        b = tl.program_id(0)
        if tl.load(total + b).to(tl.float64) > limit * tl.load(squares + b):
            exact = _exact(
                act, cot, offsets, b, b, tokens, act_by_sample, act_by_token, cot_by_sample, cot_by_token,
                act_width, cot_width, ignored, ONE_HOT, RAGGED, ROWS, INNER,
            )  # fmt: skip
            tl.store(gram_out + b, exact.to(tl.float32))
    else:
        down, across = triangle(tl.program_id(0))
        if _any_flagged(down, across, total, squares, samples, limit, BLOCK):
            for pair in range(BLOCK * BLOCK):
                b, c = down * BLOCK + pair // BLOCK, across * BLOCK + pair % BLOCK
                if _flagged(b, c, total, squares, samples, limit):
                    exact = _exact(
                        act, cot, offsets, b, c, tokens, act_by_sample, act_by_token, cot_by_sample, cot_by_token,
                        act_width, cot_width, ignored, ONE_HOT, RAGGED, ROWS, INNER,
                    )  # fmt: skip
                    _store_both(gram_out, b, c, samples, exact)


@triton.jit
def mend_gathered(
    ids,
    left,
    head,
    right,
    gram_out,
    total,
    squares,
    samples,
    left_tokens,
    right_tokens,
    left_by_row,
    head_by_id,
    right_by_row,
    width,
    ignored,
    limit,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    """``mend`` for ``gathered_tiles`` plus their transpose."""
    down, across = triangle(tl.program_id(0))
    if _any_flagged(down, across, total, squares, samples, limit, BLOCK):
        for pair in range(BLOCK * BLOCK):
            b, c = down * BLOCK + pair // BLOCK, across * BLOCK + pair % BLOCK
            if _flagged(b, c, total, squares, samples, limit):
                exact = _exact_gathered(
                    ids, left, head, right, b, c, left_tokens, right_tokens, left_by_row, head_by_id, right_by_row,
                    width, ignored, ROWS, INNER,
                )  # fmt: skip
                exact += _exact_gathered(
                    ids, left, head, right, c, b, left_tokens, right_tokens, left_by_row, head_by_id, right_by_row,
                    width, ignored, ROWS, INNER,
                )  # fmt: skip
                _store_both(gram_out, b, c, samples, exact)


@triton.jit
def _flagged(b, c, total, squares, samples, limit):
    """Whether the terms of ``[b, c]``, below the diagonal, add up to more than ``limit`` times the gradients' size.

    squares: squared norms of the samples' gradients, zero where these cancel themselves.
    """
    inside = (b < samples) & (c <= b)
    size = tl.load(squares + b, mask=inside, other=0).to(tl.float64) * tl.load(squares + c, mask=inside, other=0)
    terms = tl.load(total + b.to(tl.int64) * samples + c, mask=inside, other=0).to(tl.float64)
    return inside & (terms > limit * tl.sqrt(size))


@triton.jit
def _any_flagged(down, across, total, squares, samples, limit, BLOCK: tl.constexpr):
    b, c = down * BLOCK + tl.arange(0, BLOCK), across * BLOCK + tl.arange(0, BLOCK)
    flagged = _flagged(b[:, None], c[None, :], total, squares, samples, limit)
    return tl.sum(tl.sum(flagged.to(tl.int32), 1), 0) > 0


@triton.jit
def _store_both(gram_out, b, c, samples, number):
    tl.store(gram_out + b.to(tl.int64) * samples + c, number.to(tl.float32))
    tl.store(gram_out + c.to(tl.int64) * samples + b, number.to(tl.float32))


@triton.jit
def _exact(
    act,
    cot,
    offsets,
    b,
    c,
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
    INNER: tl.constexpr,
):
    """One entry in float64."""
    b_first, b_length = span(b, offsets, tokens, RAGGED)
    c_first, c_length = span(c, offsets, tokens, RAGGED)
    act_b = act + start(b, b_first, act_by_sample, act_by_token, RAGGED)
    act_c = act + start(c, c_first, act_by_sample, act_by_token, RAGGED)
    cot_b = cot + start(b, b_first, cot_by_sample, cot_by_token, RAGGED)
    cot_c = cot + start(c, c_first, cot_by_sample, cot_by_token, RAGGED)
    total = tl.zeros([ROWS, ROWS], tl.float64)
    for i in range(0, b_length, ROWS):
        for j in range(0, c_length, ROWS):
            t, s = i + tl.arange(0, ROWS), j + tl.arange(0, ROWS)
            inside = (t < b_length)[:, None] & (s < c_length)[None, :]
            t, s = tl.minimum(t, b_length - 1).to(tl.int64), tl.minimum(s, c_length - 1).to(tl.int64)
            product = gram(
                cot_b + t * cot_by_token, cot_c + s * cot_by_token, cot_width, ROWS, INNER, "ieee", True, False
            )
            if ONE_HOT:
                inside &= equal(tl.load(act_b + t * act_by_token), tl.load(act_c + s * act_by_token), ignored)
            else:
                product *= gram(
                    act_b + t * act_by_token, act_c + s * act_by_token, act_width, ROWS, INNER, "ieee", True, False
                )
            total += tl.where(inside, product, 0.0)
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit
def _exact_gathered(
    ids,
    left,
    head,
    right,
    b,
    c,
    left_tokens,
    right_tokens,
    left_by_row,
    head_by_id,
    right_by_row,
    width,
    ignored,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    """One entry in float64, of ``b`` on the left and ``c`` on the right."""
    total = tl.zeros([ROWS, ROWS], tl.float64)
    for i in range(0, left_tokens, ROWS):
        for j in range(0, right_tokens, ROWS):
            t, s = i + tl.arange(0, ROWS), j + tl.arange(0, ROWS)
            inside = (t < left_tokens)[:, None] & (s < right_tokens)[None, :]
            t, s = b * left_tokens + tl.minimum(t, left_tokens - 1), c * right_tokens + tl.minimum(s, right_tokens - 1)
            from_t, from_s = left + t.to(tl.int64) * left_by_row, right + s.to(tl.int64) * right_by_row
            product = gram(from_t, from_s, width, ROWS, INNER, "ieee", True, False)
            product *= gathered(head, tl.load(ids + t), s, head_by_id, ignored).to(tl.float64)
            total += tl.where(inside, product, 0.0)
    return tl.sum(tl.sum(total, 1), 0)
