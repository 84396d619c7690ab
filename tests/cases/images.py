"""Convolutions, normalisation, freezing, dropout, and batches of unusual size."""

import torch
from torch import Tensor, nn

from tests.cases.base import Case, Columns, used, zero
from tests.cases.losses import classes, entropy, mean_square


def upsampler() -> nn.Module:
    """A batch norm in eval mode between a convolution and a transposed one."""
    norm = nn.BatchNorm2d(4)
    norm.get_buffer("running_mean").normal_()
    norm.get_buffer("running_var").uniform_(0.5, 2.0)
    up = nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), up).eval()


def batch_normed() -> nn.Module:
    """A batch norm in training mode."""
    return nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).train()


def half_frozen() -> nn.Module:
    """Layers with one learning and one frozen parameter, and one that only looks frozen."""
    net = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    for fixed in ("0.weight", "1.bias", "3.weight", "3.bias"):
        net.get_parameter(fixed).requires_grad_(False)
    setattr(net[5], "requires_grad", False)  # noqa: B010 (what a user wrote: it freezes nothing)
    return net


def check_frozen(rows: Tensor, cols: Columns) -> None:
    """Only what learns has columns."""
    assert rows.shape[1] == 5 + 5 + 12
    used(rows[:, :5])
    used(rows[:, -12:])


class DepthwiseBlock(nn.Module):
    """Depthwise and pointwise convolutions, gated, all in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm, self.act = nn.GroupNorm(2, channels), nn.Hardswish(inplace=True)
        self.gate = nn.Sequential(nn.Conv2d(channels, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(2, channels, 1))
        self.pointwise = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.depthwise(x)))
        h = self.pointwise(h * self.gate(h.mean((2, 3), keepdim=True)).sigmoid_())
        h += x
        return h


def depthwise_net() -> nn.Module:
    """Two depthwise blocks."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        DepthwiseBlock(4),
        nn.ReLU6(inplace=True),
        DepthwiseBlock(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def dropout_net() -> nn.Module:
    """Dropout of channels and of entries."""
    dropouts = nn.Dropout1d(0.3), nn.Dropout(0.5)
    return nn.Sequential(nn.Conv1d(2, 6, 2), dropouts[0], nn.Flatten(), dropouts[1], nn.Linear(18, 2)).train()


class UnusualLayers(nn.Module):
    """Layers whose batching rules were missing elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2, padding=1, padding_mode="reflect")
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.slopes, self.group = nn.PReLU(4), nn.GroupNorm(4, 4)
        self.pair, self.slope = nn.Bilinear(4, 3, 2), nn.PReLU()

    def forward(self, image: Tensor, row: Tensor) -> Tensor:
        h = self.group(self.slopes(self.instance(self.conv(image))))
        return self.slope(self.pair(h.mean((2, 3)), row)).sum(1)


class IdleLayers(nn.Module):
    """Declares more than it uses, and has a parameter of rank zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.dropped, self.never = nn.Linear(4, 2), nn.Linear(2, 10)
        self.gate = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).relu()
        self.dropped(h)
        return {"prediction": self.gate * self.head(h), "note": h.detach().mean()}


def check_idle(rows: Tensor, cols: Columns) -> None:
    """What is idle has zero columns."""
    zero(cols("dropped"))
    zero(cols("never"))
    used(cols("gate"))


def conv_and_linear(channels: int, width: int, features: int) -> nn.Module:
    """One convolution and one linear layer."""
    return nn.Sequential(nn.Conv2d(channels, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(features, 2))


IMAGES = [
    Case(
        name="c10_batch_norm_eval",
        situation="Batch norm in eval mode is an affine map: independent samples, ordinary columns, not to be refused.",
        build=upsampler,
        inputs=lambda: (torch.randn(4, 2, 5, 5),),
        objective=mean_square,
        targets=lambda: torch.randn(4, 2, 8, 8),
    ),
    Case(
        name="c11_batch_norm_training",
        situation="Batch norm in training couples samples: full-batch rows, or an error; independent ones are wrong.",
        build=batch_normed,
        inputs=lambda: (torch.randn(5, 3, 4),),
        objective=entropy,
        targets=classes(0, 1, 1, 0, 1),
        batch_size=5,
        coupled=True,
        deferred=True,
    ),
    Case(
        name="c14_half_frozen_layers",
        situation="Frozen parameters beside learning ones have no columns, and still pass gradients on.",
        build=half_frozen,
        inputs=lambda: (torch.randn(4, 4),),
        objective=entropy,
        targets=classes(0, 1, 1, 0),
        claims=check_frozen,
    ),
    Case(
        name="c15_idle_layers",
        situation="Layers never used, or used for nothing, are zero columns and no error.",
        build=IdleLayers,
        inputs=lambda: (torch.randn(4, 3),),
        objective=lambda output: output["prediction"][:, 0],
        zero=("dropped", "never"),
        claims=check_idle,
    ),
    Case(
        name="c19_depthwise_in_place",
        situation="In-place activations and sums are an execution detail; a depthwise weight acts per channel.",
        build=depthwise_net,
        inputs=lambda: (torch.randn(3, 3, 8, 8),),
        objective=entropy,
        targets=classes(0, 2, 1),
        batch_size=3,
    ),
    Case(
        name="c20_active_dropout",
        situation="The masks are those of the one forward whose output is returned, one for each sample.",
        build=dropout_net,
        inputs=lambda: (torch.randn(5, 2, 4),),
        objective=entropy,
        targets=classes(0, 1, 1, 0, 1),
        batch_size=5,
        random=True,
        deferred=True,
    ),
    Case(
        name="x04_unusual_layers",
        situation="Instance norm that tracks statistics couples nothing; per-channel slopes and bilinear layers.",
        build=UnusualLayers,
        inputs=lambda: (torch.randn(4, 2, 4, 4), torch.randn(4, 3)),
    ),
    Case(
        name="x06_no_samples",
        situation="A batch without samples has a Gramian of shape [0, 0] and gradients of zeros.",
        build=lambda: conv_and_linear(1, 2, 8),
        inputs=lambda: (torch.randn(0, 1, 4, 4),),
        objective=lambda output: output.sum(1),
        batch_size=0,
    ),
    Case(
        name="x07_one_sample_then_three",
        situation="A batch of one, then of three, through the same module: nothing of the first may stick.",
        build=lambda: conv_and_linear(2, 3, 12),
        inputs=lambda: (torch.randn(1, 2, 4, 4),),
        more_inputs=lambda: (torch.randn(3, 2, 4, 4),),
        objective=lambda output: output.logsumexp(1),
        batch_size=1,
    ),
    Case(
        name="x11_many_positions",
        situation="Few parameters, a hundred positions, 96 objectives: the choice of contraction matters.",
        build=lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        ),
        inputs=lambda: (torch.randn(32, 3, 12, 12),),
        batch_size=32,
    ),
]
