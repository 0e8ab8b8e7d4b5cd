"""The layers for replicas of one process, and conversion to them."""

import pytest
import torch
from torch import nn

import bagua_syncbn
from bagua_syncbn.communicators import LOCAL
from bagua_syncbn.data_parallel import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_model,
    patch_sync_batchnorm,
)
from tests.helpers.formula import Clamped
from tests.helpers.replicated import PAIRS, parallel
from tests.helpers.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("single_threaded")


@pytest.mark.parametrize(("cls", "torchs"), PAIRS.items())
def test_layers_have_the_arguments_and_the_state_of_torchs(cls, torchs):
    layer = cls(3, 1e-4, 0.2, True, True)
    assert (layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats) == (
        *(3, 1e-4, 0.2),
        *(True, True),
    )
    assert isinstance(layer, torchs)
    assert isinstance(layer, bagua_syncbn.SyncBatchNorm)
    reference = torchs(3)
    nn.init.normal_(reference.weight)
    layer.load_state_dict(reference.state_dict())
    torchs(3).load_state_dict(layer.state_dict())
    assert torch.equal(layer.weight, reference.weight)
    assert cls(3, device="cpu", dtype=torch.float64, bias=False).weight.dtype == torch.float64
    assert cls(3, bias=False).bias is None
    assert type(bagua_syncbn.revert_sync_batchnorm(nn.Sequential(layer))[0]) is torchs
    assert "eps_mode" not in repr(layer)
    assert "eps_mode='clamp'" in repr(cls(3, eps_mode="clamp"))
    with pytest.raises(ValueError, match="expected"):
        layer(torch.randn(2, 3, 1, 1, 1, 1))


def test_eps_mode_is_checked():
    with pytest.raises(ValueError, match=r'eps_mode: expected "plus" or "clamp", got \'clmap\''):
        SynchronizedBatchNorm1d(3, eps_mode="clmap")
    layer = bagua_syncbn.SyncBatchNorm1d(3, eps_mode="clamp")
    assert layer.eps_mode == "clamp"
    layer.eps_mode = "max"
    with pytest.raises(ValueError, match="got 'max'"):
        layer(torch.randn(4, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_clamp_in_evaluation_takes_buffers_of_any_dtype(dtype):
    layer = SynchronizedBatchNorm1d(3, eps=1e-3, eps_mode="clamp", dtype=dtype).eval()
    layer.running_var.copy_(torch.tensor([1e-5, 1e-2, 4.0]))
    batch = torch.randn(4, 3)
    expected = batch / layer.running_var.float().clamp(min=1e-3).sqrt()
    torch.testing.assert_close(layer(batch), expected)


class Doubling(nn.BatchNorm1d):
    def forward(self, input):
        return 2 * super().forward(input)


def test_convert_model_keeps_objects_and_subclasses():
    layers = [nn.BatchNorm1d(3), Doubling(3), SynchronizedBatchNorm1d(3, eps_mode="clamp")]
    model = nn.Sequential(*layers).double()
    expected = nn.Sequential(nn.BatchNorm1d(3), Doubling(3), Clamped(nn.BatchNorm1d(3))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert convert_model(model) is model
    assert list(model) == layers
    assert type(layers[0]) is SynchronizedBatchNorm1d
    assert isinstance(layers[1], Doubling)
    assert layers[2].eps_mode == "clamp"
    batch = torch.randn(5, 3, dtype=torch.float64)
    output = parallel(model, "cpu", 2)(batch)
    assert_close(output, expected(batch), "output")
    output.sin().sum().backward()
    assert all(parameter.grad is not None for parameter in optimizer.param_groups[0]["params"])


def test_patched_names_are_torchs_again_after_an_error():
    torchs = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d

    def fail():
        with patch_sync_batchnorm():
            raise KeyError

    with patch_sync_batchnorm():
        model = nn.Sequential(nn.BatchNorm1d(2, device="cpu"), nn.BatchNorm3d(2))
        assert isinstance(model[0], nn.BatchNorm1d)
        with patch_sync_batchnorm():
            nested = nn.BatchNorm2d(2, eps=1e-3)
    assert (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) == torchs
    assert [type(layer) for layer in model] == [SynchronizedBatchNorm1d, SynchronizedBatchNorm3d]
    assert type(nested) is SynchronizedBatchNorm2d
    with pytest.raises(KeyError):
        fail()
    assert (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) == torchs


class TwoRanks:
    size, rank = 2, 0

    def all_gather(self, packed):
        raise AssertionError

    all_reduce = all_gather


def test_replicas_and_a_job_exclude_each_other():
    layer = SynchronizedBatchNorm1d(3)
    layer.process_group = TwoRanks()
    model = parallel(layer, "cpu", 2)
    with pytest.raises(
        RuntimeError, match=r"process_group: expected a group of one .* one of 2 replicas, got .* 2 ranks"
    ):
        model(torch.randn(4, 3))
    layer.process_group = LOCAL
    model(torch.randn(4, 3))
    assert layer.num_batches_tracked == 1
