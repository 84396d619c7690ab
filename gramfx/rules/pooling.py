"""Pooling, resampling, padding and patches: the last dims become new ones, the leading dims stay."""

from __future__ import annotations

from gramfx.axes import Value
from gramfx.rules.table import Call, Label, Rule, define, tensors_in


def last_new(count: int) -> Rule:
    """The last ``count`` dims of every operand become whatever the output has beyond the leading ones."""

    def rule(call: Call) -> Value:
        kept = call.first.rank - count
        output: list[Label] = [*range(kept), *[None] * (len(call.shape) - kept)]
        return call.labelled([(o, (*range(kept), *["new"] * (o.rank - kept))) for o in call.operands], output)

    return rule


def first_only(call: Call) -> Value:
    """Only the leading dim, the samples, is kept in every operand."""
    output: list[Label] = [0, *[None] * (len(call.shape) - 1)]
    return call.labelled([(o, (0, *["new"] * (o.rank - 1))) for o in call.operands], output)


def constant_pad(call: Call) -> Value:
    """Pairs of paddings from the last dim on; a dim padded by nothing stays."""
    pairs = call.args["pad"]
    rank = len(call.shape)
    padded = {rank - 1 - at // 2 for at, width in enumerate(pairs) if width != 0}
    (operand,) = tensors_in(call.args["self"])
    return call.labelled([(operand, tuple(range(rank)))], [None if d in padded else d for d in range(rank)])


def channel_shuffle(call: Call) -> Value:
    """``x: [n, c, ...]``: channels change places."""
    (operand,) = call.operands
    names = tuple(range(operand.rank))
    return call.labelled([(operand, names)], names, {1})


define("avg_pool1d adaptive_avg_pool1d max_pool1d max_pool1d_with_indices adaptive_max_pool1d", last_new(1))
define("lp_pool1d upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d", last_new(1))
define("reflection_pad1d replication_pad1d", last_new(1))
define("avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d max_pool2d max_pool2d_with_indices", last_new(2))
define("adaptive_max_pool2d fractional_max_pool2d max_unpool2d", last_new(2))
define("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d", last_new(2))
define("_upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad2d replication_pad2d col2im", last_new(2))
define("avg_pool2d_backward max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward", last_new(2))
define("adaptive_max_pool2d_backward", last_new(2))
define("avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d max_pool3d max_pool3d_with_indices", last_new(3))
define("adaptive_max_pool3d fractional_max_pool3d max_unpool3d", last_new(3))
define("upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d", last_new(3))
define("reflection_pad3d replication_pad3d im2col pixel_shuffle pixel_unshuffle", last_new(3))
define("grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator", first_only)
define("upsample_nearest2d_backward upsample_bilinear2d_backward", last_new(2))
define("constant_pad_nd pad", constant_pad)
define("channel_shuffle native_channel_shuffle", channel_shuffle)
