"""Objectives of every rank and order."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.architectures.formulas import plain, randn, wired
from tests.architectures.structure import mlp

X, TOKENS = randn((4, 3)), randn((3, 2, 3))


def net() -> nn.Module:
    """A small network of four outputs."""
    return mlp(3, 4, 4)


def entropy_of_tokens(output: Tensor, targets: Tensor) -> Tensor:
    """Objectives [B]: mean cross-entropy over the tokens whose target is not ignored."""
    losses = F.cross_entropy(output.transpose(1, 2), targets, ignore_index=-100, reduction="none")
    return losses.sum(1) / (targets != -100).sum(1)


def binary(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """Objectives [B, 2] from targets in a dict."""
    losses = F.binary_cross_entropy_with_logits(output, targets["labels"], reduction="none")
    return torch.stack([losses.mean(1), (output.mean(1) - targets["level"]).square()], 1)


def two_heads(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of two heads on one body."""
    h = torch.tanh(m.body(x))
    return m.a(h), m.b(h)


def heads() -> dict[str, nn.Module]:
    """A body and two heads."""
    return {"body": nn.Linear(3, 4), "a": nn.Linear(4, 1), "b": nn.Linear(4, 2)}


def head_losses(output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One loss a head and sample."""
    return output[0].square().sum(1), output[1].logsumexp(1)


def dictionary_targets() -> dict[str, Tensor]:
    """Targets of two kinds."""
    return {"labels": torch.randint(0, 2, (4, 4)).to(torch.get_default_dtype()), "level": torch.randn(4)}


SHAPES = [
    plain("rank_zero", net, X, objective=lambda o: o.square().sum(), out_dim=None, coupled=True),
    plain(
        "rank_zero_from_one_sample",
        net,
        randn((1, 3)),
        objective=lambda o: o.square().sum(),
        out_dim=None,
        batch_size=1,
        alone=False,
        unproven=True,
    ),
    plain("rank_one", net, X, objective=lambda o: o.square().sum(1)),
    plain("rank_two", net, X),
    plain("rank_three", net, TOKENS, batch_size=3),
    plain("rank_four", net, randn((2, 2, 2, 3)), batch_size=2),
    plain("rank_two_one_column", net, X, objective=lambda o: o.square().sum(1, keepdim=True)),
    plain("objectives_before_batch", net, X, objective=lambda o: o.t(), out_dim=1),
    plain("tokens_before_batch", net, TOKENS, objective=lambda o: o.square().sum(2).t(), out_dim=1, batch_size=3),
    plain("batch_in_the_middle", net, TOKENS, objective=lambda o: o.transpose(0, 1)[:, :, :2], out_dim=1, batch_size=3),
    wired("losses_stacked_first", heads, two_heads, X, objective=lambda o: torch.stack(head_losses(o)), out_dim=1),
    wired("losses_stacked_last", heads, two_heads, X, objective=lambda o: torch.stack(head_losses(o), 1)),
    wired(
        "losses_concatenated",
        heads,
        two_heads,
        X,
        objective=lambda o: torch.cat(head_losses(o)),
        out_dim=None,
        unproven=True,
    ),
    plain("flattened_objectives", net, X, objective=lambda o: o.flatten(), out_dim=None, unproven=True),
    plain("first_samples_only", net, X, objective=lambda o: o[:2].square().sum(1), out_dim=None, unproven=True),
    plain("one_sample_only", net, X, objective=lambda o: o[2], out_dim=None, unproven=True),
    plain("same_objective_twice", net, X, objective=lambda o: o[:, [0, 0, 1]]),
    plain("zero_objectives", net, X, objective=lambda o: o[:, :0]),
    plain(
        "cross_entropy",
        net,
        X,
        objective=lambda o, y: F.cross_entropy(o, y, reduction="none"),
        targets=lambda: torch.tensor([0, 3, 3, 1]),
    ),
    plain(
        "cross_entropy_closed_targets",
        net,
        X,
        objective=lambda o, y: F.cross_entropy(o, y, reduction="none"),
        targets=lambda: torch.tensor([0, 3, 3, 1]),
        closed=True,
    ),
    plain(
        "cross_entropy_smoothed",
        net,
        X,
        objective=lambda o, y: F.cross_entropy(o, y, reduction="none", label_smoothing=0.1),
        targets=lambda: torch.tensor([0, 3, 3, 1]),
    ),
    plain(
        "cross_entropy_soft_targets",
        net,
        X,
        objective=lambda o, y: F.cross_entropy(o, y, reduction="none"),
        targets=lambda: torch.rand(4, 4).softmax(1),
    ),
    plain(
        "cross_entropy_tokens",
        net,
        TOKENS,
        objective=entropy_of_tokens,
        targets=lambda: torch.tensor([[0, 3], [1, -100], [-100, 2]]),
        batch_size=3,
    ),
    plain(
        "negative_log_likelihood",
        net,
        X,
        objective=lambda o, y: F.nll_loss(o.log_softmax(1), y, reduction="none"),
        targets=lambda: torch.tensor([0, 3, 3, 1]),
    ),
    plain(
        "picked_log_probability",
        net,
        X,
        objective=lambda o, y: -o.log_softmax(1).gather(1, y[:, None])[:, 0],
        targets=lambda: torch.tensor([0, 3, 3, 1]),
    ),
    plain("binary_and_regression", net, X, objective=binary, targets=dictionary_targets),
    plain(
        "squared_error_per_entry",
        net,
        X,
        objective=lambda o, y: F.mse_loss(o, y, reduction="none"),
        targets=lambda: torch.randn(4, 4),
    ),
    plain(
        "huber_loss",
        net,
        X,
        objective=lambda o, y: F.huber_loss(o, y, reduction="none").mean(1),
        targets=lambda: torch.randn(4, 4),
    ),
    plain(
        "loss_from_outputs_and_weights",
        net,
        X,
        objective=lambda o, y: o.square().mean(1) * y,
        targets=lambda: torch.rand(4),
    ),
]
