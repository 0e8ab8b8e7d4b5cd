"""Networks for memory measurements: chains of a few layers, and known topologies."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

CHANNELS = 16


class InvertedResidual(nn.Module):
    """The block of EfficientNet."""

    def __init__(self, channels: int, wide: int, out: int, kernel: int, stride: int) -> None:
        super().__init__()
        squeezed = channels // 4
        self.expand = _unit(channels, wide, 1) if wide != channels else nn.Identity()
        self.spread = _unit(wide, wide, kernel, stride, groups=wide)
        layers = nn.Conv2d(wide, squeezed, 1), nn.SiLU(), nn.Conv2d(squeezed, wide, 1), nn.Sigmoid()
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), *layers)
        self.project = _unit(wide, out, 1)[:2]
        self.is_added = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = self.spread(self.expand(x))
        output: Tensor = self.project(y * self.scale(y))
        return output + x if self.is_added else output


def _unit(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.SiLU())


def _head(channels: int, classes: int = 1000) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)


def _chain(activation: Callable[[], nn.Module]) -> nn.Module:
    layers = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), activation()
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(4) for layer in layers), *_head(CHANNELS, 10))


# Expansion, output channels, blocks, kernel size, stride of the first block.
_EFFICIENTNET_B0 = [
    *[(1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2)],
    *[(6, 112, 3, 5, 1), (6, 192, 4, 5, 2), (6, 320, 1, 3, 1)],
]


def _efficientnet_b0() -> nn.Module:
    layers: list[nn.Module] = [_unit(3, 32, 3, 2)]
    channels = 32
    for factor, out, blocks, kernel, stride in _EFFICIENTNET_B0:
        for block in range(blocks):
            layers.append(InvertedResidual(channels, factor * channels, out, kernel, stride if block == 0 else 1))
            channels = out
    return nn.Sequential(*layers, _unit(channels, 1280, 1), *_head(1280))


def _monai(name: str, **options: Any) -> nn.Module:
    from monai.networks import nets

    network: nn.Module = getattr(nets, name)(**options)
    return network


class Network(NamedTuple):
    make: Callable[[], nn.Module]
    sample: tuple[int, ...] = (3, 224, 224)
    batch: int = 4
    needs: str = "torch"  # required package

    def shape(self, most: int | None = None) -> tuple[int, ...]:
        """Returns the shape of a batch of images with at most ``most`` pixels per side."""
        channels, *sides = self.sample
        return self.batch, channels, *(min(most or side, side) for side in sides)


_RESNET = {"spatial_dims": 2, "n_input_channels": 3, "num_classes": 1000, "conv1_t_stride": 2}
_BASIC_UNET = {"spatial_dims": 3, "norm": "batch", "in_channels": 1, "out_channels": 2}
_SEGRESNET = {"spatial_dims": 3, "norm": "batch", "in_channels": 4, "out_channels": 3, "init_filters": 16}
NETWORKS = {
    "convolution, norm, ReLU": Network(partial(_chain, nn.ReLU), (CHANNELS, 48, 48)),
    "convolution, norm, SiLU": Network(partial(_chain, nn.SiLU), (CHANNELS, 48, 48)),
    "ResNet-50": Network(partial(_monai, "resnet50", **_RESNET), needs="monai"),
    "EfficientNet-B0": Network(_efficientnet_b0),
    "MONAI's BasicUNet": Network(partial(_monai, "BasicUNet", **_BASIC_UNET), (1, 48, 48, 48), 1, "monai"),
    "MONAI's SegResNet": Network(partial(_monai, "SegResNet", **_SEGRESNET), (4, 48, 48, 48), 1, "monai"),
}
# Fast enough for tests.
QUICK = ("convolution, norm, ReLU", "convolution, norm, SiLU")
