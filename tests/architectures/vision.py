"""Published image networks, by their structure; each as a reduced variant and in its real size."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.architectures.base import Architecture
from tests.architectures.vision_blocks import BasicBlock, Fire, InvertedResidual, SqueezedInverted, norm_of


def alexnet(widths: tuple[int, ...], hidden: int, classes: int, grid: int) -> nn.Sequential:
    """Krizhevsky 2014 (one tower). Dropout is off so that two runs agree."""
    a, b, c, d, e = widths
    return nn.Sequential(
        nn.Conv2d(3, a, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(a, b, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Conv2d(b, c, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(c, d, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(d, e, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(grid), nn.Flatten(),
        nn.Dropout(0.0), nn.Linear(e * grid * grid, hidden), nn.ReLU(inplace=True),
        nn.Dropout(0.0), nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, classes),
    )  # fmt: skip


def cifar_net(width: int, groups: int) -> nn.Sequential:
    """A small network for 32 x 32 images with grouped convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, groups=groups), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, groups=2 * groups), nn.MaxPool2d(3), nn.ReLU(), nn.Flatten(),
        nn.Linear(2 * width * 16, 2 * width), nn.ReLU(), nn.Linear(2 * width, 10),
    )  # fmt: skip


def resnet18(widths: tuple[int, ...], classes: int, norm: str) -> nn.Sequential:
    """He et al. 2015: four stages of two basic blocks."""
    stem = [
        nn.Conv2d(3, widths[0], 7, stride=2, padding=3, bias=False),
        norm_of(norm, widths[0]),
        nn.ReLU(inplace=True),
    ]
    blocks: list[nn.Module] = []
    before = widths[0]
    for stage, after in enumerate(widths):
        blocks += [BasicBlock(before, after, 1 if stage == 0 else 2, norm), BasicBlock(after, after, 1, norm)]
        before = after
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, padding=1), *blocks, *tail)


def squeezenet(scale: int, classes: int) -> nn.Sequential:
    """Iandola et al. 2016, version 1.1; `scale` is the width of the first squeeze."""
    s = scale
    return nn.Sequential(
        nn.Conv2d(3, 4 * s, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, ceil_mode=True),
        Fire(4 * s, s), Fire(8 * s, s), nn.MaxPool2d(3, 2, ceil_mode=True),
        Fire(8 * s, 2 * s), Fire(16 * s, 2 * s), nn.MaxPool2d(3, 2, ceil_mode=True),
        Fire(16 * s, 3 * s), Fire(24 * s, 3 * s), Fire(24 * s, 4 * s), Fire(32 * s, 4 * s),
        nn.Dropout(0.0), nn.Conv2d(32 * s, classes, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


MOBILENET_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
MOBILENET_V2_SMALL = ((1, 4, 1, 1), (2, 4, 2, 2), (2, 8, 1, 2))


def mobilenet_v2(
    settings: tuple[tuple[int, ...], ...], first: int, last: int, classes: int, norm: str
) -> nn.Sequential:
    """Sandler et al. 2018; settings are (expansion, channels, repeats, stride)."""
    layers: list[nn.Module] = [nn.Conv2d(3, first, 3, 2, 1, bias=False), norm_of(norm, first), nn.ReLU6(inplace=True)]
    before = first
    for expansion, after, repeats, stride in settings:
        for repeat in range(repeats):
            layers.append(InvertedResidual(before, after, stride if repeat == 0 else 1, expansion, norm))
            before = after
    layers += [nn.Conv2d(before, last, 1, bias=False), norm_of(norm, last), nn.ReLU6(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(last, classes))


MOBILENET_V3 = (
    (16, 3, 16, 16, True, "relu", 2),
    (16, 3, 72, 24, False, "relu", 2),
    (24, 3, 88, 24, False, "relu", 1),
    (24, 5, 96, 40, True, "hardswish", 2),
    (40, 5, 240, 40, True, "hardswish", 1),
    (40, 5, 240, 40, True, "hardswish", 1),
    (40, 5, 120, 48, True, "hardswish", 1),
    (48, 5, 144, 48, True, "hardswish", 1),
    (48, 5, 288, 96, True, "hardswish", 2),
    (96, 5, 576, 96, True, "hardswish", 1),
    (96, 5, 576, 96, True, "hardswish", 1),
)
MOBILENET_V3_SMALL = ((4, 3, 8, 4, True, "relu", 2), (4, 3, 8, 4, False, "relu", 1), (4, 5, 8, 8, True, "hardswish", 2))


def mobilenet_v3(
    settings: tuple[tuple[Any, ...], ...], last: int, hidden: int, classes: int, norm: str
) -> nn.Sequential:
    """Howard et al. 2019, the small one; settings are (in, kernel, expanded, out, squeeze, activation, stride)."""
    first, before = settings[0][0], settings[-1][3]
    layers = [nn.Conv2d(3, first, 3, 2, 1, bias=False), norm_of(norm, first), nn.Hardswish(inplace=True)]
    layers += [SqueezedInverted(norm, *setting) for setting in settings]
    layers += [nn.Conv2d(before, last, 1, bias=False), norm_of(norm, last), nn.Hardswish(inplace=True)]
    head = [nn.Linear(last, hidden), nn.Hardswish(inplace=True), nn.Dropout(0.0), nn.Linear(hidden, classes)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)


def classify(output: Tensor, targets: Tensor) -> Tensor:
    """Objectives [B]: cross-entropy of each image."""
    return F.cross_entropy(output, targets, reduction="none")


def images(name: str, build: Any, size: int, batch_size: int, classes: int, slow: bool = False) -> Architecture:
    """An image classifier with one loss a sample."""
    return Architecture(
        name=name, build=build, inputs=lambda: (torch.randn(batch_size, 3, size, size),), objective=classify,
        targets=lambda: torch.randint(0, classes, (batch_size,)), batch_size=batch_size, slow=slow,
        tol=None if not slow else 1e-3,
    )  # fmt: skip


def evaluated(net: nn.Module) -> nn.Module:
    """Eval mode, with batch statistics away from zero and one."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.get_buffer("running_mean").normal_(0.0, 0.1)
            module.get_buffer("running_var").uniform_(0.5, 1.5)
    return net.eval()


VISION = [
    images("cifar_grouped", lambda: cifar_net(4, 2), 32, 3, 10),
    images("alexnet_reduced", lambda: alexnet((2, 3, 4, 3, 3), 6, 4, 2), 67, 3, 4),
    images("resnet18_instance_norm_reduced", lambda: resnet18((2, 2, 3, 4), 3, "instance"), 64, 2, 3),
    images("squeezenet_reduced", lambda: squeezenet(1, 3), 33, 2, 3),
    images("mobilenet_v2_group_norm_reduced", lambda: mobilenet_v2(MOBILENET_V2_SMALL, 4, 8, 3, "group"), 16, 3, 3),
    images(
        "mobilenet_v2_eval_reduced", lambda: evaluated(mobilenet_v2(MOBILENET_V2_SMALL, 4, 8, 3, "batch")), 16, 3, 3
    ),
    images("mobilenet_v3_group_norm_reduced", lambda: mobilenet_v3(MOBILENET_V3_SMALL, 8, 8, 3, "group"), 32, 3, 3),
    images("cifar_grouped_full", lambda: cifar_net(32, 8), 32, 16, 10, slow=True),
    images("alexnet", lambda: alexnet((64, 192, 384, 256, 256), 4096, 1000, 6), 224, 8, 1000, slow=True),
    images("resnet18_instance_norm", lambda: resnet18((64, 128, 256, 512), 1000, "instance"), 224, 2, 1000, slow=True),
    images("squeezenet", lambda: squeezenet(16, 1000), 224, 2, 1000, slow=True),
    images(
        "mobilenet_v2_eval",
        lambda: evaluated(mobilenet_v2(MOBILENET_V2, 32, 1280, 1000, "batch")),
        224,
        2,
        1000,
        slow=True,
    ),
    images(
        "mobilenet_v3_group_norm", lambda: mobilenet_v3(MOBILENET_V3, 576, 1024, 1000, "group"), 224, 2, 1000, slow=True
    ),
]
