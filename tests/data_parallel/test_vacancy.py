"""bagua_syncbn.vacancy has the names and the numerics of Synchronized-BatchNorm-PyTorch."""

import copy
import pickle

import pytest
import torch
from torch import nn

import bagua_syncbn
from bagua_syncbn import vacancy
from bagua_syncbn.vacancy import DataParallelWithCallback, convert_model, patch_sync_batchnorm, set_sbn_eps_mode
from tests.helpers.replicated import build, check_equal, inputs_of, parallel, run
from tests.helpers.steps import draw

pytestmark = pytest.mark.usefixtures("single_threaded")
CLASSES = [vacancy.SynchronizedBatchNorm1d, vacancy.SynchronizedBatchNorm2d, vacancy.SynchronizedBatchNorm3d]
TORCHS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]


@pytest.fixture(autouse=True)
def default_mode():
    yield
    set_sbn_eps_mode("clamp")


@pytest.mark.parametrize("batch_norm", TORCHS)
def test_only_training_replicas_clamp(batch_norm):
    batch = inputs_of(batch_norm, 7)
    model = build(batch_norm, eps=1e-3)
    synchronized = convert_model(copy.deepcopy(model))
    clamped = bagua_syncbn.convert_sync_batchnorm(copy.deepcopy(model))
    for layer in (clamped[0], clamped[1][1][0]):
        layer.eps_mode = "clamp"
    grad_output = torch.randn_like(batch[:, :2])

    in_training = run(parallel(synchronized, "cpu", 2), batch, grad_output)
    check_equal(in_training, run(clamped, batch, grad_output), " in replicas")
    assert not torch.allclose(in_training["output"], run(model, batch, grad_output)["output"])

    model.load_state_dict(synchronized.state_dict())
    expected = run(model.eval(), batch, grad_output)
    for each in (synchronized.eval(), parallel(synchronized, "cpu", 2)):
        check_equal(run(each, batch, grad_output), expected, " in evaluation")
    check_equal(run(synchronized.train(), batch, grad_output), run(model.train(), batch, grad_output), " alone")


def test_a_new_mode_applies_to_all_layers_from_the_next_call():
    layer, batch = vacancy.SynchronizedBatchNorm1d(3, eps=0.5).double(), draw(6, 3) / 10
    replicas = parallel(layer, "cpu", 2)
    expected = {mode: bagua_syncbn.SyncBatchNorm1d(3, 0.5, eps_mode=mode).double() for mode in ("plus", "clamp")}
    for mode in ("plus", "clamp", "plus"):
        set_sbn_eps_mode(mode)
        torch.testing.assert_close(replicas(batch), expected[mode](batch))
    with pytest.raises(ValueError, match=r'eps_mode: expected "plus" or "clamp", got \'add\''):
        set_sbn_eps_mode("add")
    torch.testing.assert_close(replicas(batch), expected["plus"](batch))


def test_models_are_built_converted_pickled_and_reverted():
    with patch_sync_batchnorm():
        built = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.BatchNorm3d(3))
    assert [type(layer) for layer in built] == CLASSES
    converted = convert_model(nn.DataParallel(nn.Sequential(*(cls(3) for cls in TORCHS))))
    assert isinstance(converted, DataParallelWithCallback)
    assert [type(layer) for layer in pickle.loads(pickle.dumps(converted.module))] == CLASSES
    assert [type(layer) for layer in bagua_syncbn.revert_sync_batchnorm(built)] == TORCHS
    assert all(hasattr(vacancy, name) for name in vacancy.__all__)
