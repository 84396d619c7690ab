"""Values made of nothing but sizes, types and chance: no derivative, and no sample unless a shape says so."""

from __future__ import annotations

from gramfx.axes import Loc, Value
from gramfx.rules.table import Call, broadcast, define


def constant(call: Call) -> Value:
    """A value that belongs to no sample."""
    return call.constant()


def filled(call: Call) -> Value:
    """The same number everywhere: its rows belong to whatever samples the shape has room for.

    So a recurrence that starts from ``zeros([B, H])`` starts one state a sample. The dim must be the only one of the
    size of the batch; a wrong guess could only cost cotangents, since no derivative enters here.
    """
    fitting = [dim for dim, size in enumerate(call.shape) if size == call.batch]
    return call.constant(Loc(fitting[0], 1) if len(fitting) == 1 else None)


def like(call: Call) -> Value:
    """In the shape of another tensor: rows belong to the samples they have there."""
    (operand,) = call.operands[:1]
    return call.constant(operand.batch if call.shape == operand.shape else None)


def counting(call: Call) -> Value:
    """``arange(n)``: every entry equals its index."""
    plain = call.get("start", 0) == 0 and call.get("step", 1) == 1
    return call.constant(iota=Loc(0, 1) if plain else None)


define("zeros ones full new_zeros new_ones new_full", filled)
define("empty rand randn randint randperm eye linspace logspace scalar_tensor empty_strided empty_permuted", constant)
define("new_empty new_empty_strided tril_indices triu_indices hann_window", constant)
define("zeros_like ones_like full_like empty_like rand_like randn_like randint_like bernoulli", like)
define("arange", counting)
define("normal.float_float", constant)
define("normal.Tensor_float normal.Tensor_Tensor normal.float_Tensor", broadcast)
