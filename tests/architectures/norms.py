"""Normalisations and activations with parameters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.architectures.formulas import formula, per_sample_mean, plain, randn, wired

IMAGE, TOKENS, ROWS = randn((4, 4, 3, 3)), randn((4, 5, 3)), randn((4, 6))


def affine(norm: nn.Module) -> nn.Module:
    """Moves scales and shifts away from one and zero."""
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 0.5)
    return norm


def evaluated(norm: nn.Module) -> nn.Module:
    """A norm in eval mode with statistics that are not trivial."""
    norm.get_buffer("running_mean").normal_()
    norm.get_buffer("running_var").uniform_(0.5, 2.0)
    return affine(norm).eval()


def after_conv(norm: nn.Module) -> nn.Module:
    """A convolution, the norm, and a head of one objective a sample."""
    return nn.Sequential(nn.Conv2d(4, 4, 2), norm, nn.Sigmoid(), nn.Flatten(), nn.Linear(16, 1))


class StandardisedConv(nn.Module):
    """A convolution whose weight is normalised over each filter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight
        mean, deviation = weight.mean((1, 2, 3), keepdim=True), weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, (weight - mean) / (deviation + 1e-5), self.conv.bias).tanh().mean((2, 3))


NORMS = [
    plain(
        "layer_norm", lambda: nn.Sequential(nn.Linear(6, 4), affine(nn.LayerNorm(4)), nn.Tanh(), nn.Linear(4, 2)), ROWS
    ),
    plain(
        "layer_norm_tokens",
        lambda: nn.Sequential(nn.Linear(3, 4), affine(nn.LayerNorm(4)), nn.Tanh()),
        TOKENS,
        objective=per_sample_mean,
    ),
    plain(
        "layer_norm_two_dims",
        lambda: nn.Sequential(affine(nn.LayerNorm((5, 3))), nn.Tanh()),
        TOKENS,
        objective=per_sample_mean,
    ),
    plain("layer_norm_without_bias", lambda: nn.Sequential(affine(nn.LayerNorm(6, bias=False)), nn.Linear(6, 2)), ROWS),
    formula(
        "f_layer_norm_shared_scale", {"s": (3,)}, lambda p, x: F.layer_norm(x, (3,), p.s, p.s).tanh().sum(1), TOKENS
    ),
    plain("rms_norm", lambda: nn.Sequential(nn.Linear(6, 4), affine(nn.RMSNorm(4)), nn.Tanh(), nn.Linear(4, 2)), ROWS),
    formula(
        "rms_norm_one_plus_scale", {"s": (3,)}, lambda p, x: (F.rms_norm(x, (3,)) * (1 + p.s)).tanh().sum(1), TOKENS
    ),
    plain("group_norm", lambda: after_conv(affine(nn.GroupNorm(2, 4))), IMAGE),
    plain("group_norm_rows", lambda: nn.Sequential(nn.Linear(6, 4), affine(nn.GroupNorm(2, 4)), nn.Tanh()), ROWS),
    plain("instance_norm", lambda: after_conv(affine(nn.InstanceNorm2d(4, affine=True))), IMAGE),
    plain(
        "instance_norm_tracking",
        lambda: after_conv(affine(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))),
        IMAGE,
    ),
    plain("batch_norm_eval", lambda: after_conv(evaluated(nn.BatchNorm2d(4))), IMAGE),
    plain("batch_norm_1d_eval", lambda: nn.Sequential(nn.Linear(6, 4), evaluated(nn.BatchNorm1d(4)), nn.Tanh()), ROWS),
    plain(
        "batch_norm_1d_eval_tokens",
        lambda: nn.Sequential(nn.Conv1d(5, 4, 2), evaluated(nn.BatchNorm1d(4)), nn.Tanh()),
        TOKENS,
        objective=per_sample_mean,
    ),
    plain(
        "batch_norm_3d_eval",
        lambda: nn.Sequential(nn.Conv3d(2, 3, 2), evaluated(nn.BatchNorm3d(3)), nn.Tanh()),
        randn((4, 2, 3, 3, 3)),
        objective=per_sample_mean,
    ),
    plain(
        "local_response_norm",
        lambda: nn.Sequential(nn.Conv2d(4, 4, 2), nn.LocalResponseNorm(3, alpha=0.5)),
        IMAGE,
        objective=per_sample_mean,
    ),
    plain("weight_standardisation", StandardisedConv, IMAGE),
    plain("prelu_one", lambda: nn.Sequential(nn.Linear(6, 4), nn.PReLU(), nn.Linear(4, 2)), ROWS),
    plain("prelu_per_channel", lambda: nn.Sequential(nn.Linear(6, 4), affine(nn.PReLU(4)), nn.Linear(4, 2)), ROWS),
    plain(
        "prelu_per_channel_image",
        lambda: nn.Sequential(nn.Conv2d(4, 3, 2), affine(nn.PReLU(3))),
        IMAGE,
        objective=per_sample_mean,
    ),
    formula("swish_with_slope", {"s": (6,)}, lambda p, x: x * torch.sigmoid(p.s * x), ROWS),
    formula("dynamic_tanh", {"a": (), "s": (6,), "b": (6,)}, lambda p, x: p.s * torch.tanh(p.a * x) + p.b, ROWS),
    wired(
        "cosine_classifier",
        lambda: {"a": nn.Linear(6, 4), "b": nn.Linear(4, 3, bias=False)},
        lambda m, x: F.normalize(m.a(x), dim=1) @ F.normalize(m.b.weight, dim=1).t(),
        ROWS,
    ),
]
