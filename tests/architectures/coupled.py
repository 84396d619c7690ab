"""Samples that depend on each other, and look-alikes whose objectives do not."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.architectures.formulas import formula, per_sample_mean, plain, randn, wired
from tests.architectures.structure import mlp

X = randn((4, 3))
PAIRS = torch.tensor([1, 0, 3, 2])


def layers() -> dict[str, nn.Module]:
    """Two layers to put something between."""
    return {"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}


def contrastive(z: Tensor) -> Tensor:
    """InfoNCE between neighbours: every loss sees every sample."""
    z = F.normalize(z, dim=1)
    similarity = (z @ z.t() / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), float("-inf"))
    return F.cross_entropy(similarity, PAIRS.to(z.device), reduction="none")


def normalised(module: nn.Module) -> nn.Module:
    """The module between two layers."""
    return nn.Sequential(nn.Linear(3, 4), module, nn.Tanh(), nn.Linear(4, 2))


def two_tasks(output: tuple[Tensor, Tensor], values: Tensor, classes: Tensor) -> Tensor:
    """One mean loss a task."""
    return torch.stack([F.mse_loss(output[0], values), F.cross_entropy(output[1], classes)])


def penalised(p: Any, x: Tensor) -> Tensor:
    """The mean loss and a penalty that sees no data."""
    return torch.stack([torch.tanh(x @ p.w).square().mean(), p.w.square().sum()])


def traces(p: Any, x: Tensor) -> Tensor:
    """Diagonals across the batch; the backward of a trace is wrong under vmap."""
    return torch.stack([torch.trace(x @ p.w), torch.trace(torch.tanh(x @ p.w))])


def detached_centre(m: Any, x: Tensor) -> Tensor:
    """Centred by a mean that gives no gradient."""
    h = m.a(x)
    return m.b(torch.tanh(h - h.detach().mean(0)))


def detached_memory(m: Any, x: Tensor) -> Tensor:
    """Keys of all samples, without gradient."""
    h = m.a(x)
    return m.b((h @ h.detach().t()).softmax(1) @ h.detach())


def mixed_inputs(m: Any, x: Tensor) -> Tensor:
    """Mixup of the inputs."""
    return m.b(torch.tanh(m.a(0.7 * x + 0.3 * x.flip(0))))


def divided_by_count(output: Tensor, targets: Tensor) -> Tensor:
    """Losses over a count of the whole batch, which has no gradient."""
    return F.cross_entropy(output, targets, reduction="none") / (targets == 1).sum().clamp(min=1)


COUPLED = [
    plain("batch_norm_training", lambda: normalised(nn.BatchNorm1d(4)), X, coupled=True),
    plain(
        "batch_norm_without_statistics",
        lambda: normalised(nn.BatchNorm1d(4, track_running_stats=False)),
        X,
        coupled=True,
    ),
    plain(
        "batch_norm_without_statistics_eval",
        lambda: normalised(nn.BatchNorm1d(4, track_running_stats=False)).eval(),
        X,
        coupled=True,
    ),
    plain(
        "batch_norm_2d_training",
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 2)),
        randn((4, 2, 4, 4)),
        objective=per_sample_mean,
        coupled=True,
    ),
    plain(
        "batch_norm_between_independent_layers",
        lambda: nn.Sequential(mlp(3, 4, 4), nn.BatchNorm1d(4), mlp(4, 4, 2)),
        X,
        coupled=True,
    ),
    wired("centred_over_batch", layers, lambda m, x: m.b(torch.tanh((h := m.a(x)) - h.mean(0))), X, coupled=True),
    wired("softmax_over_batch", layers, lambda m, x: m.b(m.a(x).softmax(0)), X, coupled=True),
    wired("cumsum_over_batch", layers, lambda m, x: m.b(m.a(x).cumsum(0).tanh()), X, coupled=True),
    wired("attention_over_batch", layers, lambda m, x: m.b((h := m.a(x)) @ h.t() @ h), X, coupled=True),
    wired("maximum_over_batch", layers, lambda m, x: m.b((h := m.a(x)) - h.amax(0)), X, coupled=True),
    wired("samples_reversed", layers, lambda m, x: m.b(torch.tanh(m.a(x).flip(0))), X, coupled=True),
    wired(
        "samples_rolled_in_the_middle",
        layers,
        lambda m, x: m.b(torch.tanh((h := m.a(x)) + h.roll(1, 0))),
        X,
        coupled=True,
    ),
    wired(
        "samples_permuted",
        layers,
        lambda m, x: m.b(torch.tanh(m.a(x)[PAIRS.to(x.device)])),
        X,
        coupled=True,
        alone=False,
    ),
    wired("first_sample_as_reference", layers, lambda m, x: m.b(torch.tanh((h := m.a(x)) - h[:1])), X, coupled=True),
    wired(
        "token_order_mixed_up",
        layers,
        lambda m, x: m.b(torch.tanh(m.a(x)).reshape(5, 4, 4).sum(0)),
        randn((4, 5, 3)),
        coupled=True,
        alone=False,
    ),
    plain("info_nce", lambda: mlp(3, 4, 3), X, objective=contrastive, coupled=True, alone=False),
    plain(
        "pairwise_distances",
        lambda: mlp(3, 4, 3),
        X,
        objective=lambda z: (z[:, None] - z[None]).square().sum((1, 2)),
        coupled=True,
    ),
    plain(
        "batch_centred_objective", lambda: mlp(3, 4, 1), X, objective=lambda o: o[:, 0] - o[:, 0].mean(), coupled=True
    ),
    plain(
        "normalised_by_batch_total", lambda: mlp(3, 4, 1), X, objective=lambda o: o[:, 0] / o.exp().sum(), coupled=True
    ),
    plain(
        "mean_loss",
        lambda: mlp(3, 4, 2),
        X,
        objective=lambda o, y: F.cross_entropy(o, y),
        targets=lambda: torch.tensor([0, 1, 1, 0]),
        out_dim=None,
        coupled=True,
    ),
    wired(
        "two_task_losses",
        lambda: {"body": mlp(3, 4, 4), "a": nn.Linear(4, 1), "b": nn.Linear(4, 2)},
        lambda m, x: (m.a(h := m.body(x).tanh()), m.b(h)),
        X,
        objective=two_tasks,
        targets=lambda: (torch.randn(4, 1), torch.tensor([0, 1, 1, 0])),
        out_dim=None,
        coupled=True,
    ),
    formula("loss_and_penalty", {"w": (3, 2)}, penalised, X, out_dim=None, coupled=True),
    formula("traces_of_the_batch", {"w": (3, 4)}, traces, X, out_dim=None, coupled=True),
    plain(
        "mean_of_pairs", lambda: mlp(3, 4, 1), X, objective=lambda o: o.view(2, 2).mean(1), out_dim=None, coupled=True
    ),
    plain(
        "no_batch_declared",
        lambda: mlp(3, 4, 2),
        randn((3,)),
        in_dims=None,
        out_dim=None,
        batch_size=1,
        alone=False,
        unproven=True,
    ),
]

LOOKALIKES = [
    plain(
        "batch_norm_on_raw_inputs",
        lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        X,
        alone=False,
    ),
    wired("centred_raw_inputs", layers, lambda m, x: m.b(torch.tanh(m.a(x - x.mean(0)))), X, alone=False),
    wired("mixed_raw_inputs", layers, mixed_inputs, X, alone=False),
    wired("centred_by_detached_mean", layers, detached_centre, X, alone=False),
    wired("detached_memory", layers, detached_memory, X, alone=False),
    plain(
        "divided_by_batch_count",
        lambda: mlp(3, 4, 2),
        X,
        objective=divided_by_count,
        targets=lambda: torch.tensor([0, 1, 1, 0]),
        alone=False,
    ),
    wired(
        "shifted_by_total_of_raw_inputs",
        layers,
        lambda m, x: m.b(torch.tanh(m.a(x) + x.sum(0, keepdim=True).mean())),
        X,
        alone=False,
    ),
    plain(
        "instance_norm_training",
        lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
        randn((4, 3, 5)),
        objective=per_sample_mean,
    ),
]
