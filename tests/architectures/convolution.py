"""Convolutions of every kind."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.architectures.base import Architecture
from tests.architectures.formulas import formula, plain, randn, wired

LINE, IMAGE, VOLUME = randn((4, 4, 7)), randn((4, 4, 6, 5)), randn((3, 2, 4, 4, 3))


def pooled(output: Tensor) -> Tensor:
    """Objectives [B, K]: mean over positions of a curved function, K channels at most two."""
    return output.sin().flatten(2).mean(2)[:, :2]


def conv(
    name: str, layer: Callable[[], nn.Module], inputs: Callable[[], tuple[Tensor, ...]], batch_size: int = 4
) -> Architecture:
    """An entry of one convolution; the pooling makes cotangents differ by position."""
    return plain(name, layer, inputs, objective=pooled, batch_size=batch_size)


def channels_last(layer: nn.Module) -> nn.Module:
    """The layer with its weight in channels-last memory."""
    return layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


CONVOLUTION = [
    conv("conv1d", lambda: nn.Conv1d(4, 2, 3), LINE),
    conv("conv1d_pointwise", lambda: nn.Conv1d(4, 3, 1), LINE),
    conv("conv1d_stride_and_padding", lambda: nn.Conv1d(4, 3, 3, stride=2, padding=1), LINE),
    conv("conv1d_dilated", lambda: nn.Conv1d(4, 3, 2, dilation=3), LINE),
    conv("conv1d_depthwise", lambda: nn.Conv1d(4, 4, 3, groups=4, bias=False), LINE),
    conv("conv1d_depthwise_multiplied", lambda: nn.Conv1d(4, 8, 3, groups=4), LINE),
    conv("conv1d_same_even_kernel", lambda: nn.Conv1d(4, 2, 4, padding="same"), LINE),
    conv("conv1d_circular", lambda: nn.Conv1d(4, 2, 3, padding=2, padding_mode="circular"), LINE),
    conv("conv1d_replicate", lambda: nn.Conv1d(4, 2, 3, padding=2, padding_mode="replicate"), LINE),
    conv("conv1d_causal", lambda: nn.Sequential(nn.ConstantPad1d((2, 0), 0.5), nn.Conv1d(4, 2, 3)), LINE),
    conv("conv2d", lambda: nn.Conv2d(4, 3, 3), IMAGE),
    conv("conv2d_without_bias", lambda: nn.Conv2d(4, 3, (3, 2), bias=False), IMAGE),
    conv("conv2d_pointwise", lambda: nn.Conv2d(4, 3, 1), IMAGE),
    conv("conv2d_pointwise_strided", lambda: nn.Conv2d(4, 3, 1, stride=2), IMAGE),
    conv("conv2d_stride_leaves_rest", lambda: nn.Conv2d(4, 3, 3, stride=(2, 3), padding=(1, 0)), IMAGE),
    conv("conv2d_dilated", lambda: nn.Conv2d(4, 3, 2, dilation=(2, 3)), IMAGE),
    conv("conv2d_grouped", lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), IMAGE),
    conv("conv2d_depthwise", lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), IMAGE),
    conv("conv2d_same", lambda: nn.Conv2d(4, 3, (3, 2), padding="same", dilation=(1, 2)), IMAGE),
    conv("conv2d_reflect", lambda: nn.Conv2d(4, 3, 3, padding=(2, 1), padding_mode="reflect"), IMAGE),
    conv("conv2d_circular", lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), IMAGE),
    conv("conv2d_patches", lambda: nn.Conv2d(4, 3, 2, stride=2), IMAGE),
    conv("conv2d_channels_last", lambda: channels_last(nn.Conv2d(4, 3, 3)), IMAGE),
    conv("conv3d", lambda: nn.Conv3d(2, 2, 2), VOLUME, 3),
    conv(
        "conv3d_grouped_strided", lambda: nn.Conv3d(2, 4, (2, 3, 2), stride=(1, 2, 1), padding=1, groups=2), VOLUME, 3
    ),
    conv("conv_transpose1d", lambda: nn.ConvTranspose1d(4, 2, 3), LINE),
    conv("conv_transpose1d_strided", lambda: nn.ConvTranspose1d(4, 2, 3, stride=3, padding=1, output_padding=2), LINE),
    conv("conv_transpose2d", lambda: nn.ConvTranspose2d(4, 3, 2), IMAGE),
    conv(
        "conv_transpose2d_grouped",
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        IMAGE,
    ),
    conv("conv_transpose2d_dilated", lambda: nn.ConvTranspose2d(4, 3, 3, dilation=2, padding=2, bias=False), IMAGE),
    conv("conv_transpose3d", lambda: nn.ConvTranspose3d(2, 2, 2, stride=2), VOLUME, 3),
    conv("conv_used_twice", lambda: Pyramid(), IMAGE),
    wired(
        "convs_in_series",
        lambda: {"a": nn.Conv2d(4, 3, 3, padding=1), "b": nn.Conv2d(3, 2, 2)},
        lambda m, x: m.b(m.a(x).relu()),
        IMAGE,
        objective=pooled,
    ),
    wired(
        "conv_pool_linear",
        lambda: {"a": nn.Conv2d(4, 3, 2), "b": nn.Linear(3, 2)},
        lambda m, x: m.b(F.max_pool2d(m.a(x).relu(), 2).mean((2, 3))),
        IMAGE,
    ),
    formula(
        "f_conv2d_weight_slice", {"w": (4, 6, 2, 2)}, lambda p, x: F.conv2d(x, p.w[:2, 1:5]), IMAGE, objective=pooled
    ),
    formula(
        "f_conv2d_expanded_kernel",
        {"w": (1, 1, 3, 3)},
        lambda p, x: F.conv2d(x, p.w.expand(4, 1, 3, 3), groups=4),
        IMAGE,
        objective=pooled,
    ),
    formula(
        "f_conv2d_dynamic_bias",
        {"w": (2, 4, 2, 2), "b": (4, 2)},
        lambda p, x: F.conv2d(x, p.w) + (x.mean((2, 3)) @ p.b)[:, :, None, None],
        IMAGE,
        objective=pooled,
    ),
    formula("unfold_and_matmul", {"w": (2, 16)}, lambda p, x: p.w @ F.unfold(x, 2), IMAGE, objective=pooled),
]


class Pyramid(nn.Module):
    """One convolution on the image and on its half."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        fine, coarse = self.conv(x), self.conv(F.avg_pool2d(x, 2))
        return fine + F.interpolate(coarse, size=fine.shape[2:], mode="bilinear")
