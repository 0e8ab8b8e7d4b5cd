"""torch's layer, which does not synchronize: the least that one has to pay."""

from torch import nn

_LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def make(channels: int, dimensions: int) -> nn.Module:
    return _LAYERS[dimensions](channels)
