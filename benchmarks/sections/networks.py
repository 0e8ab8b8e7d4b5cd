"""Networks for memory measurements: chains of a few layers, and known topologies."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

CHANNELS = 16


def _chain(activation: Callable[[], nn.Module]) -> nn.Module:
    layers = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), activation()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10)
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(4) for layer in layers), *head)


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
    "MONAI's BasicUNet": Network(partial(_monai, "BasicUNet", **_BASIC_UNET), (1, 48, 48, 48), 1, "monai"),
    "MONAI's SegResNet": Network(partial(_monai, "SegResNet", **_SEGRESNET), (4, 48, 48, 48), 1, "monai"),
}
# Fast enough for tests.
QUICK = ("convolution, norm, ReLU", "convolution, norm, SiLU")
