"""Reductions, whose dims vanish, and scans, sorts and transforms, whose dims are mixed or become new ones."""

from __future__ import annotations

from collections.abc import Collection

from gramfx.axes import Value
from gramfx.rules.table import Call, Label, Rule, define, right_aligned, tensors_in


def vanish(call: Call, dims: Collection[int]) -> Value:
    """``out[kept] = f(x[kept, dims])``; with keepdim (the output has as many dims) they stay with size 1."""
    (operand,) = call.operands
    names = tuple(range(operand.rank))
    kept: list[Label] = [None if d in dims else d for d in names]
    return call.labelled(
        [(operand, names)], kept if len(call.shape) == operand.rank else [d for d in kept if d is not None]
    )


def reduce(call: Call) -> Value:
    """The dims of ``dim`` vanish, all of them without one."""
    return vanish(call, call.dims())


def reduce_all(call: Call) -> Value:
    """Every dim of every operand vanishes, whatever the output's shape."""
    return call.labelled([(o, tuple(range(o.rank))) for o in call.operands], (None,) * len(call.shape))


def mix(call: Call) -> Value:
    """``out[kept, dims] = f(x[kept, dims])``: entries along ``dim`` meet."""
    (operand,) = call.operands
    names = tuple(range(operand.rank))
    return call.labelled([(operand, names)], names, call.dims())


def mix_dim(*dims: int) -> Rule:
    """Entries along these dims meet, whatever the arguments say."""

    def rule(call: Call) -> Value:
        (operand,) = call.operands
        names = tuple(range(operand.rank))
        return call.labelled([(operand, names)], names, {dim % max(operand.rank, 1) for dim in dims})

    return rule


def renew(call: Call) -> Value:
    """The dims of ``dim`` become new ones of another size, made of all their entries."""
    names: tuple[Label, ...] = tuple(range(len(call.shape)))
    dims = call.dims()
    output = [None if d in dims else d for d in names]
    return call.labelled([(o, right_aligned(o.rank, len(names))) for o in call.operands], output)


def renorm(call: Call) -> Value:
    """Each slice along ``dim`` is scaled by its own norm: all other dims are mixed."""
    (operand,) = call.operands
    names = tuple(range(operand.rank))
    return call.labelled([(operand, names)], names, set(names) - call.dims())


def quantile(call: Call) -> Value:
    """``out[q, kept] = f(x[kept, dim])``, without the leading dim for a scalar q."""
    data, *points = call.operands
    dims = call.dims()
    kept: list[Label] = [None if d in dims else d for d in range(data.rank)]
    shape: list[Label] = kept if call.get("keepdim") else [d for d in kept if d is not None]
    lead: list[Label] = [None] * (len(call.shape) - len(shape))
    return call.labelled([(data, tuple(range(data.rank))), *((q, ("q",) * q.rank) for q in points)], lead + shape)


def along(call: Call) -> Value:
    """``out[kept] = f(a[kept, dim], b[kept, dim])`` with broadcasting."""
    width = max(o.rank for o in call.operands)
    dims = call.dims(rank=width)
    output = [d for d in range(width) if d not in dims]
    return call.labelled([(o, right_aligned(o.rank, width)) for o in call.operands], output)


def along_last(call: Call) -> Value:
    """``out[kept] = f(a[kept, last], b[kept, last])`` with broadcasting, perhaps keeping the last dim with size 1."""
    width = max(o.rank for o in call.operands)
    output: list[Label] = [*range(width - 1), *([None] if len(call.shape) == width else [])]
    return call.labelled([(o, right_aligned(o.rank, width)) for o in call.operands], output)


def mix_all(call: Call) -> Value:
    """Every operand broadcasts to the output and meets itself along ``dim``."""
    width = len(call.shape)
    dims = call.dims(rank=width)
    return call.labelled([(o, right_aligned(o.rank, width)) for o in call.operands], tuple(range(width)), dims)


def shifted(name: str) -> Rule:
    """Entries along the dims this argument names move to other places."""

    def rule(call: Call) -> Value:
        (operand,) = call.operands
        names = tuple(range(operand.rank))
        return call.labelled([(operand, names)], names, call.dims(name))

    return rule


def softmax_backward(call: Call) -> Value:
    """``out = f(grad, output)`` along ``dim``, which is mixed."""
    names = tuple(range(len(call.shape)))
    return call.labelled([(o, names) for o in call.operands], names, call.dims(rank=len(names)))


def integral(call: Call) -> Value:
    """``out[kept] = sum over dim`` of y, with spacings x broadcast against it."""
    values, *spacing = list(tensors_in(list(call.args.values())))
    dim = call.get("dim", -1) % max(values.rank, 1)
    cumulative = len(call.shape) == values.rank
    output = [None if d == dim else d for d in range(values.rank)]
    names = output if cumulative else [d for d in output if d is not None]
    listed = [(x, right_aligned(x.rank, values.rank) if x.rank > 1 else (dim,)) for x in spacing]
    return call.labelled([(values, tuple(range(values.rank))), *listed], names)


def differences(call: Call) -> Value:
    """``out[kept, i] = x[kept, i+1] - x[kept, i]``, after what is prepended or appended."""
    rank = len(call.shape)
    dim = call.get("dim", -1) % max(rank, 1)
    output = [None if d == dim else d for d in range(rank)]
    return call.labelled([(o, right_aligned(o.rank, rank)) for o in call.operands], output)


define("sum nansum mean nanmean prod amax amin argmax argmin any all count_nonzero logsumexp max min median", reduce)
define("nanmedian mode kthvalue aminmax std var std_mean var_mean norm linalg_vector_norm special_logsumexp", reduce)
define("hash_tensor", reduce)
define("dist trace", reduce_all)
define("softmax log_softmax _softmax _log_softmax special_softmax special_log_softmax _safe_softmax", mix)
define("cumsum cumprod logcumsumexp cummax cummin sort argsort fft_fftshift fft_ifftshift", mix)
define("fft_fft fft_ifft fft_fft2 fft_ifft2 _fft_c2c", mix)
define("flip roll", shifted("dims"))
define("fliplr", mix_dim(1))
define("flipud msort", mix_dim(0))
define("topk fft_rfft fft_irfft fft_hfft fft_ihfft fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2 glu", renew)
define("fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn", renew)
define("renorm", renorm)
define("quantile nanquantile", quantile)
define("cosine_similarity linalg_vecdot", along)
define("pairwise_distance", along_last)
define("cross linalg_cross", mix_all)
define("_softmax_backward_data _log_softmax_backward_data", softmax_backward)
define("trapezoid trapz cumulative_trapezoid", integral)
define("diff", differences)
