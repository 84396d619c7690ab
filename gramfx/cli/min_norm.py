"""Weights under which no objective loses, from the Gramian alone."""

from __future__ import annotations

import torch
from torch import Tensor


def min_norm_weights(gramian: Tensor, steps: int = 500, tolerance: float = 1e-3) -> Tensor:
    """``argmin_w ‖Jᵀ w‖² = wᵀ G w`` over ``w ≥ 0, Σ w = 1``, for ``G = J Jᵀ`` of shape ``[m, m]``.

    The problem is MGDA's (Désidéri 2012, "Multiple-gradient descent algorithm"): ``d = Jᵀ w`` is the shortest vector in
    the convex hull of the gradients, and ``J d ≥ ‖d‖²`` in every entry, so no objective grows along ``-d``. Solved by
    pairwise Frank-Wolfe (Lacoste-Julien and Jaggi 2015, "On the global linear convergence of Frank-Wolfe optimization
    variants", algorithm 2): weight moves from the worst entry ``v`` of the support to the best entry ``s`` by the exact
    step ``γ = (Gw_v - Gw_s) / (G_ss + G_vv - 2 G_sv)``, at most ``w_v``. Ends after ``steps``, or when
    ``wᵀGw - min(Gw) ≤ tolerance · wᵀGw``. Returns float64.
    """
    gramian = gramian.detach().double()
    weights = torch.full((len(gramian),), 1 / len(gramian), dtype=gramian.dtype, device=gramian.device)
    slopes = gramian @ weights
    for _ in range(steps):
        best = int(slopes.argmin())
        worst = int(slopes.masked_fill(weights <= 0, -torch.inf).argmax())
        squared, gain = float(weights @ slopes), float(slopes[worst] - slopes[best])
        if gain <= 0 or squared - float(slopes[best]) <= tolerance * squared:
            break
        bend = float(gramian[best, best] + gramian[worst, worst] - 2 * gramian[best, worst])
        most = float(weights[worst])
        step = min(gain / bend, most) if bend > 0 else most
        weights[best] += step
        weights[worst] = 0 if step == most else most - step
        slopes += step * (gramian[:, best] - gramian[:, worst])
    return weights


def balanced_weights(gramian: Tensor, floor: float = 1e-2, steps: int = 500, tolerance: float = 0.1) -> Tensor:
    """MGDA for gradients of very different lengths: each is first divided by its squared norm.

    Plain MGDA gives nearly all weight to the shortest gradients, here those of images already learnt. For
    ``u_i = g_i / ‖g_i‖²`` the shortest average ``d = Σ v_i u_i`` has ``g_i · d ≥ ‖d‖² ‖g_i‖²``: every objective falls
    in proportion to what a gradient step of its own would give. Orthogonal gradients get equal weights, as in plain
    averaging. Returns ``w_i = v_i / ‖g_i‖²`` scaled to sum to one; norms below ``floor`` times the largest are raised.
    """
    squared = gramian.detach().double().diagonal()
    squared = squared.clamp(min=max(floor**2 * float(squared.max()), 1e-100))
    weights = min_norm_weights(gramian.double() / squared.outer(squared), steps, tolerance) / squared
    return weights / weights.sum()
