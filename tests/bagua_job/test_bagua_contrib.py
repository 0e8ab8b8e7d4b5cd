"""The import that research code has, and what Bagua's own test of its layer asks for."""

import bagua.torch_api.contrib.sync_batchnorm as theirs
import pytest
import torch
import torch.distributed as dist
from tolerances import assert_close
from torch import nn

import bagua_syncbn
import bagua_syncbn.contrib


@pytest.fixture(autouse=True)
def replaced():
    bagua_syncbn.contrib.replace()
    yield
    bagua_syncbn.contrib.replace()


def test_the_import_gives_this_layer_and_can_be_put_back():
    from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm

    assert SyncBatchNorm is bagua_syncbn.SyncBatchNorm
    model = nn.Sequential(nn.BatchNorm2d(3))
    assert SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert type(model[0]) is bagua_syncbn.SyncBatchNorm2d

    bagua_syncbn.contrib.restore()
    from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm

    assert SyncBatchNorm.__module__ == "bagua.torch_api.contrib.sync_batchnorm"
    assert SyncBatchNorm is not bagua_syncbn.SyncBatchNorm
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        SyncBatchNorm(3)(torch.randn(2, 3))


def test_models_with_layers_of_baguas_convert_too():
    bagua_syncbn.contrib.restore()
    model = theirs.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    original = type(model[0])
    bagua_syncbn.contrib.replace()
    bagua_syncbn.convert_sync_batchnorm(model)
    assert isinstance(model[0], bagua_syncbn.SyncBatchNorm)
    input = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(model(input), nn.BatchNorm2d(3)(input))
    assert type(bagua_syncbn.revert_sync_batchnorm(model)[0]) is original


def train_as_baguas_test():
    from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm

    import bagua_syncbn.contrib  # noqa: F401  what comes next is of the user's code

    torch.manual_seed(dist.get_rank())
    input = torch.randn(32, 8, 16, 16).requires_grad_()
    grad_output = torch.randn(32, 8, 16, 16)  # the sum that Bagua's test takes has an input gradient of zero
    layer = SyncBatchNorm(num_features=8)
    output = layer(input)
    output.backward(grad_output)
    results = output.detach(), input.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var
    return input.detach(), grad_output, results


def test_outputs_statistics_and_gradients(pool):
    inputs, grad_outputs, results = zip(*pool.run(train_as_baguas_test, 4), strict=True)
    layer = nn.BatchNorm2d(8, dtype=torch.float64)
    input = torch.cat(inputs).double().requires_grad_()
    output = layer(input)
    output.backward(torch.cat(grad_outputs).double())
    outputs, input_grads, weight_grads, bias_grads, means, variances = zip(*results, strict=True)
    assert_close(torch.cat(outputs), output.detach(), "output")
    assert_close(torch.cat(input_grads), input.grad, "input.grad")
    torch.testing.assert_close(sum(weight_grads).double(), layer.weight.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(sum(bias_grads).double(), layer.bias.grad, rtol=1e-4, atol=1e-3)
    for mean, variance in zip(means, variances, strict=True):
        assert_close(mean, layer.running_mean, "running_mean")
        assert_close(variance, layer.running_var, "running_var")
