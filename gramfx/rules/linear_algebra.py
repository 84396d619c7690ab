"""Batched matrix functions: the last two dims become new ones, the leading dims broadcast."""

from __future__ import annotations

from gramfx.axes import Value
from gramfx.rules.table import Call, Label, Operand, define


def _follow_leading(call: Call, trailing: dict[int, int], operands: list[Operand]) -> Value:
    """Leading dims align to the right of each other; an operand has ``trailing[its place]`` dims of its own, or 2."""
    leads = [max(o.rank - trailing.get(at, 2), 0) for at, o in enumerate(operands)]
    width = max(leads)
    listed = [
        (o, (*range(width - lead, width), *["own"] * (o.rank - lead))) for o, lead in zip(operands, leads, strict=True)
    ]
    output: list[Label] = [*range(width), *[None] * (len(call.shape) - width)]
    return call.labelled(listed, output)


def matrices(call: Call) -> Value:
    """Every operand is a stack of matrices."""
    return _follow_leading(call, {}, call.operands)


def solve(call: Call) -> Value:
    """``A: [..., n, n]`` with a stack of vectors or of matrices, told apart as torch does."""
    left, right = call.operands
    vector = right.rank == 1 or (right.rank == left.rank - 1 and right.shape == left.shape[:-1])
    return _follow_leading(call, {1: 1 if vector else 2}, [left, right])


def factors(call: Call) -> Value:
    """A stack of packed factors with its pivots ``[..., n]`` or reflectors' scales, and perhaps right-hand sides."""
    trailing = {at: 1 for at, (name, o) in enumerate(_named_operands(call)) if name in ("pivots", "tau", "LU_pivots")}
    return _follow_leading(call, trailing, call.operands)


def _named_operands(call: Call) -> list[tuple[str, Operand]]:
    return [(name, value) for name, value in call.args.items() if isinstance(value, Operand)]


def tolerant(call: Call) -> Value:
    """A stack of matrices with tolerances ``[...]`` of no further dims."""
    trailing = {at: 0 for at, _ in enumerate(call.operands) if at}
    return _follow_leading(call, trailing, call.operands)


define("linalg_cholesky linalg_cholesky_ex cholesky cholesky_inverse cholesky_solve linalg_det det logdet", matrices)
define("linalg_slogdet slogdet linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv inverse", matrices)
define("linalg_inv_ex linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_qr qr linalg_svd svd", matrices)
define("linalg_svdvals _linalg_svd _linalg_eigh _linalg_det _linalg_slogdet linalg_matrix_exp matrix_exp", matrices)
define("linalg_matrix_power matrix_power linalg_solve_triangular triangular_solve linalg_lstsq geqrf", matrices)
define("linalg_cond linalg_ldl_factor linalg_ldl_factor_ex _lu_with_info pinverse linalg_matrix_rank.default", matrices)
define("linalg_solve linalg_solve_ex _linalg_solve_ex", solve)
define("linalg_lu_solve lu_solve linalg_ldl_solve lu_unpack linalg_householder_product ormqr", factors)
define("linalg_pinv linalg_matrix_rank", tolerant)
