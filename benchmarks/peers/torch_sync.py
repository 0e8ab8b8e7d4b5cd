"""torch's synchronized layer. It refuses input on CPU."""

from torch import nn


def make(channels: int, dimensions: int) -> nn.Module:
    return nn.SyncBatchNorm(channels)
