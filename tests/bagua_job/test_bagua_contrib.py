"""Research code with Bagua's imports uses this package's layers and algorithms."""

import bagua.torch_api.contrib.sync_batchnorm as theirs
import pytest
import torch
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.distributed import BaguaModule
from torch import nn

import bagua_syncbn
import bagua_syncbn.contrib
from bagua_syncbn.bagua.engine import resolve_algorithm
from bagua_syncbn.contrib.algorithms import gradient_allreduce


def test_models_with_baguas_layers_convert():
    (original,) = (
        kind for kind in nn.modules.batchnorm._BatchNorm.__subclasses__() if kind.__module__ == theirs.__name__
    )
    assert theirs.SyncBatchNorm is bagua_syncbn.SyncBatchNorm
    model = nn.Sequential(original(3))
    assert theirs.SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert isinstance(model[0], bagua_syncbn.SyncBatchNorm)
    input = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(model(input), nn.BatchNorm2d(3)(input))
    assert type(bagua_syncbn.revert_sync_batchnorm(model)[0]) is original


def test_contrib_keeps_the_method_and_algorithms_of_bagua():
    assert gradient_allreduce.GradientAllReduceAlgorithm is GradientAllReduceAlgorithm
    assert isinstance(resolve_algorithm(ByteGradAlgorithm), ByteGradAlgorithm)
    assert nn.Module.with_bagua is BaguaModule.with_bagua


def test_baguas_algorithms_are_recognized_in_a_torch_job():
    model = nn.Linear(2, 2)
    for algorithm in (GradientAllReduceAlgorithm, GradientAllReduceAlgorithm(), GradientAllReduceAlgorithm(True)):
        assert bagua_syncbn.with_bagua(model, [], algorithm) is model
    for algorithm in (ByteGradAlgorithm(), GradientAllReduceAlgorithm(average=False)):
        with pytest.raises(ValueError, match=f"with average=True, got {type(algorithm).__name__}"):
            bagua_syncbn.with_bagua(model, [], algorithm)
