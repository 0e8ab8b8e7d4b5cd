"""Networks whose memory is measured: chains of a few layers, and topologies that are known."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CHANNELS = 16


class Bottleneck(nn.Module):
    """The block of ResNet-50: the sum at its end is stored in any case."""

    def __init__(self, channels: int, narrow: int, stride: int = 1) -> None:
        super().__init__()
        wide = 4 * narrow
        self.conv1, self.bn1 = nn.Conv2d(channels, narrow, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv2, self.bn2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv3, self.bn3 = nn.Conv2d(narrow, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if channels != wide:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        output: Tensor = self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))
        return output


class InvertedResidual(nn.Module):
    """The block of MobileNetV3 and EfficientNet; ``squeezed`` of 0 for none."""

    def __init__(
        self, channels: int, wide: int, out: int, kernel: int, stride: int, squeezed: int, *kinds: type[nn.Module]
    ) -> None:
        super().__init__()
        activation, of_squeezed, gate = kinds
        self.expand = _unit(channels, wide, 1, 1, activation) if wide != channels else nn.Identity()
        self.spread = _unit(wide, wide, kernel, stride, activation, groups=wide)
        self.scale: nn.Module | None = None
        if squeezed:
            layers = nn.Conv2d(wide, squeezed, 1), of_squeezed(), nn.Conv2d(squeezed, wide, 1), gate()
            self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), *layers)
        self.project = _unit(wide, out, 1)
        self.is_added = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = self.spread(self.expand(x))
        if self.scale is not None:
            y = y * self.scale(y)
        output: Tensor = self.project(y)
        return output + x if self.is_added else output


class CrossStage(nn.Module):
    """The block of CSP detectors: half of the channels pass residual blocks."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        half = channels // 2
        self.through, self.around = _unit(channels, half, 1, 1, nn.SiLU), _unit(channels, half, 1, 1, nn.SiLU)
        self.blocks = nn.ModuleList(
            nn.Sequential(_unit(half, half, 1, 1, nn.SiLU), _unit(half, half, 3, 1, nn.SiLU)) for _ in range(blocks)
        )
        self.join = _unit(channels, channels, 1, 1, nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        y = self.through(x)
        for block in self.blocks:
            y = y + block(y)
        output: Tensor = self.join(torch.cat([y, self.around(x)], 1))
        return output


def _unit(
    channels: int, out: int, kernel: int, stride: int = 1, activation: type[nn.Module] | None = None, groups: int = 1
) -> nn.Sequential:
    layers = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(out)
    return nn.Sequential(*layers, *([] if activation is None else [activation()]))


def _head(channels: int, classes: int = 1000) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)


def _chain(activation: Callable[[], nn.Module]) -> nn.Module:
    layers = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), activation()
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(4) for layer in layers), *_head(CHANNELS, 10))


def _resnet50() -> nn.Module:
    layers: list[nn.Module] = [_unit(3, 64, 7, 2, nn.ReLU), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, 64 << stage, 2 if stage > 0 and block == 0 else 1))
            channels = 256 << stage
    return nn.Sequential(*layers, *_head(channels))


# Widened channels, channels out, size of the kernel, stride, and whether it squeezes.
_MOBILENET_V3 = [
    *[(16, 16, 3, 1, False), (64, 24, 3, 2, False), (72, 24, 3, 1, False)],
    *[(72, 40, 5, 2, True), (120, 40, 5, 1, True), (120, 40, 5, 1, True)],
    *[(240, 80, 3, 2, False), (200, 80, 3, 1, False), (184, 80, 3, 1, False), (184, 80, 3, 1, False)],
    *[(480, 112, 3, 1, True), (672, 112, 3, 1, True)],
    *[(672, 160, 5, 2, True), (960, 160, 5, 1, True), (960, 160, 5, 1, True)],
]


def _mobilenet_v3() -> nn.Module:
    layers: list[nn.Module] = [_unit(3, 16, 3, 2, nn.Hardswish)]
    channels = 16
    for wide, out, kernel, stride, squeezes in _MOBILENET_V3:
        kinds = nn.ReLU if len(layers) <= 6 else nn.Hardswish, nn.ReLU, nn.Hardsigmoid
        layers.append(InvertedResidual(channels, wide, out, kernel, stride, squeezes * wide // 4, *kinds))
        channels = out
    return nn.Sequential(*layers, _unit(channels, 960, 1, 1, nn.Hardswish), *_head(960))


# Factor of the channels, channels out, blocks, size of the kernel, and stride of the first.
_EFFICIENTNET_B0 = [
    *[(1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2)],
    *[(6, 112, 3, 5, 1), (6, 192, 4, 5, 2), (6, 320, 1, 3, 1)],
]


def _efficientnet_b0() -> nn.Module:
    layers: list[nn.Module] = [_unit(3, 32, 3, 2, nn.SiLU)]
    channels = 32
    for factor, out, blocks, kernel, stride in _EFFICIENTNET_B0:
        for block in range(blocks):
            shape = channels, factor * channels, out, kernel, stride if block == 0 else 1, channels // 4
            layers.append(InvertedResidual(*shape, nn.SiLU, nn.SiLU, nn.Sigmoid))
            channels = out
    return nn.Sequential(*layers, _unit(channels, 1280, 1, 1, nn.SiLU), *_head(1280))


def _cross_stages() -> nn.Module:
    layers: list[nn.Module] = [_unit(3, 32, 3, 2, nn.SiLU)]
    for stage, blocks in enumerate((1, 2, 3, 1)):
        layers += [_unit(32 << stage, 64 << stage, 3, 2, nn.SiLU), CrossStage(64 << stage, blocks)]
    return nn.Sequential(*layers, *_head(512))


def _monai(name: str, **options: Any) -> nn.Module:
    from monai.networks import nets

    network: nn.Module = getattr(nets, name)(spatial_dims=3, norm="batch", **options)
    return network


class Network(NamedTuple):
    make: Callable[[], nn.Module]
    sample: tuple[int, ...] = (3, 224, 224)
    batch: int = 4
    needs: str | None = None  # a package

    def shape(self, most: int | None = None) -> tuple[int, ...]:
        """Returns the shape of a batch, of images of at most ``most`` pixels a side."""
        channels, *sides = self.sample
        return self.batch, channels, *(min(most or side, side) for side in sides)


IN_CHAINS = (CHANNELS, 48, 48)
NETWORKS = {
    "convolution, norm, ReLU": Network(partial(_chain, nn.ReLU), IN_CHAINS),
    "convolution, norm, SiLU": Network(partial(_chain, nn.SiLU), IN_CHAINS),
    "ResNet-50": Network(_resnet50),
    "MobileNetV3-Large": Network(_mobilenet_v3),
    "EfficientNet-B0": Network(_efficientnet_b0),
    "CSP blocks with SiLU": Network(_cross_stages),
    "MONAI's BasicUNet": Network(
        partial(_monai, "BasicUNet", in_channels=1, out_channels=2), (1, 48, 48, 48), 1, "monai"
    ),
    "MONAI's SegResNet": Network(
        partial(_monai, "SegResNet", in_channels=4, out_channels=3, init_filters=16), (4, 48, 48, 48), 1, "monai"
    ),
}
# In a quick run: what a test can afford.
QUICK = ("convolution, norm, ReLU", "convolution, norm, SiLU")
TIMED = (*QUICK, "ResNet-50")
