"""The layer in one process: torch's batch norm, to the bit where it is the same computation."""

import inspect
import warnings
from operator import attrgetter

import pytest
import torch
from torch import nn

import bagua_syncbn
from bagua_syncbn import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d, sync_batch_norm
from bagua_syncbn.functional import _warn_if_launched_with_others
from tests.helpers.tolerances import assert_close

pytestmark = pytest.mark.reference_too

PAIRS = [
    (SyncBatchNorm1d, nn.BatchNorm1d, (4, 3)),
    (SyncBatchNorm1d, nn.BatchNorm1d, (4, 3, 5)),
    (SyncBatchNorm2d, nn.BatchNorm2d, (4, 3, 5, 2)),
    (SyncBatchNorm3d, nn.BatchNorm3d, (4, 3, 2, 2, 3)),
]


@pytest.mark.parametrize(("ours", "torchs", "shape"), PAIRS)
@pytest.mark.parametrize(
    "options", [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.5}], ids=str
)
def test_equals_torch_without_a_job(ours, torchs, shape, options):
    layer, expected = ours(3, **options), torchs(3, **options)
    for training in (True, True, False):
        input = torch.randn(shape)
        torch.testing.assert_close(layer.train(training)(input), expected.train(training)(input))
    assert layer.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], value)


def test_the_signature_begins_with_torchs():
    parameters = inspect.signature(SyncBatchNorm).parameters
    assert list(parameters) == [
        *("num_features", "eps", "momentum", "affine", "track_running_stats", "process_group", "device", "dtype"),
        *("bias", "eps_mode", "skip_nonfinite", "activation"),
    ]
    assert parameters["bias"].kind is parameters["eps_mode"].kind is inspect.Parameter.KEYWORD_ONLY
    torchs = list(inspect.signature(torch.nn.functional.batch_norm).parameters)
    ours = list(inspect.signature(sync_batch_norm).parameters)
    assert ours[: len(torchs)] == torchs


@pytest.mark.parametrize("name", [*bagua_syncbn.__all__, "SyncBatchNorm.forward"])
def test_signatures_show_the_arguments(name):
    public = attrgetter(name)(bagua_syncbn)
    if callable(public):
        kinds = {parameter.kind for parameter in inspect.signature(public).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def test_a_layer_without_bias_has_none_in_its_state():
    layer = SyncBatchNorm2d(3, bias=False, device="cpu", dtype=torch.float64)
    assert layer.bias is None
    assert layer.weight.dtype == layer.running_mean.dtype == torch.float64
    assert list(layer.state_dict()) == ["weight", "running_mean", "running_var", "num_batches_tracked"]
    layer.reset_parameters()


@pytest.mark.parametrize("buffer_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_eval_takes_buffers_of_any_dtype(dtype, buffer_dtype):
    layer = SyncBatchNorm(3, dtype=buffer_dtype).eval()
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    nn.init.normal_(layer.weight)
    input = torch.randn(4, 3, 5).to(dtype)
    reference = SyncBatchNorm(3, dtype=torch.float64).eval()
    reference.load_state_dict(layer.state_dict())
    output = layer(input)
    assert output.dtype == dtype
    # torch's half kernels fold weight and statistics into a scale and a shift of half precision first.
    native_half = dtype in (torch.float16, torch.bfloat16) and buffer_dtype == dtype
    if native_half:
        torch.testing.assert_close(output.double(), reference(input.double()), rtol=2e-2, atol=2e-2)
    else:
        assert_close(output, reference(input.double()), "output")


def test_ranks_that_were_launched_together_and_not_joined_are_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    _warn_if_launched_with_others.cache_clear()
    layer, input = SyncBatchNorm1d(3), torch.randn(4, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer.eval()(input)
        assert not caught
        for _ in range(2):
            layer.train()(input)
    (warning,) = caught
    assert "WORLD_SIZE is 2, and no process group of several ranks was initialized" in str(warning.message)


def test_repr_names_the_group():
    from bagua_syncbn.communicators import RankGroup

    assert "process_group" not in repr(SyncBatchNorm(3))
    assert repr(SyncBatchNorm2d(3, process_group=RankGroup((0, 1)))).endswith("process_group=RankGroup(ranks=(0, 1)))")
