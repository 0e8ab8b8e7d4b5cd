"""Batch normalization of sparse tensors and point clouds, with unlike numbers of points on the ranks."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_syncbn import convert_sync_batchnorm

CHANNELS = 3


class Points(SimpleNamespace):
    """Stands for the sparse tensors of all packages: the features of points, (points, C), beside where they are."""

    def with_features(self, features):
        return Points(features=features, places=self.places)


# Layers as the sources of torchsparse, spconv, MinkowskiEngine and Pointcept have them.


class TorchSparse(nn.BatchNorm1d):
    """The forward of torch's layer is handed to a function of the package."""

    def forward(self, input):
        return self._apply_to_features(input, super().forward)

    @staticmethod
    def _apply_to_features(input, function):
        return input.with_features(function(input.features))


class SpconvSync(nn.SyncBatchNorm):
    def forward(self, input):
        return input.with_features(super().forward(input.features))


class MinkowskiSync(nn.Module):
    def __init__(self, num_features, kind=nn.SyncBatchNorm, **options):
        super().__init__()
        self.bn = kind(num_features, **options)

    def forward(self, input):
        return input.with_features(self.bn(input.features))


class Pointcept(nn.Module):
    """Points, (points, C), or (points, neighbours, C)."""

    def __init__(self, num_features, **options):
        super().__init__()
        self.norm = nn.BatchNorm1d(num_features, **options)

    def forward(self, input):
        features = input.features
        by_neighbours = self.norm(torch.stack([features, 2 * features], 1).transpose(1, 2)).transpose(1, 2)
        return input.with_features(self.norm(features) + by_neighbours.sum(1))


def step(layer, features, grad_output):
    features = features.clone().requires_grad_()
    output = layer(Points(features=features, places="kept"))
    assert output.places == "kept"
    output.features.backward(grad_output)
    return output.features.detach(), features.grad


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cls", [TorchSparse, SpconvSync, MinkowskiSync, Pointcept])
def test_layers_of_points_are_synchronized(cls):
    kinds = {SpconvSync: TorchSparse, MinkowskiSync: partial(MinkowskiSync, kind=nn.BatchNorm1d)}
    alone = kinds.get(cls, cls)(CHANNELS, dtype=torch.float64)
    model = convert_sync_batchnorm(nn.Sequential(cls(CHANNELS, dtype=torch.float64)))
    for sizes in ((2, 5), (0, 7)):
        tensors = torch.randn(2, 7, CHANNELS, generator=torch.Generator().manual_seed(5), dtype=torch.float64).unbind()
        own = [tensor.split(sizes)[dist.get_rank()] for tensor in tensors]
        expected = [tensor.split(sizes)[dist.get_rank()] for tensor in step(alone, *tensors)]
        torch.testing.assert_close(step(model, *own), tuple(expected))
        torch.testing.assert_close(list(model.buffers()), list(alone.buffers()))
