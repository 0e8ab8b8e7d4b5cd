"""The layer of this package, made as its users make it: by conversion."""

from torch import nn

import bagua_syncbn

from . import local


def make(channels: int, dimensions: int) -> nn.Module:
    return bagua_syncbn.convert_sync_batchnorm(local.make(channels, dimensions))
