"""Losses: without reduction each entry or row keeps its place, else all of them are summed."""

from __future__ import annotations

from gramfx.axes import Value
from gramfx.rules.table import Call, Label, define, right_aligned

NO_REDUCTION = 0


def _reduced(call: Call) -> Value:
    return call.labelled([(o, ("all",) * o.rank) for o in call.operands], (None,) * len(call.shape))


def entries(call: Call) -> Value:
    """``loss[i] = f(x[i], y[i], …)`` with broadcasting."""
    if call.args["reduction"] != NO_REDUCTION:
        return _reduced(call)
    width = max(o.rank for o in call.operands)
    names = tuple(range(width))
    return call.labelled([(o, right_aligned(o.rank, width)) for o in call.operands], names[width - len(call.shape) :])


def classes(call: Call) -> Value:
    """``scores: [n?, c, ...]``, targets ``[n?, ...]`` or as the scores, ``weight: [c]``; the class dim vanishes."""
    if call.args["reduction"] != NO_REDUCTION or call.index:
        return _reduced(call)
    scores, *others = call.operands
    dim = 0 if scores.rank == 1 else 1
    names = tuple(range(scores.rank))
    output = [d for d in names if d != dim]
    weight = call.get("weight")
    listed = [(o, (dim,) if o is weight else names if o.rank == scores.rank else output) for o in others]
    return call.labelled([(scores, names), *listed], output)


def last_dim(call: Call) -> Value:
    """``x: [..., d]`` and targets; the last dim vanishes, a class weight lies along it."""
    if call.args["reduction"] != NO_REDUCTION or call.index:
        return _reduced(call)
    width = max(o.rank for o in call.operands)
    output: list[Label] = list(range(width - 1))
    weight = call.get("weight")
    listed = [
        (o, (width - 1,) if o is weight else right_aligned(o.rank, width) if o.rank == width else output[-o.rank :])
        for o in call.operands
    ]
    return call.labelled(listed, output[len(output) - len(call.shape) :])


def ctc(call: Call) -> Value:
    """``log_probs: [t, n, c]``, targets ``[n, s]``: one loss a sample."""
    if call.args["reduction"] != NO_REDUCTION:
        return _reduced(call)
    scores, *others = call.operands
    if scores.rank == 2:
        return _reduced(call)
    return call.labelled([(scores, ("t", "n", "c")), *((o, ("n", "s")[: o.rank]) for o in others)], ("n",))


def cross_entropy_by_rows(call: Call) -> Value:
    """``grad: [...]`` or a scalar back to the rows of the scores."""
    scores = call.args["self"]
    names: tuple[Label, ...] = tuple(range(scores.rank))
    dim = 0 if scores.rank == 1 else 1
    rows = [d for d in names if d != dim]
    weight = call.get("weight")
    listed = [(o, (dim,) if o is weight else rows if o is not scores else names) for o in call.operands if o.rank]
    scalars = [(o, ()) for o in call.operands if not o.rank]
    return call.labelled([*listed, *scalars], names)


def entries_backward(call: Call) -> Value:
    """The gradient of a loss by its entries: everything keeps its place."""
    width = len(call.shape)
    return call.labelled([(o, right_aligned(o.rank, width)) for o in call.operands], tuple(range(width)))


def embedding_pairs(call: Call) -> Value:
    """``a, b: [n?, d]``, targets ``[n]``: one loss a row."""
    if call.args["reduction"] != NO_REDUCTION:
        return _reduced(call)
    rows = len(call.shape)
    return call.labelled(
        [
            (o, ("n", "d")[:rows] + ("d",) * (o.rank - rows) if o.rank > rows else ("n",)[: o.rank])
            for o in call.operands
        ],
        ("n",)[:rows],
    )


define("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits", entries)
define("kl_div poisson_nll_loss soft_margin_loss margin_ranking_loss hinge_embedding_loss", entries)
define("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward", classes)
define("multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward triplet_margin_loss", last_dim)
define("ctc_loss", ctc)
define("cosine_embedding_loss", embedding_pairs)
define("nll_loss_backward nll_loss2d_backward", cross_entropy_by_rows)
define("mse_loss_backward l1_loss_backward smooth_l1_loss_backward huber_loss_backward", entries_backward)
define("binary_cross_entropy_backward soft_margin_loss_backward", entries_backward)
