"""The blocks that the image networks repeat."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "relu6": nn.ReLU6, "hardswish": nn.Hardswish}


def norm_of(kind: str, channels: int) -> nn.Module:
    """Instance, group (two groups where they fit) or batch normalisation."""
    if kind == "instance":
        return nn.InstanceNorm2d(channels, affine=True)
    if kind == "group":
        return nn.GroupNorm(2 if channels % 2 == 0 else 1, channels)
    return nn.BatchNorm2d(channels)


def conv_norm(before: int, after: int, kernel: int, stride: int, groups: int, norm: str) -> list[nn.Module]:
    """A convolution that keeps the size (up to its stride) and its norm."""
    conv = nn.Conv2d(before, after, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False)
    return [conv, norm_of(norm, after)]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int, norm: str) -> None:
        super().__init__()
        first, second = conv_norm(before, after, 3, stride, 1, norm), conv_norm(after, after, 3, 1, 1, norm)
        self.main = nn.Sequential(*first, nn.ReLU(inplace=True), *second)
        changes = stride != 1 or before != after
        self.shortcut = nn.Sequential(*conv_norm(before, after, 1, stride, 1, norm)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.main(x)
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


class Fire(nn.Module):
    """Squeeze to `squeezed` channels, expand to eight times as many."""

    def __init__(self, before: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(before, squeezed, 1)
        self.one, self.three = nn.Conv2d(squeezed, 4 * squeezed, 1), nn.Conv2d(squeezed, 4 * squeezed, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x), inplace=True)
        return torch.cat([F.relu(self.one(x), inplace=True), F.relu(self.three(x), inplace=True)], 1)


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project; add the input where shapes agree."""

    def __init__(self, before: int, after: int, stride: int, expansion: int, norm: str) -> None:
        super().__init__()
        hidden = before * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [*conv_norm(before, hidden, 1, 1, 1, norm), nn.ReLU6(inplace=True)]
        layers += [*conv_norm(hidden, hidden, 3, stride, hidden, norm), nn.ReLU6(inplace=True)]
        self.main = nn.Sequential(*layers, *conv_norm(hidden, after, 1, 1, 1, norm))
        self.adds = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.main(x) if self.adds else self.main(x)


def multiple_of_eight(channels: float) -> int:
    """The nearest multiple of eight, at least eight, and not more than a tenth below."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


class Squeeze(nn.Module):
    """Scales channels by a gate made of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = multiple_of_eight(channels / 4)
        self.down, self.up = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.relu(self.down(F.adaptive_avg_pool2d(x, 1)), inplace=True)
        return x * F.hardsigmoid(self.up(gate))


class SqueezedInverted(nn.Module):
    """The inverted residual of MobileNetV3, with squeeze and a choice of activation."""

    def __init__(
        self, norm: str, before: int, kernel: int, hidden: int, after: int, squeeze: bool, activation: str, stride: int
    ) -> None:
        super().__init__()
        act = ACTIVATIONS[activation]
        layers: list[nn.Module] = []
        if hidden != before:
            layers += [*conv_norm(before, hidden, 1, 1, 1, norm), act(inplace=True)]
        layers += [*conv_norm(hidden, hidden, kernel, stride, hidden, norm), act(inplace=True)]
        if squeeze:
            layers.append(Squeeze(hidden))
        self.main = nn.Sequential(*layers, *conv_norm(hidden, after, 1, 1, 1, norm))
        self.adds = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.main(x) if self.adds else self.main(x)
