"""Products that sum over shared labels: most are one einsum string."""

from __future__ import annotations

from collections.abc import Iterable

from gramfx.axes import Loc, Value, product
from gramfx.rules.table import AXIS_RULES, Call, Label, Labels, Operand, define, equation, spell

define("linear", equation("...i, oi, o -> ...o"))
define("mm", equation("ac, cb -> ab"))
define("bmm", equation("nac, ncb -> nab"))
define("mv", equation("ac, c -> a"))
define("dot vdot", equation("c, c -> "))
define("outer ger", equation("a, b -> ab"))
define("addmm", equation("ab, ac, cb -> ab"))
define("addbmm", equation("ab, nac, ncb -> ab"))
define("baddbmm", equation("nab, nac, ncb -> nab"))
define("addmv", equation("a, ac, c -> a"))
define("addr", equation("ab, a, b -> ab"))
define("bilinear", equation("...i, ...j, oij, o -> ...o"))
define("cdist _euclidean_dist _cdist_forward", equation("...pm, ...rm -> ...pr"))
define("scaled_dot_product_attention", equation("...qd, ...kd, ...kv, ...qk -> ...qv"))
define("_scaled_dot_product_flash_attention_for_cpu", equation("...qd, ...kd, ...kv, ...qk -> ...qv; ...q"))
define("_scaled_dot_product_efficient_attention", equation("...qd, ...kd, ...kv, ...qk -> ...qv; ...q"))
define("_scaled_dot_product_attention_math", equation("...qd, ...kd, ...kv, ...qk, ...qk -> ...qv; ...qk"))


def labels_from(text: str, operands: Iterable[Operand], call: Call) -> Value:
    """Follow an einsum string given at the call."""
    terms, _, output = text.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if "->" not in text:
        letters = "".join(inputs).replace(".", "")
        output = "..." * ("..." in terms) + "".join(sorted(a for a in set(letters) if letters.count(a) == 1))
    return call.labelled(
        [(o, spell(term, o.rank)) for o, term in zip(operands, inputs, strict=True)], spell(output, len(call.shape))
    )


def einsum(call: Call) -> Value:
    """The call's own einsum string; repeated letters of one operand are its diagonal."""
    return labels_from(call.args["equation"], call.operands, call)


def matmul(call: Call) -> Value:
    """``...ac, ...cb -> ...ab``, vectors as one row or one column."""
    left, right = call.operands
    row, column = "ac"[-min(left.rank, 2) :], "cb"[: min(right.rank, 2)]
    output = "..." + row.removesuffix("c") + column.removeprefix("c")
    terms = [term if o.rank <= 2 else f"...{term}" for o, term in ((left, row), (right, column))]
    return labels_from(f"{terms[0]},{terms[1]}->{output}", (left, right), call)


def inner(call: Call) -> Value:
    """``a c, b c -> a b`` over all leading dims of both; a scalar scales."""
    left, right = call.operands
    if not left.rank or not right.rank:
        names = tuple(range(len(call.shape)))
        return call.labelled([(o, names[: o.rank]) for o in (left, right)], names)
    return _two_sided(call, [left.rank - 1], [right.rank - 1])


def tensordot(call: Call) -> Value:
    """Contract ``dims_self`` of the left with ``dims_other`` of the right."""
    left, right = call.operands
    return _two_sided(
        call, [d % left.rank for d in call.args["dims_self"]], [d % right.rank for d in call.args["dims_other"]]
    )


def _two_sided(call: Call, contracted_left: list[int], contracted_right: list[int]) -> Value:
    left, right = call.operands
    of_left: Labels = [f"l{d}" for d in range(left.rank)]
    of_right: list[Label] = [f"r{d}" for d in range(right.rank)]
    for a, b in zip(contracted_left, contracted_right, strict=True):
        of_right[b] = of_left[a]
    output = [n for n in of_left if n not in of_right] + [n for n in of_right if n not in of_left]
    return call.labelled([(left, of_left), (right, of_right)], output)


def kron(call: Call) -> Value:
    """``out[i * size(b) + j] = a[i] b[j]`` in every dim, aligned to the right."""
    left, right = call.operands
    width = len(call.shape)
    places: list[tuple[Operand, Loc | None]] = []
    for operand, other in ((left, right), (right, left)):
        place = None
        if operand.batch is not None:
            dim = operand.batch.dim + width - operand.rank
            at = dim - width + other.rank
            stride = other.shape[at] if operand is left and at >= 0 else 1
            place = call.placed(operand, Loc(dim, operand.batch.inner * product([stride])), "is spread over the batch")
        places.append((operand, place))
    return call.joined(places)


def pdist(call: Call) -> Value:
    """The distances of all pairs of rows."""
    return call.labelled([(call.first, (0, 1))], (None,))


define("einsum", einsum)
define("matmul", matmul)
define("inner", inner)
define("tensordot", tensordot)
define("kron", kron)
define("pdist _pdist_forward", pdist)

#: A recurrent layer, ``t`` the steps it reads and ``s`` those it writes: every output step sees other input steps.
AXIS_RULES["gramfx.recurrence"] = equation("tbg, bh, bc, gh, g, hc, tb, tbg, tbh -> sbh; bh; bc; sbh; sbc; sbg; sbc")
