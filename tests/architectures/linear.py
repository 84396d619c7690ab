"""Parameters that meet data in a matrix product, a sum or a product with broadcasting."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.architectures.formulas import formula, per_sample_mean, plain, randn, wired

W = {"w": (3, 2)}
WB = {"w": (3, 2), "b": (2,)}
X2, X3, X4 = randn((4, 3)), randn((4, 5, 3)), randn((4, 2, 5, 3))

PRODUCTS = [
    plain("linear_2d", lambda: nn.Linear(3, 2), X2),
    plain(
        "linear_3d", lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), X3, objective=per_sample_mean
    ),
    plain(
        "linear_4d", lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), X4, objective=per_sample_mean
    ),
    plain("linear_many_tokens", lambda: nn.Linear(2, 2), randn((3, 40, 2)), objective=per_sample_mean, batch_size=3),
    plain("linear_wide", lambda: nn.Linear(40, 30), randn((3, 2, 40)), objective=per_sample_mean, batch_size=3),
    wired(
        "linear_token_first",
        lambda: {"a": nn.Linear(3, 2)},
        lambda m, x: m.a(x).square().sum((0, 2)),
        randn((5, 4, 3)),
        in_dims=1,
    ),
    formula("addmm", WB, lambda p, x: torch.addmm(p.b, x, p.w), X2),
    formula("addmm_scaled", WB, lambda p, x: torch.addmm(p.b, x, p.w, beta=0.5, alpha=-2.0), X2),
    formula("mm", W, lambda p, x: torch.mm(x, p.w), X2),
    formula("mv", {"w": (3,)}, lambda p, x: torch.mv(x, p.w), X2),
    formula("matmul_vector", {"w": (3,)}, lambda p, x: x @ p.w, X3),
    formula("matmul_3d", W, lambda p, x: (x @ p.w).square().sum(1), X3),
    formula("matmul_parameter_left", {"w": (2, 5)}, lambda p, x: (p.w @ x).square().sum(2), X3),
    formula("matmul_broadcast_parameter", {"w": (2, 3, 4)}, lambda p, x: (x @ p.w).square().sum((1, 2)), X4),
    formula(
        "matmul_parameter_inside_batch", {"w": (5, 3, 2)}, lambda p, x: (x.unsqueeze(2) @ p.w).square().sum((1, 2)), X3
    ),
    formula("bmm_expanded", W, lambda p, x: torch.bmm(x, p.w.expand(x.shape[0], 3, 2)).square().sum(1), X3),
    formula(
        "bmm_heads",
        {"w": (2, 3, 4)},
        lambda p, x: torch.bmm(x.transpose(0, 1), p.w).square().sum((0, 2)),
        randn((4, 2, 3)),
    ),
    formula(
        "baddbmm",
        {"w": (2, 3, 2), "b": (2, 1, 2)},
        lambda p, x: torch.baddbmm(p.b, x.transpose(0, 1), p.w).square().sum(2).t(),
        randn((4, 2, 3)),
    ),
    formula(
        "einsum_two_operands", {"w": (3, 2, 2)}, lambda p, x: torch.einsum("bti,ihd->bhtd", x, p.w).square().sum(2), X3
    ),
    formula(
        "einsum_three_operands",
        {"w": (3, 2)},
        lambda p, x, y: torch.einsum("bi,ij,bj->bj", x, p.w, y),
        randn((4, 3), (4, 2)),
    ),
    formula(
        "einsum_two_parameters",
        {"w": (3, 2), "v": (2, 4)},
        lambda p, x: torch.einsum("bti,ij,jk->btk", x, p.w, p.v).square().sum(1),
        X3,
    ),
    formula("einsum_diagonal", {"w": (3, 3)}, lambda p, x: torch.einsum("bi,ii->bi", x, p.w), X2),
    formula("einsum_summed_operand", {"w": (3, 4)}, lambda p, x: torch.einsum("bi,jk->bk", x, p.w), X2),
    formula("einsum_ellipsis", W, lambda p, x: torch.einsum("...i,io->...o", x, p.w).square().sum((1, 2)), X4),
    formula("tensordot", {"w": (5, 3, 2)}, lambda p, x: torch.tensordot(x, p.w, dims=([1, 2], [0, 1])), X3),
    formula("outer_product", {"w": (4,)}, lambda p, x: (x.unsqueeze(2) * p.w).square().sum(1), X2),
    formula("inner_product", {"w": (2, 3)}, lambda p, x: torch.inner(x, p.w), X2),
    formula(
        "f_bilinear", {"w": (2, 3, 4), "b": (2,)}, lambda p, x, y: F.bilinear(x, y, p.w, p.b), randn((4, 3), (4, 4))
    ),
    plain("bilinear_tokens", lambda: nn.Bilinear(3, 2, 2), randn((4, 5, 3), (4, 5, 2)), objective=per_sample_mean),
    formula("quadratic_form", {"w": (3, 3)}, lambda p, x: ((x @ p.w) * x).sum(1), X2),
    formula("low_rank_product", {"a": (3, 1), "b": (1, 4)}, lambda p, x: (x @ p.a) @ p.b, X2),
    formula(
        "experts_soft",
        {"w": (3, 3, 2), "g": (3, 3)},
        lambda p, x: torch.einsum("bi,eio,be->bo", x, p.w, (x @ p.g).softmax(1)),
        X2,
    ),
]

BROADCASTS = [
    formula("bias_add", {"b": (3,)}, lambda p, x: torch.tanh(x + p.b), X2),
    formula("bias_add_3d", {"b": (3,)}, lambda p, x: torch.tanh(x + p.b).sum(1), X3),
    formula("bias_on_channels", {"b": (2, 1, 1)}, lambda p, x: torch.tanh(x + p.b).mean((2, 3)), X4),
    formula("scalar_shift", {"b": ()}, lambda p, x: torch.tanh(x + p.b), X2),
    formula("scalar_scale", {"s": ()}, lambda p, x: torch.tanh(p.s * x), X2),
    formula("position_table_added", {"e": (5, 3)}, lambda p, x: torch.tanh(x + p.e).sum(1), X3),
    formula("position_table_with_leading_one", {"e": (1, 5, 3)}, lambda p, x: torch.tanh(p.e + x).sum(1), X3),
    formula("broadcast_both_ways", {"e": (5, 3)}, lambda p, x: torch.tanh(x.unsqueeze(1) + p.e).sum(1), X2),
    formula("broadcast_inner_one", {"e": (5, 1)}, lambda p, x: torch.tanh(x * p.e).sum(1), X3),
    formula("add_scaled", {"b": (3,)}, lambda p, x: torch.tanh(torch.add(x, p.b, alpha=3)), X2),
    formula("subtract_from_parameter", {"b": (3,)}, lambda p, x: torch.tanh(p.b - x), X2),
    formula("reversed_subtract", {"b": (3,)}, lambda p, x: torch.tanh(torch.rsub(p.b, x, alpha=2)), X2),
    formula("scale_last", {"s": (3,)}, lambda p, x: torch.tanh(x * p.s).sum(1), X3),
    formula(
        "layer_scale",
        {"s": (2, 1, 1), "w": (3, 3)},
        lambda p, x: (x + p.s * torch.tanh(x @ p.w)).square().sum((2, 3)),
        X4,
    ),
    formula("divide_by_parameter", {"s": (3,)}, lambda p, x: x / (p.s * p.s + 1.0), X2),
    formula("parameter_over_data", {"s": (3,)}, lambda p, x: p.s / (1.0 + x * x), X2),
    formula(
        "gated_addition",
        {"s": (3,), "b": (3,)},
        lambda p, x, y: torch.addcmul(x, y, p.s) + torch.addcmul(p.b, x, y),
        randn((4, 3), (4, 3)),
    ),
    formula("same_scale_twice_by_one_node", {"s": (3,)}, lambda p, x: torch.addcmul(x * p.s, p.s, p.s, value=0.5), X2),
    formula("sample_latents", {"z": (4, 3), "w": (3, 2)}, lambda p, x: torch.tanh(x + p.z) @ p.w, X2, alone=False),
    formula("sample_weights", {"z": (4,)}, lambda p, x: torch.tanh(x).sum(1) * p.z, X2, alone=False),
    formula(
        "sample_latents_concatenated",
        {"z": (4, 2), "w": (5, 2)},
        lambda p, x: torch.cat([x, p.z], 1) @ p.w,
        X2,
        alone=False,
        unproven=True,
    ),
    formula("data_free_objective", {"w": (3, 2)}, lambda p, x: p.w.sum().expand(x.shape[0]), X2),
    formula("constant_objective", {"w": (3, 2)}, lambda p, x: torch.cat([x @ p.w, x[:, :1]], 1), X2),
]

LINEAR = PRODUCTS + BROADCASTS
