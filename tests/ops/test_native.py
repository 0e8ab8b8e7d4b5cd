"""Rounding, reproducibility and memory of the CPU kernels. test_values.py compares values."""

import copy
import os

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import bagua_syncbn
from bagua_syncbn import _ops as ops
from bagua_syncbn._ops.activations import activation_of
from tests.helpers.cases import laid_out
from tests.helpers.comparison import check_last_of_many
from tests.helpers.op_calls import op_calls, op_of
from tests.helpers.workers import run_fresh

pytestmark = pytest.mark.skipif(
    os.environ.get("BAGUA_SYNCBN_KERNELS") == "reference", reason="BAGUA_SYNCBN_KERNELS=reference asks for plain torch"
)


def test_the_native_kernels_are_loaded():
    from bagua_syncbn import _C

    assert ops.KERNELS.startswith("native, cpu: ")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):  # `make sanitize` tests its own build
        assert "sanitize" in _C.__file__


@pytest.mark.parametrize("name", ["sigmoid", "silu", "tanh", "elu", "mish"])
def test_activations_are_within_two_units_in_the_last_place(name):
    z, zeros, ones, act = torch.linspace(-9, 9, 4000), torch.zeros(1), torch.ones(1), activation_of(name)
    actual = ops.batch_norm_elemt(z.view(1, 1, -1), None, None, zeros, ones, None, act.code, act.parameter)
    torch.testing.assert_close(actual.double().flatten(), act.of(z.double()), rtol=2**-22, atol=2**-32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_outputs_are_rounded_as_in_torch(dtype):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 1, -1)
    zero = torch.zeros(1)
    for scale, shift in ((1, 0), (1 / 3, 0), (1, 2**-8), (1, 2**-11)):  # the last two: ties
        invstd, bias = torch.tensor([scale, shift], dtype=torch.float32).split(1)
        output = ops.batch_norm_elemt(values, None, bias, zero, invstd)
        expected = (values.float() * invstd + bias).to(dtype)
        torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # all mantissa bits set
    assert ops.batch_norm_elemt(torch.ones(40, 2, dtype=dtype), None, None, zero.expand(2), nan).isnan().all()


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 70001), (70, 5, 777), (2, 300, 40), (20000, 37), (3, 65, 1)], ids=str)
def test_results_are_bitwise_equal_for_any_number_of_threads(shape, dtype):
    calls, before, results = op_calls(shape, dtype), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            given = copy.deepcopy(calls)
            results.append([(op_of(ops, name)(**arguments), arguments) for name, arguments in given.items()])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("channels", [64, 65])  # 65: rows are not aligned, so stores cannot stream
def test_streaming_stores_write_the_same_values(layout, dtype, channels):
    """Outputs of 16 MiB or more use streaming stores; a sample has half of that."""
    shape = 2, channels, 2**17 // dtype.itemsize + channels % 2, 1
    input, grad_output = (laid_out(torch.randn(shape).to(dtype), layout) for _ in range(2))
    mean, sums, count = torch.rand(channels), torch.randn(2 * channels), torch.tensor(9)

    def outputs(x, dy):
        gradient = dy, x, mean, mean, mean, sums.to(ops.accumulate_dtype(dtype)), count
        return ops.batch_norm_elemt(x, mean, mean, mean, mean), ops.batch_norm_backward_elemt(*gradient)

    samples = zip(*(outputs(*sample) for sample in zip(input.split(1), grad_output.split(1), strict=True)), strict=True)
    torch.testing.assert_close(outputs(input, grad_output), tuple(map(torch.cat, samples)), rtol=0, atol=0)


@pytest.mark.parametrize("capability", [pytest.param("baseline", marks=pytest.mark.all_rows), "avx2"])
def test_the_loops_of_lower_instruction_sets_agree_with_plain_torch(capability):
    if ops.KERNELS.removesuffix(", cuda").endswith(capability):
        pytest.skip("all other tests run these loops")
    program = """if 1:
        import torch
        from bagua_syncbn import _ops as ops
        from bagua_syncbn._cuda.comparison import find_difference
        print(ops.KERNELS, [find_difference(ops, torch.device("cpu"), dtype) for dtype in ops.DTYPES])
    """
    printed = run_fresh(program, BAGUA_SYNCBN_CPU_CAPABILITY=capability).stdout
    assert printed == f"native, cpu: {capability} [None, None, None, None]\n"


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_no_op_allocates_temporaries_of_the_size_of_the_input(layout):
    size = 4 * torch.Size((4, 64, 64, 64)).numel()
    for key, arguments in op_calls((4, 64, 64, 64), layout=layout).items():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            result = op_of(ops, key)(**arguments)
        del result
        allocated = sum(max(event.self_cpu_memory_usage, 0) for event in prof.events())
        output = size if "elemt" in key and "in place" not in key else 0
        assert output <= allocated < output + size // 100, key


@pytest.mark.parametrize(("size", "layout", "is_native"), [
    (20, "contiguous", False), (40, "contiguous", True), (40, "channels_last", False), (130, "channels_last", True)
])  # fmt: skip
def test_one_process_trains_on_the_faster_kernels(size, layout, is_native):
    """See ``_is_fast`` in ``_step/by_torch.py``."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        bagua_syncbn.SyncBatchNorm2d(32)(laid_out(torch.randn(8, 32, size, size), layout))
    names = {event.name for event in prof.events()}
    assert ("bagua_syncbn::batch_norm_stats" in names) == is_native
    assert ("aten::batch_norm" in names) != is_native


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2**31 // 64 + 3, 64), (1, 1, 2**31 + 5), (3, 2**30 // 2**12, 2**12)])
def test_more_than_two_to_the_31_elements(shape):
    check_last_of_many(ops, shape, "cpu")
