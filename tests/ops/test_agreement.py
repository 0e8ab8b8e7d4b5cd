"""Native kernels are compared with ATen's before they serve a device; stand-ins for both run on the CPU."""

import logging
from types import SimpleNamespace

import pytest
import torch

from bagua_syncbn import SyncBatchNorm1d
from bagua_syncbn.ops import agreement, fallback, reference
from bagua_syncbn.ops.definition import SCHEMAS
from tests.helpers.aten_functions import ATEN
from tests.helpers.tolerances import DTYPES

CPU = torch.device("cpu")
OPS = list(SCHEMAS)


def fail(*arguments):
    raise RuntimeError("CUDA: expected success, got too many resources requested for launch")


def ops_with(name, change):
    """The native ops, of which ``name`` gives what ``change`` makes of its results."""
    native = {each: getattr(torch.ops.bagua_syncbn, each).default for each in OPS}

    def changed(*arguments):
        results = native[name](*arguments)
        return change(results) if isinstance(results, torch.Tensor) else tuple(map(change, results))

    return SimpleNamespace(**native | {name: changed})


@pytest.fixture
def kernels(monkeypatch):
    """The devices whose kernels were turned off; the CPU stands for the first one."""
    turned_off = []
    library = SimpleNamespace(cuda_support=lambda device: (0, 13000, 13000), turn_off_cuda=turned_off.append)
    monkeypatch.setattr(fallback, "_HAS_NATIVE", True)
    monkeypatch.setattr(fallback, "_turned_off", {})
    monkeypatch.setattr(fallback, "_warned", set())
    monkeypatch.setattr(fallback, "WANTED", "native")
    monkeypatch.setattr(fallback, "import_module", lambda name: library)
    monkeypatch.setattr(agreement, "_checked", set())
    for name, result in (("get_sync_debug_mode", 0), ("get_device_name", "H100")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
    for name, function in ATEN.items():
        monkeypatch.setattr(torch, name, function)
    return turned_off


@pytest.mark.parametrize("implementation", ["here", "emulated"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_kernels_agree_whether_aten_has_some_or_not(ops, kernels, dtype, monkeypatch):
    assert agreement.find_difference(ops, CPU, dtype) is None
    monkeypatch.setattr(torch, "batch_norm_elemt", fail)
    assert agreement.find_difference(ops, CPU, dtype) is None


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", [
    torch.neg,
    lambda result: result * (1.1 if result.is_floating_point() else 2),
    lambda result: result.where(result != result.max(), torch.nan) if result.is_floating_point() else result + 1,
], ids=["sign", "factor", "NaN"])  # fmt: skip
def test_a_wrong_kernel_is_named(kernels, name, dtype, change):
    difference = agreement.find_difference(ops_with(name, change), CPU, dtype)
    assert difference.startswith(f"{name} for {dtype} differs from ATen's by ")


def test_kernels_that_give_zeros_agree_where_aten_gives_zeros(kernels, monkeypatch):
    zeros, tiny = (
        ops_with("batch_norm_elemt", lambda output, value=value: torch.full_like(output, value)) for value in (0, 1e-30)
    )
    monkeypatch.setattr(agreement, "aten", zeros)
    assert agreement.find_difference(zeros, CPU, torch.float32) is None
    assert "differs from ATen's by 1e-30, where values reach 0" in agreement.find_difference(tiny, CPU, torch.float32)


def test_kernels_are_compared_once_for_each_dtype_and_right_ones_stay(kernels, caplog):
    with caplog.at_level(logging.INFO, "bagua_syncbn"):
        for dtype in (torch.float32, torch.float32, torch.float16):
            agreement.check_kernels(torch.ones(2, 3, dtype=dtype))
    assert kernels == []
    for message, dtype in zip(caplog.messages, ("float32", "float16"), strict=True):
        assert message.startswith(f"kernels on cuda:0, compared with ATen's for torch.{dtype}: native, experimental")


@pytest.mark.parametrize(("change", "said"), [
    (torch.neg, "batch_norm_elemt for torch.float32 differs from ATen's by"),
    (fail, "batch_norm_elemt for torch.float32 fails: CUDA: expected success, got too many resources"),
])  # fmt: skip
def test_where_kernels_are_wrong_or_fail_atens_compute_and_say_so(kernels, monkeypatch, caplog, change, said):
    monkeypatch.setattr(torch.ops, "bagua_syncbn", ops_with("batch_norm_elemt", change))
    with caplog.at_level(logging.INFO, "bagua_syncbn"):
        agreement.check_kernels(torch.ones(2, 3))
    assert kernels == [0]
    assert f"ATen, because on H100, {said}" in caplog.text
    with pytest.warns(RuntimeWarning, match=f"ATen's kernels compute on cpu: on H100, {said}"):
        torch.ops.bagua_syncbn_fallback.batch_norm_stats(torch.ones(2, 3))
    agreement.check_kernels(torch.ones(2, 3, dtype=torch.float64))  # ATen's compute: there is nothing to compare
    assert kernels == [0]


def test_nothing_is_compared_while_a_graph_is_captured(kernels, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "bagua_syncbn")
    for capturing in (True, False):
        monkeypatch.setattr(agreement, "is_capturing", lambda capturing=capturing: capturing)
        agreement.check_kernels(torch.ones(2, 3))
        assert len(caplog.messages) == (not capturing)


def test_modes_of_the_caller_change_nothing(kernels):
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert agreement.find_difference(reference, CPU, torch.float32) is None
    generator = torch.get_rng_state()
    SyncBatchNorm1d(3)(torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), generator)
