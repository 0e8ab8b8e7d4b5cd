"""Arguments, state and buffer dtypes of the layer."""

import inspect
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from bagua_syncbn import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    mean_over_ranks,
    measure_batch_noise,
    merge_statistics,
    recalibrate_statistics,
    sync_batch_norm,
    verify_synchronization,
    with_bagua,
)
from bagua_syncbn._ops.options import Options
from bagua_syncbn.communicators import LOCAL
from tests.helpers.cases import Case, check, run_rank
from tests.helpers.options import OTHER
from tests.helpers.steps import unchanged
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


@pytest.mark.parametrize(("name", "value"), OTHER._asdict().items())
def test_the_text_of_a_layer_shows_every_option_that_is_not_the_default(name, value):
    assert value != Options._field_defaults[name]
    assert f" {name}={value!r}" in repr(SyncBatchNorm(2, **{name: value}))


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


@pytest.mark.parametrize("process_group", [None, 2, "node", 1, LOCAL])
def test_launched_ranks_without_a_process_group_warn(process_group, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    layer, input = SyncBatchNorm1d(3, process_group=process_group), torch.randn(4, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer.eval()(input)
        assert not caught
        for _ in range(2):
            layer.train()(input)
        mean_over_ranks(input, process_group=process_group)
        if process_group is not LOCAL:
            with_bagua(layer, [], process_group=process_group)
    texts = [str(warning.message) for warning in caught]
    if process_group in (1, LOCAL):  # only this process, as asked for
        assert not texts
        return
    for begin, text in zip(("batch normalization is", "mean_over_ranks: the", "with_bagua: the"), texts, strict=True):
        assert text.startswith(f"{begin} ")
        assert "not" in text
        assert "WORLD_SIZE is 2, and no process group of several ranks was initialized; call torch.dist" in text
    assert {warning.filename for warning in caught} == {__file__}


MODEL = nn.Sequential(SyncBatchNorm1d(3))
TOOLS = {
    "verify_synchronization": partial(verify_synchronization, MODEL, torch.eye(4, 3), lambda model, x: model(x).sum()),
    "measure_batch_noise": partial(measure_batch_noise, MODEL, [torch.eye(4, 3)]),
    "recalibrate_statistics": partial(recalibrate_statistics, MODEL, [torch.eye(4, 3)]),
    "merge_statistics": partial(merge_statistics, MODEL),
}


@pytest.mark.filterwarnings("ignore:measure_batch_noise. layers with untrained")
@pytest.mark.parametrize("name", TOOLS)
def test_a_launched_rank_without_a_process_group_does_not_stand_for_all_ranks(name, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for process_group in (None, 2, "node"):
        with unchanged(MODEL), pytest.raises(RuntimeError) as error:
            TOOLS[name](process_group=process_group)
        begin, _, cure = str(error.value).partition(" initialized; ")
        assert begin == f"{name}: WORLD_SIZE is 2, and no process group of several ranks was"
        assert cure.startswith("call torch.distributed.init_process_group()")
        assert cure.endswith("first, or pass process_group=1 to use only this process")
    TOOLS[name](process_group=1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    TOOLS[name]()
