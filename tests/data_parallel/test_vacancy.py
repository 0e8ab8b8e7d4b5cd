"""bagua_syncbn.vacancy has the names and the numerics of Synchronized-BatchNorm-PyTorch."""

import copy
import pickle

import pytest
import torch
from torch import nn

import bagua_syncbn
from bagua_syncbn import vacancy
from bagua_syncbn.vacancy import DataParallelWithCallback, convert_model
from tests.helpers.replicated import build, draw_step, parallel, run

pytestmark = pytest.mark.usefixtures("single_threaded")
CLASSES = [vacancy.SynchronizedBatchNorm1d, vacancy.SynchronizedBatchNorm2d, vacancy.SynchronizedBatchNorm3d]
TORCHS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]


def test_only_replicas_in_training_clamp_the_variance():
    model, given = build(eps=1e-3), draw_step(7)
    synchronized = convert_model(copy.deepcopy(model))
    clamped = bagua_syncbn.convert_sync_batchnorm(copy.deepcopy(model))
    clamped[0].eps_mode = clamped[1][1][0].eps_mode = "clamp"
    in_training = run(parallel(synchronized, "cpu", 2), *given)
    torch.testing.assert_close(in_training, run(clamped, *given))
    assert not torch.allclose(in_training["output"], run(model, *given)["output"])
    model.load_state_dict(synchronized.state_dict())
    expected = run(model.eval(), *given)
    for each in (synchronized.eval(), parallel(synchronized, "cpu", 2)):
        torch.testing.assert_close(run(each, *given), expected)
    torch.testing.assert_close(run(synchronized.train(), *given), run(model.train(), *given))


def test_models_are_built_converted_pickled_and_reverted():
    built = nn.Sequential(*(cls(3) for cls in CLASSES))
    converted = convert_model(nn.DataParallel(nn.Sequential(*(cls(3) for cls in TORCHS))))
    assert isinstance(converted, DataParallelWithCallback)
    assert [type(layer) for layer in pickle.loads(pickle.dumps(converted.module))] == CLASSES
    assert [type(layer) for layer in bagua_syncbn.revert_sync_batchnorm(built)] == TORCHS
    assert all(hasattr(vacancy, name) for name in vacancy.__all__)
