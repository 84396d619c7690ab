"""Convolutions ``out[n, o, …] = Σ x[n, i, …] w[o, i, …]``: samples stay in n, or in whole groups of the channels."""

from __future__ import annotations

from gramfx.axes import Loc, Value, quotient, size_of
from gramfx.rules.table import Call, Operand, define


def convolve(call: Call) -> Value:
    """``x: [n?, groups*i, …]``, ``w: [groups*o, i, …]``, or ``[groups*i, o, …]`` transposed, ``bias: [groups*o]``."""
    data, weight, *bias = call.operands
    transposed = call.get("transposed", "transpose" in str(call.op))
    lead = data.rank - (weight.rank - 1)  # 1 with a sample dim, 0 without
    width = len(call.shape)
    groups = call.get("groups", 1)
    channels_in, channels_out = data.shape[lead], call.shape[width - weight.rank + 1]
    sizes = quotient(channels_in, groups), quotient(channels_out, groups)

    def across(operand: Operand, loc: Loc) -> Loc | None:
        """A digit of the input channels in the output channels: it may only tell groups apart."""
        within, beyond = sizes
        inner = None if within is None else quotient(loc.inner, within)
        if inner is None or beyond is None:
            return None
        return call.placed(operand, Loc(lead, size_of(inner * beyond)), "reduces over the batch")

    def place(operand: Operand) -> Loc | None:
        loc = operand.batch
        if loc is None:
            return None
        if operand is data:
            return loc if loc.dim < lead else across(data, loc) if loc.dim == lead else None
        if operand is weight and transposed:
            return (
                across(weight, loc) if loc.dim == 0 else Loc(lead, loc.inner) if loc.dim == 1 and groups == 1 else None
            )
        return Loc(lead, loc.inner) if loc.dim == 0 else None

    places = []
    for operand in (data, weight, *bias):
        found = place(operand)
        places.append((operand, call.placed(operand, found, "reduces over the batch")))
    return call.joined(places)


def convolve_backward(call: Call) -> Value:
    """The gradients by x (n kept), by w and by the bias (n summed)."""
    grad, data, weight = call.operands
    sample = lambda o: ("n", *(f"{o.node.name}{d}" for d in range(1, o.rank)))  # noqa: E731
    if call.index == 0:
        return call.labelled(
            [(grad, sample(grad)), (data, None), (weight, tuple(range(weight.rank)))], ("n", *(None,) * (data.rank - 1))
        )
    reached = (data, sample(data)) if call.index == 1 else (data, None)
    return call.labelled([(grad, sample(grad)), reached, (weight, None)], (None,) * len(call.shape))


define("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution", convolve)
define("convolution_backward", convolve_backward)
