"""The ops on ATen's CUDA kernels, which CPU functions (aten_functions.py) simulate."""

import copy
from types import SimpleNamespace

import pytest
import torch

from bagua_syncbn._cuda import aten, selection
from bagua_syncbn._ops import native, reference
from tests.helpers.aten_functions import ATEN
from tests.helpers.comparison import OpCase, check
from tests.helpers.op_calls import op_calls, op_of


def test_four_ops_use_atens_kernels(called):
    check(aten, OpCase((2, 3, 5, 6)), torch.float32)
    assert {*called} == {*ATEN}


def test_statistics_that_overflow_stay_in_their_channel(called):
    input = torch.randn(2, 3, 8, 8)
    input[0, 1, 0, 0] = 1e30  # finite values with an infinite variance
    assert torch.equal(aten.batch_norm_stats(input)[3:6].isfinite(), torch.tensor([True, False, True]))
    assert called == ["batch_norm_update_stats"]
    assert not aten.batch_norm_stats(input.requires_grad_()).requires_grad


def test_the_reference_computes_what_aten_cannot(called):
    calls, empty = op_calls(), op_calls((0, 3, 5))
    elemt, reduce = calls["batch_norm_elemt"], calls["batch_norm_backward_reduce"]
    for name, arguments in (
        *((name, arguments) for name, arguments in calls.items() if name.endswith((" act", " mask", " average"))),
        *((name, arguments) for name, arguments in empty.items() if not name.endswith(" in place")),
        ("batch_norm_elemt", elemt | {"residual": elemt["input"]}),
        ("batch_norm_elemt", elemt | {"residual": None, "activation": 1, "parameter": 0.0}),
        ("batch_norm_backward_reduce", reduce | {"grad_output": reduce["grad_output"].double()}),
    ):
        results = [op_of(ops, name)(*copy.deepcopy(arguments).values()) for ops in (aten, reference)]
        torch.testing.assert_close(*results, rtol=0, atol=0)
    assert called == []


def test_aten_computes_fewer_than_2_to_the_31_values(called, monkeypatch):
    """ATen's kernels index in 32 bits."""
    monkeypatch.setattr(aten, "reference", SimpleNamespace(batch_norm_stats=lambda *_: "reference"))
    assert aten.batch_norm_stats(torch.ones(1, 1).expand(2**31, 1)) == "reference"
    assert called == []


def test_no_kernel_reads_beyond_tensors_of_the_wrong_size(called):
    input, ones, count = torch.randn(2, 3, 4), torch.ones(3), torch.tensor(8)
    for few in (ones[1:], torch.ones(3, 2)):
        with pytest.raises(RuntimeError):
            aten.batch_norm_elemt(input, few, None, ones, ones)
        with pytest.raises(RuntimeError):
            aten.batch_norm_backward_reduce(input, input, few, ones, None)
        with pytest.raises(RuntimeError):
            aten.batch_norm_backward_elemt(input, input, None, few, ones, ones.repeat(2), count)
    assert called == []


@pytest.mark.skipif(selection.HAS_NATIVE or native.WANTED != "native", reason="needs a library without CUDA kernels")
@pytest.mark.parametrize("can_be_native", [True, False])
def test_the_first_cuda_call_without_cuda_kernels_says_what_to_install(called, monkeypatch, recwarn, can_be_native):
    monkeypatch.setattr(selection, "_checked", set())
    monkeypatch.setattr(selection._State, "warns", can_be_native)
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for dtype in (torch.float32, torch.float64):
        input = torch.randn(2, 3, 4, dtype=dtype)
        assert selection.check_kernels(input)
        torch.ops.bagua_syncbn.batch_norm_stats.default.redispatch(cuda, input)
    assert called == 2 * ["batch_norm_update_stats"]
    messages = [str(each.message) for each in recwarn]
    assert len(messages) == can_be_native
    assert all("no CUDA kernels. Build them with nvcc 12.4 or later: BAGUA_SYNCBN_BUILD=cuda" in m for m in messages)
