"""Arguments, state and buffer dtypes of the layer."""

import inspect
import warnings

import pytest
import torch

from bagua_syncbn import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, sync_batch_norm
from tests.helpers.cases import Case, check, run_rank
from tests.helpers.tolerances import DTYPES


def test_signatures_start_with_torchs_arguments():
    parameters = inspect.signature(SyncBatchNorm).parameters
    assert list(parameters) == [
        *("num_features", "eps", "momentum", "affine", "track_running_stats", "process_group", "device", "dtype"),
        *("bias", "eps_mode", "skip_nonfinite", "activation"),
    ]
    assert parameters["bias"].kind is parameters["eps_mode"].kind is inspect.Parameter.KEYWORD_ONLY
    torchs = list(inspect.signature(torch.nn.functional.batch_norm).parameters)
    ours = list(inspect.signature(sync_batch_norm).parameters)
    assert ours[: len(torchs)] == torchs


@pytest.mark.parametrize("arguments", [(), (0.5,), (0.5, None), (0.5, 0.3, False), (0.5, 0.3, True, False)], ids=str)
def test_arguments_have_the_same_meaning_as_in_torch(arguments):
    layer, expected = SyncBatchNorm2d(3, *arguments), torch.nn.BatchNorm2d(3, *arguments)
    assert layer.extra_repr() == expected.extra_repr()
    assert list(layer.state_dict()) == list(expected.state_dict())


def test_a_layer_without_bias_has_no_bias_in_its_state():
    layer = SyncBatchNorm2d(3, bias=False, device="cpu", dtype=torch.float64)
    assert layer.bias is None
    assert layer.weight.dtype == layer.running_mean.dtype == torch.float64
    assert list(layer.state_dict()) == ["weight", "running_mean", "running_var", "num_batches_tracked"]
    layer.reset_parameters()


@pytest.mark.parametrize("buffer_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_evaluation_accepts_buffers_of_any_dtype(dtype, buffer_dtype):
    case = Case((4,), (3, 5), dtype, buffer_dtype, frozen=("weight", "bias"), steps=1, evaluates=True)
    if dtype == buffer_dtype and dtype.itemsize == 2:
        run_rank(case, rank=0)  # torch's kernels, which first fold weight and statistics in half precision
    else:
        check(None, case)


def test_launched_ranks_without_a_process_group_warn(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    layer, input = SyncBatchNorm1d(3), torch.randn(4, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer.eval()(input)
        assert not caught
        for _ in range(2):
            layer.train()(input)
    (warning,) = caught
    assert "WORLD_SIZE is 2, and no process group of several ranks was initialized" in str(warning.message)
