"""Synchronized-BatchNorm-PyTorch's names, and its numbers: which formula divides, where and when."""

import copy
import pickle

import pytest
import torch
from torch import nn

import bagua_syncbn
from bagua_syncbn import vacancy
from bagua_syncbn.vacancy import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_model,
    patch_replication_callback,
    patch_sync_batchnorm,
    set_sbn_eps_mode,
)
from tests.helpers.replicated import build, check_equal, inputs_of, run

pytestmark = pytest.mark.usefixtures("single_threaded")
CLASSES = [SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d]
TORCHS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]


@pytest.fixture(autouse=True)
def default_mode():
    yield
    set_sbn_eps_mode("clamp")


def in_replicas(model):
    return DataParallelWithCallback(model, ["cpu"] * 2)


@pytest.mark.parametrize("batch_norm", TORCHS)
def test_replicas_in_training_clamp_and_all_else_adds(batch_norm):
    batch = inputs_of(batch_norm, 7)
    model = build(batch_norm, eps=1e-3)
    synchronized = convert_model(copy.deepcopy(model))
    clamped = bagua_syncbn.convert_sync_batchnorm(copy.deepcopy(model))
    for layer in (clamped[0], clamped[1][1][0]):
        layer.eps_mode = "clamp"
    grad_output = torch.randn_like(batch[:, :2])

    in_training = run(in_replicas(synchronized), batch, grad_output)
    check_equal(in_training, run(clamped, batch, grad_output), " in replicas")
    assert not torch.allclose(in_training["output"], run(model, batch, grad_output)["output"])

    model.load_state_dict(synchronized.state_dict())
    for wrap in (lambda model: model, in_replicas):
        synchronized.eval()
        check_equal(run(wrap(synchronized), batch, grad_output), run(model.eval(), batch, grad_output), " in eval")
    check_equal(run(synchronized.train(), batch, grad_output), run(model.train(), batch, grad_output), " alone")


def test_the_mode_is_that_of_all_layers_from_the_next_call_on():
    layer = SynchronizedBatchNorm1d(3, eps=0.5).double()
    replicas = in_replicas(layer)
    batch = torch.randn(6, 3, dtype=torch.float64) / 10
    expected = {mode: bagua_syncbn.SyncBatchNorm1d(3, 0.5, eps_mode=mode).double() for mode in ("plus", "clamp")}
    for mode in ("plus", "clamp", "plus"):
        set_sbn_eps_mode(mode)
        torch.testing.assert_close(replicas(batch), expected[mode](batch))
    with pytest.raises(ValueError, match=r'eps_mode: expected "plus" or "clamp", got \'add\''):
        set_sbn_eps_mode("add")
    torch.testing.assert_close(replicas(batch), expected["plus"](batch))


def test_models_are_wrapped_patched_copied_and_reverted():
    with patch_sync_batchnorm():
        built = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.BatchNorm3d(3))
    assert [type(layer) for layer in built] == CLASSES
    converted = convert_model(nn.DataParallel(nn.Sequential(*(cls(3) for cls in TORCHS))))
    assert isinstance(converted, DataParallelWithCallback)
    assert [type(layer) for layer in pickle.loads(pickle.dumps(converted.module))] == CLASSES
    patched = nn.DataParallel(copy.deepcopy(built))
    patch_replication_callback(patched)
    assert isinstance(patched, DataParallelWithCallback)
    assert [type(layer) for layer in bagua_syncbn.revert_sync_batchnorm(built)] == TORCHS
    assert all(hasattr(vacancy, name) for name in vacancy.__all__)
