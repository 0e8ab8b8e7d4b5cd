"""The native CPU kernels against the reference ops, at every edge of their loops."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import comparison
import pytest
import torch
from cases import laid_out
from tolerances import DTYPES, assert_close
from torch.profiler import ProfilerActivity, profile
from wrong_arguments import WRONG_ARGUMENTS, check_refused

import bagua_syncbn
from bagua_syncbn import ops
from bagua_syncbn.ops import IDENTITY, reference
from bagua_syncbn.ops.activations import ACTIVATIONS, activation_of

pytestmark = pytest.mark.skipif(
    os.environ.get("BAGUA_SYNCBN_KERNELS") == "reference", reason="BAGUA_SYNCBN_KERNELS=reference asks for plain torch"
)

ROOT = Path(__file__).resolve().parents[2]

# Vectors hold 4 to 16 values and sums 64 lanes; rows come in groups of 8 and tiles of at most 256, spans have 16384
# values, and parts 32768 at least.
PLANAR_SIZES = [
    *(1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 47),
    *(63, 64, 65, 79, 127, 128, 129, 1021, 16384, 16385, 40000),
]
INTERLEAVED_CHANNELS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 130, 257]
INTERLEAVED_ROWS = [1, 2, 7, 8, 9, 255, 256, 257, 1000]


def test_the_native_kernels_are_loaded():
    from bagua_syncbn import _C

    assert ops.KERNELS.startswith("native, cpu: ")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):  # `make sanitize` is about its own build
        assert "sanitize" in _C.__file__


def check_ops(input, grad_output, parameter_dtype=None):
    comparison.check_ops(ops, input, grad_output, parameter_dtype)


def check(shape, dtype, layout="contiguous", parameter_dtype=None):
    input, grad_output = (torch.randn(shape) * 2 + 1).to(dtype), torch.randn(shape).to(dtype)
    check_ops(laid_out(input, layout), laid_out(grad_output, layout), parameter_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", PLANAR_SIZES)
def test_planar_rows_of_every_length_equal_the_reference(size, dtype):
    for batch, channels in ((1, 1), (3, 2), (70 if size < 2000 else 5, 1)):  # the last in several parts
        check((batch, channels, size), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", INTERLEAVED_CHANNELS)
def test_interleaved_rows_of_every_width_equal_the_reference(channels, dtype):
    for rows in INTERLEAVED_ROWS:
        check((rows, channels), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "layout"), [
    ((2, 300, 5, 3), "channels_last"),
    ((2, 3, 4, 5, 6), "channels_last_3d"),
    ((3, 5, 4, 7), "sliced"),
    ((3, 5, 4, 7), "transposed"),
    ((4, 70, 9), "transposed"),
    ((5, 6), "sliced"),
    ((5, 6), "transposed"),
    ((2, 1, 3, 3), "channels_last"),
    ((2, 3, 1, 1), "channels_last"),
])  # fmt: skip
def test_every_memory_layout_equals_the_reference(shape, layout, dtype):
    check(shape, dtype, layout)


@pytest.mark.parametrize("parameter_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_of_any_dtype_equal_the_reference(dtype, parameter_dtype):
    check((4, 5, 33), dtype, parameter_dtype=parameter_dtype)


@pytest.mark.parametrize(
    "layouts", [("contiguous", "channels_last"), ("channels_last", "sliced"), ("sliced", "contiguous")]
)
def test_a_grad_output_of_another_layout_equals_the_reference(layouts):
    tensors = torch.randn(2, 3, 4, 5, 6).unbind()
    check_ops(*(laid_out(tensor, layout) for tensor, layout in zip(tensors, layouts, strict=True)))
    check_ops(tensors[0], torch.ones(()).expand(3, 4, 5, 6))
    others = tensors[1], torch.randn(5, 4, 3, 6).transpose(0, 2)
    comparison.check_act_ops(ops, activation_of("silu"), laid_out(tensors[0], layouts[0]), *others)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_tensors_at_any_address_equal_the_reference(offset):
    for dtype, shape in product(DTYPES, [(3, 2, 64), (9, 64), (2, 1, 2**16)]):
        values = torch.randn(2, 3 * 2**17).to(dtype)
        size = torch.Size(shape).numel()
        check_ops(*(row[offset : offset + size].view(shape) for row in values))


GIVEN = [IDENTITY, *map(activation_of, (*ACTIVATIONS, ("leaky_relu", 0.3), ("elu", 0.7)))]
# Rows of a part of a vector, of vectors and a part, and of more values than a chunk has, which is 128.
ACTIVATED = [(5, 3, 7), (3, 4, 33), (2, 3, 131), (2, 2, 300), (40, 5), (33, 47), (9, 130), (300, 64)]


@pytest.mark.parametrize("activation", GIVEN, ids=str)
def test_every_activation_equals_the_reference(activation):
    for dtype in DTYPES if activation.is_cheap else DTYPES[:2]:  # else a gradient is rounded before it is added up
        comparison.check_activations(ops, [activation], ACTIVATED, dtype)


@pytest.mark.parametrize("name", [None, "relu", "gelu"])
def test_an_activation_with_a_mask_equals_the_reference(name):
    for dtype, (shape, layout) in product(DTYPES[:2], [
        ((3, 4, 33), "contiguous"),
        ((2, 3, 700), "contiguous"),
        ((2, 16, 5, 6), "channels_last"),
        ((4, 5, 9), "transposed"),
    ]):  # fmt: skip
        input, grad_output, residual = (laid_out(tensor.to(dtype), layout) for tensor in torch.randn(3, *shape))
        for mask in (torch.rand(shape[0], *shape[2:]) < 0.5, torch.randint(shape[-1] + 1, shape[:1])):
            input.masked_fill_(~reference.of_positions(mask, input), 1e4)  # goes nowhere
            for added in (None, residual):
                given = activation_of(name) or IDENTITY, input, grad_output, added
                comparison.check_act_ops(ops, *given, mask=mask)
    input[0], given = torch.nan, (None, None, torch.zeros(shape[1]), torch.ones(shape[1]))
    assert ops.batch_norm_elemt(input, *given, torch.tensor([0, 9, 9, 9]), residual, 1)[0].eq(0).all()


@pytest.mark.parametrize("name", ["sigmoid", "silu", "tanh", "elu"])
def test_activations_are_within_two_units_in_the_last_place(name):
    z, zeros, ones, act = torch.linspace(-9, 9, 4000), torch.zeros(1), torch.ones(1), activation_of(name)
    actual = ops.batch_norm_elemt(z.view(1, 1, -1), None, None, zeros, ones, None, None, act.code, act.parameter)
    torch.testing.assert_close(actual.double().flatten(), act.of(z.double()), rtol=2**-22, atol=2**-32)


def test_the_same_activations_are_cheap_in_both_tables():
    cheap = re.findall(r"DO\((\w+), true\)", (ROOT / "csrc" / "activations.h").read_text(encoding="ascii"))
    names = [name for name in ACTIVATIONS if activation_of(name).is_cheap]
    assert [name.title().replace("_", "") for name in names] == cheap


@pytest.mark.parametrize(("shape", "dtype", "layout", "name"), [
    ((2, 8, 520, 512), torch.float32, "contiguous", None),
    ((16, 64, 65, 64), torch.float32, "channels_last", None),
    ((2, 8, 1030, 512), torch.bfloat16, "contiguous", None),
    ((2, 32, 260, 256), torch.float32, "contiguous", "hardswish"),
    ((2, 32, 260, 256), torch.float32, "channels_last", "tanh"),
    ((16, 65, 65, 65), torch.float32, "channels_last", None),
    ((2, 9, 520, 513), torch.float32, "contiguous", None),
])  # fmt: skip
def test_large_outputs_are_those_of_their_halves(shape, dtype, layout, name):
    """From 16 MiB on they are streamed past the caches, if rows are multiples of 64 bytes; the last two have others."""
    dy, x, residual = (laid_out(tensor.to(dtype), layout) for tensor in torch.randn(3, *shape))
    factors, sums, act = torch.rand(shape[1]) + 0.5, torch.randn(2 * shape[1]), activation_of(name) or IDENTITY

    def results(dy, x, residual):
        yield ops.batch_norm_elemt(x, factors, factors, factors, factors, None, residual if name else None, act.code)
        given = factors, factors, factors, sums, torch.tensor(9)
        yield ops.batch_norm_backward_elemt(dy, x, *given, bias=factors if name else None, activation=act.code)

    parts = [results(*part) for part in zip(*(t.split(len(t) // 2) for t in (dy, x, residual)), strict=True)]
    for whole, *halves in zip(results(dy, x, residual), *parts, strict=True):
        assert torch.equal(whole, torch.cat(halves))


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0), (2, 0, 4), (0, 0)])
def test_empty_input_gives_zeros_and_its_own_shape(shape):
    input, channels = torch.randn(shape), shape[1]
    mean = torch.ones(channels)
    assert torch.equal(ops.batch_norm_stats(input), torch.zeros(2 * channels + 2))
    assert ops.batch_norm_elemt(input, None, None, mean, mean).shape == shape
    for result in ops.batch_norm_backward_reduce(input, input, mean, mean, None):
        assert torch.equal(result, torch.zeros_like(result))
    grad = ops.batch_norm_backward_elemt(input, input, None, mean, mean, torch.ones(2 * channels), torch.tensor(0))
    assert grad.shape == shape


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3, 33), (70, 33)])
def test_values_that_are_not_finite_stay_in_their_channel(shape, dtype, value):
    comparison.check_not_finite(ops, *torch.randn(2, *shape).to(dtype).unbind(), value, -1)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_statistics_survive_data_that_drifts_and_has_outliers(layout):
    """The pivots of the sums are means of a few of the values: no choice of those may spoil the variance."""
    input = torch.randn(4, 3, 128, 128) * 1e-2 + 1e3
    input[:, 0, :8] = 0  # the first rows are far off
    input[0, 1, 0, 0] = 1e6  # the first value is
    input[:, 2] += torch.linspace(0, 100, 128).view(-1, 1)
    packed = ops.batch_norm_stats(laid_out(input, layout))
    expected = reference.batch_norm_stats(input.double())
    torch.testing.assert_close(packed.double(), expected, rtol=2e-5, atol=0)


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = torch.cat([bits.view(torch.bfloat16).float() * (1 + k * 2**-9) for k in range(4)]).view(4, 1, -1)
    zero, one = torch.zeros(1), torch.ones(1)
    normalized = ops.batch_norm_elemt(values.bfloat16(), None, None, zero, one)
    torch.testing.assert_close(normalized, values.bfloat16(), rtol=0, atol=0, equal_nan=True)
    scaled = ops.batch_norm_elemt(values.bfloat16(), None, None, zero, one / 3)
    expected = (values.bfloat16().float() * (one / 3)).bfloat16()
    torch.testing.assert_close(scaled, expected, rtol=0, atol=0, equal_nan=True)


def test_rounding_carries_no_nan_to_a_number():
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # all bits of the mantissa set
    for dtype in (torch.bfloat16, torch.float16):
        output = ops.batch_norm_elemt(torch.ones(40, 2, dtype=dtype), None, None, torch.zeros(2), nan)
        assert output.isnan().all()


@pytest.mark.parametrize(("dtype", "half_unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
def test_ties_round_to_even(dtype, half_unit):
    """One half unit in the last place above each value from 1 to 2."""
    values = torch.arange(1, 2, 2 * half_unit).to(dtype).view(1, 1, -1)
    zero, one = torch.zeros(1), torch.ones(1)
    output = ops.batch_norm_elemt(values, None, torch.tensor([half_unit]), zero, one)
    assert torch.equal(output, (values.float() + half_unit).to(dtype))


BITS = """
import hashlib, json, os, sys, torch


def bits(ops, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    digest = hashlib.sha256()
    small = [(shape, dtype) for dtype in ops.DTYPES for shape in ((3, 2, 70001), (6, 5, 77), (2000, 37), (3, 65, 1))]
    streamed = (2, 8, 520, 512), torch.float32
    inputs = [(shape, dtype, torch.contiguous_format) for shape, dtype in (*small, streamed)]
    for shape, dtype, layout in (*inputs, (*streamed, torch.channels_last)):
        x, dy = (torch.randn(shape).to(dtype).contiguous(memory_format=layout) for _ in range(2))
        stats = ops.batch_norm_stats(x)
        mean, invstd, count = ops.batch_norm_gather_stats(stats[None], None, None, None, None, 1e-5)
        y = ops.batch_norm_elemt(x, mean, mean, mean, invstd)
        sums, *grads = ops.batch_norm_backward_reduce(dy, x, mean, invstd, mean)
        dx = ops.batch_norm_backward_elemt(dy, x, mean, mean, invstd, sums, count)
        results = [stats, y, sums, *grads, dx]
        for mask in (torch.rand(x.select(1, 0).shape) < 0.5, torch.arange(len(x))):
            if x.dim() > 2 or mask.dtype == torch.bool:
                results += [ops.batch_norm_stats(x, mask=mask), *ops.batch_norm_backward_reduce(
                    dy, x, mean, invstd, mean, mask=mask), ops.batch_norm_elemt(x, mean, mean, mean, invstd, mask)]
                results += [ops.batch_norm_backward_elemt(
                    dy, x, mean, mean, invstd, sums, count, mask=mask, zeroes=zeroes) for zeroes in (False, True)]
        codes = range(len(ops.activations.ACTIVATIONS) + 1)
        codes = codes if x.numel() < 10000 else codes[ops.DTYPES.index(dtype) :: 4]
        for code in codes if len(shape) == 3 else ():
            residual, grad = 50 * dy, torch.empty_like(x)  # to where exponentials overflow
            results.append(ops.batch_norm_elemt(x, mean, mean, mean, invstd, None, residual, code, 0.3))
            reduced = (dy, x, mean, invstd, mean, None, None, mean)
            results += [*ops.batch_norm_backward_reduce(*reduced, residual, code, 0.3, grad), grad]
            ops.batch_norm_backward_elemt_(grad, x, mean, mean, invstd, sums, count)
            results += ops.batch_norm_backward_reduce(*reduced, None, code, 0.3)
            factors = (mean, mean, invstd, sums, count)
            results.append(ops.batch_norm_backward_elemt(dy, x, *factors, bias=mean, activation=code, parameter=0.3))
        for result in results:
            digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

for given in sys.argv[1:]:  # forked: torch is imported once
    capability, *threads = given.split(",")
    if os.fork() == 0:
        os.environ["BAGUA_SYNCBN_CPU_CAPABILITY"] = capability
        from bagua_syncbn import ops
        print(json.dumps([ops.KERNELS, *(bits(ops, int(number)) for number in threads)]), flush=True)
        os._exit(0)
    os.wait()
"""


def test_same_bits_with_any_instruction_set_and_number_of_threads():
    """The kernels of each, and a digest of what they compute with each number of threads."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_one_process_trains_on_these_kernels_where_they_are_faster(layout, dtype):
    layer = bagua_syncbn.SyncBatchNorm2d(32, dtype=dtype)
    expected = torch.nn.BatchNorm2d(32, dtype=torch.float64)
    torch.nn.init.normal_(layer.weight)
    expected.load_state_dict(layer.state_dict())
    for _ in range(2):
        size = 40 if layout == "contiguous" else 130  # see prefer_native
        input = laid_out(torch.randn(8, 32, size, size, dtype=dtype) * 3 + 1, layout).requires_grad_()
        wide = input.detach().double().requires_grad_()
        grad_output = torch.randn_like(input)
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            output = layer(input)
            output.backward(grad_output)
        names = {event.name for event in prof.events()}
        assert "bagua_syncbn::batch_norm_stats" in names
        assert "aten::batch_norm" not in names
        wide_output = expected(wide)
        wide_output.backward(grad_output.double())
        assert_close(output.detach(), wide_output.detach(), "output")
        assert_close(input.grad, wide.grad, "input.grad")
    for name, buffer in expected.named_buffers():
        assert_close(layer.get_buffer(name).double(), buffer.double(), name) if dtype == torch.float64 else None
    torch.testing.assert_close(layer.weight.grad.double(), expected.weight.grad, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("shape", "layout"), [((2, 4, 3, 3), "contiguous"), ((8, 32, 40, 40), "channels_last")])
def test_small_inputs_are_left_to_torch(shape, layout):
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        bagua_syncbn.SyncBatchNorm2d(shape[1])(laid_out(torch.randn(shape), layout))
    names = {event.name for event in prof.events()}
    assert "aten::batch_norm" in names
    assert "bagua_syncbn::batch_norm_stats" not in names


@pytest.mark.parametrize(("call", "message"), WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused_by_name(call, message):
    check_refused(ops, call, message)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2**31 // 64 + 3, 64), (1, 1, 2**31 + 5), (3, 2**30 // 2**12, 2**12)])
def test_more_than_two_to_the_31_elements(shape):
    comparison.check_last_of_many(ops, shape, "cpu")
