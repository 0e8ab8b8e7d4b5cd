"""Rounding, reproducibility and memory of the CPU kernels. test_values.py compares values."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import bagua_syncbn
from bagua_syncbn import ops
from bagua_syncbn.ops.activations import activation_of
from tests.helpers.cases import laid_out
from tests.helpers.comparison import check_last_of_many

pytestmark = pytest.mark.skipif(
    os.environ.get("BAGUA_SYNCBN_KERNELS") == "reference", reason="BAGUA_SYNCBN_KERNELS=reference asks for plain torch"
)


def test_the_native_kernels_are_loaded():
    from bagua_syncbn import _C

    assert ops.KERNELS.startswith("native, cpu: ")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):  # `make sanitize` tests its own build
        assert "sanitize" in _C.__file__


@pytest.mark.parametrize("name", ["sigmoid", "silu", "tanh", "elu"])
def test_activations_are_within_two_units_in_the_last_place(name):
    z, zeros, ones, act = torch.linspace(-9, 9, 4000), torch.zeros(1), torch.ones(1), activation_of(name)
    actual = ops.batch_norm_elemt(z.view(1, 1, -1), None, None, zeros, ones, None, act.code, act.parameter)
    torch.testing.assert_close(actual.double().flatten(), act.of(z.double()), rtol=2**-22, atol=2**-32)


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = torch.cat([bits.view(torch.bfloat16).float() * (1 + k * 2**-9) for k in range(4)]).view(4, 1, -1)
    zero, one = torch.zeros(1), torch.ones(1)
    normalized = ops.batch_norm_elemt(values.bfloat16(), None, None, zero, one)
    torch.testing.assert_close(normalized, values.bfloat16(), rtol=0, atol=0, equal_nan=True)
    scaled = ops.batch_norm_elemt(values.bfloat16(), None, None, zero, one / 3)
    expected = (values.bfloat16().float() * (one / 3)).bfloat16()
    torch.testing.assert_close(scaled, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "half_unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
def test_ties_round_to_even_and_nan_stays_nan(dtype, half_unit):
    values = torch.arange(1, 2, 2 * half_unit).to(dtype).view(1, 1, -1)
    zero, one = torch.zeros(1), torch.ones(1)
    output = ops.batch_norm_elemt(values, None, torch.tensor([half_unit]), zero, one)
    assert torch.equal(output, (values.float() + half_unit).to(dtype))
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # all mantissa bits set
    assert ops.batch_norm_elemt(torch.ones(40, 2, dtype=dtype), None, None, zero.expand(2), nan).isnan().all()


BITS = """
import hashlib, json, os, sys, torch


def bits(ops, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    digest = hashlib.sha256()
    small = [(shape, dtype) for dtype in ops.DTYPES for shape in ((3, 2, 70001), (6, 5, 77), (2000, 37), (3, 65, 1))]
    # Except in the baseline, outputs of 16 MiB or more use streaming stores if rows are multiples of 64 bytes.
    large = [(shape, torch.float32) for shape in ((2, 8, 520, 512), (2, 32, 260, 256), (2, 9, 520, 513))]
    inputs = [(*each, torch.contiguous_format) for each in (*small, *large, ((2, 8, 1030, 512), torch.bfloat16))]
    inputs += [(*each, torch.channels_last) for each in (large[1], ((16, 65, 65, 65), torch.float32))]
    for shape, dtype, layout in inputs:
        x, dy = (torch.randn(shape).to(dtype).contiguous(memory_format=layout) for _ in range(2))
        stats = ops.batch_norm_stats(x)
        mean, invstd, count = ops.batch_norm_gather_stats(stats[None], None, None, None, None, 1e-5)
        y = ops.batch_norm_elemt(x, mean, mean, mean, invstd)
        sums, *grads = ops.batch_norm_backward_reduce(dy, x, mean, invstd, mean)
        dx = ops.batch_norm_backward_elemt(dy, x, mean, mean, invstd, sums, count)
        results = [stats, y, sums, *grads, dx]
        mask = torch.rand(x.select(1, 0).shape) < 0.5
        gradient = ops.batch_norm_backward_elemt(dy, x, mean, mean, invstd, sums, count, mask=mask)
        results += [ops.batch_norm_stats(x, mask=mask), gradient]
        codes = range(len(ops.activations.ACTIVATIONS) + 1)
        codes = codes if x.numel() < 10000 else codes[ops.DTYPES.index(dtype) :: 4]
        for code in codes if len(shape) == 3 else (8,):
            residual, grad = 50 * dy, torch.empty_like(x)  # exponentials overflow
            results.append(ops.batch_norm_elemt(x, mean, mean, mean, invstd, residual, code, 0.3))
            reduced = (dy, x, mean, invstd, mean, None, mean)
            results += [*ops.batch_norm_backward_reduce(*reduced, residual, code, 0.3, grad), grad]
            ops.batch_norm_backward_elemt(grad, x, mean, mean, invstd, sums, count, grad_input=grad)
            results += ops.batch_norm_backward_reduce(*reduced, None, code, 0.3)
            factors = (mean, mean, invstd, sums, count)
            results.append(ops.batch_norm_backward_elemt(dy, x, *factors, bias=mean, activation=code, parameter=0.3))
        for result in results:
            digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

for given in sys.argv[1:]:  # forks, to import torch only once
    capability, *threads = given.split(",")
    if os.fork() == 0:
        os.environ["BAGUA_SYNCBN_CPU_CAPABILITY"] = capability
        from bagua_syncbn import ops
        print(json.dumps([ops.KERNELS, *(bits(ops, int(number)) for number in threads)]), flush=True)
        os._exit(0)
    os.wait()
"""


def test_results_are_bitwise_equal_for_any_instruction_set_and_number_of_threads():
    command = [sys.executable, "-c", BITS, "baseline,2", "avx512,1,3", "avx2,2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (name, *digests), *rest = map(json.loads, printed.splitlines())
    assert name.removesuffix(", cuda") == "native, cpu: baseline"
    digests += [digest for _, *others in rest for digest in others]
    assert len(digests) == 4
    assert len(set(digests)) == 1


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_no_op_allocates_temporaries_of_the_size_of_the_input(layout):
    input, grad_output = (laid_out(torch.randn(4, 64, 64, 64), layout) for _ in range(2))
    size = input.numel() * input.element_size()
    mean = torch.ones(64)

    def allocated(function):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            result = function()
        del result
        return sum(max(event.self_cpu_memory_usage, 0) for event in prof.events())

    small = size // 100
    assert allocated(lambda: ops.batch_norm_stats(input)) < small
    assert allocated(lambda: ops.batch_norm_backward_reduce(grad_output, input, mean, mean, mean)) < small
    assert size <= allocated(lambda: ops.batch_norm_elemt(input, mean, mean, mean, mean)) < size + small
    arguments = (grad_output, input, mean, mean, mean, torch.ones(128), torch.tensor(9))
    assert size <= allocated(lambda: ops.batch_norm_backward_elemt(*arguments)) < size + small


@pytest.mark.parametrize(("size", "layout", "is_native"), [
    (20, "contiguous", False), (40, "contiguous", True), (40, "channels_last", False), (130, "channels_last", True)
])  # fmt: skip
def test_one_process_trains_on_the_faster_kernels(size, layout, is_native):
    """See prefer_native."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        bagua_syncbn.SyncBatchNorm2d(32)(laid_out(torch.randn(8, 32, size, size), layout))
    names = {event.name for event in prof.events()}
    assert ("bagua_syncbn::batch_norm_stats" in names) == is_native
    assert ("aten::batch_norm" in names) != is_native


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2**31 // 64 + 3, 64), (1, 1, 2**31 + 5), (3, 2**30 // 2**12, 2**12)])
def test_more_than_two_to_the_31_elements(shape):
    check_last_of_many(ops, shape, "cpu")
