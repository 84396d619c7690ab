"""Normalisations: the dims statistics are taken over are mixed; scale and shift carry their own dims."""

from __future__ import annotations

from gramfx.axes import Value
from gramfx.rules.table import Call, Label, Operand, define, right_aligned

EVALUATING = ("aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_no_update")


def named(call: Call, *names: str) -> list[Operand | None]:
    """Arguments by name, None where absent."""
    return [call.get(name) for name in names]


def layer_norm(call: Call) -> Value:
    """``x: [..., k]`` over the last k dims; outputs after the first are statistics ``[..., 1]``."""
    data, *affine = call.operands
    names = tuple(range(data.rank))
    normalized = set(names[data.rank - len(call.args["normalized_shape"]) :])
    if call.index:
        output = [None if d in normalized else d for d in names]
        return call.labelled([(data, names), *((o, None) for o in affine)], output[: len(call.shape)])
    return call.labelled([(data, names), *((o, right_aligned(o.rank, data.rank)) for o in affine)], names, normalized)


def layer_norm_backward(call: Call) -> Value:
    """The gradient by x is as the forward; those by weight and bias sum over all samples."""
    grad, data, mean, rstd, *affine = call.operands
    names = tuple(range(data.rank))
    normalized = set(names[data.rank - len(call.args["normalized_shape"]) :])
    rows = [(o, names) for o in (grad, data, mean, rstd)]
    if call.index:
        return call.labelled([*rows, *((o, None) for o in affine)], (None,) * len(call.shape))
    shifts = [(o, right_aligned(o.rank, data.rank)) for o in affine]
    return call.labelled([*rows, *shifts], names, normalized)


def group_norm(call: Call) -> Value:
    """``x: [n, c, ...]`` over groups of channels and all positions; ``weight, bias: [c]``; statistics ``[n, g]``."""
    data, *affine = call.operands
    names = tuple(range(data.rank))
    if call.index:
        return call.labelled([(data, names), *((o, None) for o in affine)], (0, None))
    return call.labelled([(data, names), *((o, (1,)) for o in affine)], names, set(names) - {0})


def batch_norm(call: Call) -> Value:
    """``x: [n, c, ...]``: n and positions are mixed unless running statistics are used; channels never are.

    Outputs after the first are statistics per channel: the batch's, or updated running ones.
    """
    data = call.args["input"]
    weight, bias, mean, var = named(call, "weight", "bias", "running_mean", "running_var")
    training = call.get("training", call.op._schema.name not in EVALUATING) or mean is None
    names: tuple[Label, ...] = tuple(range(data.rank))
    channels = [(o, (1,)) for o in (weight, bias, mean, var) if o is not None]
    if call.index == 0:
        rest = set(names) - {1}
        return call.labelled([(data, names), *channels], names, rest if training else ())
    from_data = (data, names if training else None)
    affine = [(o, None if o in (weight, bias) else labels) for o, labels in channels]
    return call.labelled([from_data, *affine], (1,) * len(call.shape))


def instance_norm(call: Call) -> Value:
    """``x: [n, c, ...]`` over positions, each sample and channel alone."""
    data = call.args["input"]
    names = tuple(range(data.rank))
    channels = [o for o in named(call, "weight", "bias", "running_mean", "running_var") if o is not None]
    mixed = set(names) - {0, 1} if call.get("use_input_stats", True) else ()
    return call.labelled([(data, names), *((o, (1,)) for o in channels)], names, mixed)


define("layer_norm native_layer_norm rms_norm _fused_rms_norm", layer_norm)
define("native_layer_norm_backward", layer_norm_backward)
define("group_norm native_group_norm", group_norm)
define("batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional", batch_norm)
define("_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_with_update_functional", batch_norm)
define("_batch_norm_no_update", batch_norm)
define("instance_norm", instance_norm)
