"""Batch normalization of sparse tensors and point clouds, with unlike numbers of points on the ranks."""

import pytest
import torch
import torch.distributed as dist
from fake_packages import (
    MinkowskiBatchNorm,
    PointceptBatchNorm,
    SparsePoints,
    SpconvBatchNorm,
    SpconvSyncBatchNorm,
    TorchSparseBatchNorm,
)
from torch import nn

from bagua_syncbn import conversion_report, convert_sync_batchnorm

CHANNELS = 3


def minkowski_sync(num_features, **options):
    return MinkowskiBatchNorm(num_features, nn.SyncBatchNorm, **options)


LAYERS = [
    *(TorchSparseBatchNorm, SpconvBatchNorm, SpconvSyncBatchNorm),
    *(MinkowskiBatchNorm, minkowski_sync, PointceptBatchNorm),
]


def step(layer, features, grad_output):
    features = features.clone().requires_grad_()
    output = layer(SparsePoints(features=features, places="kept"))
    assert output.places == "kept"
    output.features.backward(grad_output)
    return output.features.detach(), features.grad, list(layer.buffers())


def points():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, 7, CHANNELS, generator=generator, dtype=torch.float64).unbind()


def step_of_rank(make, sizes):
    model = convert_sync_batchnorm(nn.Sequential(make(CHANNELS, dtype=torch.float64)))
    return step(model[0], *(tensor.split(sizes)[dist.get_rank()] for tensor in points()))


@pytest.mark.parametrize("sizes", [(2, 5), (0, 7)], ids=str)
@pytest.mark.parametrize("make", LAYERS)
def test_layers_of_points_are_synchronized(pool, make, sizes):
    output, grad, buffers = step(make(CHANNELS, dtype=torch.float64), *points())
    for rank, results in enumerate(pool.run(step_of_rank, 2, make, sizes)):
        torch.testing.assert_close(results, (output.split(sizes)[rank], grad.split(sizes)[rank], buffers))


@pytest.mark.parametrize("make", LAYERS)
def test_layers_of_points_are_reported_once(make):
    (layer,) = conversion_report(nn.Sequential(make(CHANNELS))).layers
    assert layer.action == "converted"
