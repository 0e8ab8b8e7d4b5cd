"""The layers for replicas of one process, and conversion to them."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
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
from tests.helpers.replicated import PAIRS, parallel
from tests.helpers.user_layers import BatchNormReLU

pytestmark = pytest.mark.usefixtures("single_threaded")


@pytest.mark.parametrize(("cls", "torchs"), PAIRS.items())
def test_layers_have_the_arguments_and_the_state_of_torchs(cls, torchs):
    layer = cls(3, 1e-4, 0.2, True, True)
    assert (layer.num_features, layer.eps, layer.momentum) == (3, 1e-4, 0.2)
    assert layer.affine is layer.track_running_stats is True
    assert isinstance(layer, torchs)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_clamp_in_evaluation_takes_buffers_of_any_dtype(dtype):
    layer = SynchronizedBatchNorm1d(3, eps=1e-3, eps_mode="clamp", dtype=dtype).eval()
    layer.running_var.copy_(torch.tensor([1e-5, 1e-2, 4.0]))
    batch = torch.randn(4, 3)
    expected = batch / layer.running_var.float().clamp(min=1e-3).sqrt()
    torch.testing.assert_close(layer(batch), expected)


def test_convert_model_keeps_objects_and_subclasses():
    layers = [nn.BatchNorm2d(3), BatchNormReLU(3), SynchronizedBatchNorm2d(3, eps_mode="clamp")]
    model = nn.Sequential(*layers)
    assert convert_model(model) is model
    assert list(model) == layers
    assert type(layers[0]) is SynchronizedBatchNorm2d
    assert isinstance(layers[1], BatchNormReLU)
    assert isinstance(layers[1], bagua_syncbn.SyncBatchNorm)
    assert layers[2].eps_mode == "clamp"


def test_patched_names_are_torchs_again_after_an_error():
    torchs, model = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), nn.Sequential()

    def build_and_fail():
        with patch_sync_batchnorm():
            model.extend([nn.BatchNorm1d(2, device="cpu"), nn.BatchNorm3d(2)])
            with patch_sync_batchnorm():
                model.append(nn.BatchNorm2d(2, eps=1e-3))
            raise KeyError

    with pytest.raises(KeyError):
        build_and_fail()
    assert (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) == torchs
    classes = [SynchronizedBatchNorm1d, SynchronizedBatchNorm3d, SynchronizedBatchNorm2d]
    assert [type(layer) for layer in model] == classes


def test_replicas_and_a_job_exclude_each_other():
    layer = SynchronizedBatchNorm1d(3)
    layer.process_group = SimpleNamespace(size=2, rank=0, all_gather=id, all_reduce=id)
    model = parallel(layer, "cpu", 2)
    with pytest.raises(
        RuntimeError, match=r"process_group: expected a group of one .* one of 2 replicas, got .* 2 ranks"
    ):
        model(torch.randn(4, 3))
    layer.process_group = LOCAL
    model(torch.randn(4, 3))
    assert layer.num_batches_tracked == 1


class FixedStatistics(nn.BatchNorm1d):
    """Normalizes with its running statistics, whatever its mode."""

    def forward(self, input):
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
def test_layers_that_evaluate_in_training_work_in_replicas(eps_mode, recomputes):
    plain = nn.Sequential(FixedStatistics(3), nn.BatchNorm1d(3)).double()
    plain[0].running_var.fill_(2.0)
    model = convert_model(copy.deepcopy(plain))
    model[0].eps_mode = eps_mode
    plain[0].eps = plain[0].eps if eps_mode == "plus" else 1e-30  # the variance is above eps
    input, grad_output = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    results = []
    for each in (plain, parallel(bagua_syncbn.recompute_outputs(model, enabled=recomputes), "cpu", 2)):
        leaf = input.clone().requires_grad_()
        output = each(leaf)
        output.backward(grad_output)
        results.append((output, leaf.grad))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
