"""Entry by entry, with broadcasting: ``out[i] = f(a[i], b[i], …)``.

Ops with ``torch.Tag.pointwise`` need no line here; these are the ones torch does not tag.
"""

from __future__ import annotations

from gramfx.axes import Loc, Value
from gramfx.rules.table import Call, broadcast, define, right_aligned

define(
    "hardswish hardswish_backward hardtanh_backward hardsigmoid_backward leaky_relu_backward elu_backward", broadcast
)
define(
    "softplus_backward log_sigmoid log_sigmoid_forward log_sigmoid_backward mish_backward rrelu rrelu_with_noise",
    broadcast,
)
define("rrelu_with_noise_functional rrelu_with_noise_backward celu selu elu hardshrink softshrink threshold", broadcast)
define("dropout alpha_dropout native_dropout native_dropout_backward feature_dropout feature_alpha_dropout", broadcast)
define(
    "rsub subtract multiply divide true_divide floor_divide add sub mul div remainder fmod pow float_power", broadcast
)
define("isclose isin.Tensor_Scalar isreal where.ScalarOther where.ScalarSelf where.Scalar where.self", broadcast)
define("masked_fill fill complex polar real imag special_ndtr special_polygamma polygamma", broadcast)
define("__and__ __or__ __xor__ __lshift__ __rshift__ logical_and logical_or logical_xor logical_not", broadcast)
define("resolve_conj resolve_neg conj _conj conj_physical positive expand_copy broadcast_to", broadcast)
define("tril triu tril_copy triu_copy max.other min.other special_xlog1py xlogy frexp", broadcast)


def same(call: Call) -> Value:
    """The value itself, perhaps in another type or memory format: its digits stay."""
    (operand,) = call.operands
    call.placed(operand, operand.batch, "changes the extent of the batch")
    return call.result(operand.batch, operand.value.iota)


def cut(call: Call) -> Value:
    """The value itself without its derivatives."""
    return call.constant(call.first.batch, call.first.value.iota)


def prelu(call: Call) -> Value:
    """``out[n,c,…] = x[n,c,…]`` or ``w[c] x[n,c,…]``."""
    data, weight = call.operands
    names = tuple(range(data.rank))
    return call.labelled([(data, names), (weight, (1,) if weight.shape != (1,) else (None,))], names)


def like_first(call: Call) -> Value:
    """``out[i] = f(a[i], …)`` in a's shape, from search tables and the like that hold no derivative."""
    first, *tables = call.operands
    names = tuple(range(first.rank))
    for table in tables:
        call.placed(table, None, "is looked up across samples")
    return call.labelled([(first, names)], names[: len(call.shape)])


def shape_of_second(call: Call) -> Value:
    """``out = broadcast(x)`` in the shape or type of another tensor, whose entries do not matter."""
    first, other = call.operands
    width = len(call.shape)
    return call.labelled([(first, right_aligned(first.rank, width)), (other, None)], tuple(range(width)))


def one_of_list(call: Call) -> Value:
    """``out_k = broadcast(tensors[k])``; the other tensors give only shapes."""
    own = call.operands[call.index]
    width = len(call.shape)
    return call.labelled(
        [(o, right_aligned(o.rank, width) if o is own else None) for o in call.operands], tuple(range(width))
    )


def expand(call: Call) -> Value:
    """``out[…, i] = x[i]`` over new leading dims and dims of size 1; an expanded ``arange`` still equals its index."""
    (operand,) = call.operands
    value = broadcast(call)
    iota = operand.value.iota
    if iota is None or call.shape[iota.dim + len(call.shape) - operand.rank] != operand.shape[iota.dim]:
        return value
    moved = Loc(iota.dim + len(call.shape) - operand.rank, iota.inner)
    return Value(value.shape, value.differentiable, value.batch, moved)


define("clone alias alias_copy contiguous to _to_copy lift_fresh_copy lift_fresh lift _conj_physical", same)
define("float double half bfloat16 chalf cfloat cdouble long int bool byte char short", same)
define("detach detach_copy", cut)
define("prelu _prelu_kernel", prelu)
define("bucketize searchsorted.Scalar", like_first)
define("type_as expand_as", shape_of_second)
define("broadcast_tensors", one_of_list)
define("expand", expand)
