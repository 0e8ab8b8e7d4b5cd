"""Each implementation of the ops equals the definition, for tables of cases."""

from itertools import product

import pytest
import torch

from bagua_syncbn._ops import IDENTITY, KERNELS, activation_of, reference
from bagua_syncbn._ops.activations import ACTIVATIONS
from tests.helpers.cases import SHAPES_IN_LAYOUTS
from tests.helpers.comparison import OpCase, check, check_activation, check_merge, check_not_finite
from tests.helpers.op_calls import check_refused, invalid_calls
from tests.helpers.tolerances import DTYPES

GIVEN = [IDENTITY, *map(activation_of, (*ACTIVATIONS, ("leaky_relu", 0.3), ("elu", 0.7)))]
POSITIONS = ["scattered", "none", "all"]
MASKS = [*POSITIONS, "padded"]

# On a CPU, vectors hold 4 to 16 values and sums 64 lanes; rows are processed in groups of 8 and tiles of at most 256;
# spans have 16384 values, and parts at least 32768.
CPU_WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 130, 257]
CPU_ROWS = [*CPU_WIDTHS, 47, 79, 127, 128, 129, 1021, 16384, 16385, 40000]
CPU_EDGES = [
    *((batch, channels, size) for size in CPU_ROWS for batch, channels in ((1, 1), (3, 2))),
    *((70 if size < 2000 else 5, 1, size) for size in CPU_ROWS),  # in several parts
    *product((1, 2, 7, 8, 9, 255, 256, 257, 1000), CPU_WIDTHS),
]
# On CUDA, sizes around: 1; a slot of 2 to 8 values; a warp; rows of four slots (longer rows may be misaligned); a
# block of 256 slots; and two batches of a block (larger inputs are split into parts). The last shape of each list has
# over 100 parts in float32.
CUDA_EDGES = [
    *((3, 3, size) for size in (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 49, 64, 196)),
    *((2, 1, size) for size in (255, 256, 257, 1023, 1024, 1025, 2049)),
    *((1, 1, size) for size in (4095, 8192, 16383, 16384, 16385, 40000)),
    *((70, 3, 7), (257, 1, 49), (520, 2, 31), (2, 300, 4), (5, 270, 49)),
    *product((1, 2, 7, 33), (1, 2, 3, 4, 8, 9, 16, 31, 32, 33, 64, 65, 72)),
    *product((255, 256, 257), (1, 5, 8)),
    *((2047, 8), (2048, 8), (2049, 8), (4100, 3), (530, 40), (1000, 136), (3, 260), (4700, 64), (18600, 16)),
]
CUDA_MASKED = [
    *((3, 3, size) for size in (1, 2, 7, 8, 16, 33, 64)),
    *((2, 1, 1025), (1, 2, 40000), (70, 3, 7), (257, 1, 49), (3, 2, 5, 8), (2, 2, 7, 9)),
    *((1, 5), (33, 8), (257, 5), (2049, 8), (4100, 3), (1000, 136), (18600, 16)),
]
# Rows shorter than a vector, not a multiple of vectors, and longer than a chunk of 128 values.
CPU_ACTIVATED = [(5, 3, 7), (3, 4, 33), (2, 3, 131), (2, 2, 300), (40, 5), (33, 47), (9, 130), (300, 64)]
CUDA_ACTIVATED = [
    *((3, 3, 5), (3, 3, 33), (2, 1, 257), (2, 2, 8200), (70, 3, 7)),
    *((7, 5), (33, 9), (257, 8), (2049, 8), (530, 40)),
]
CHANNELS = [1, *(2**k + by for k in (1, 2, 3, 4, 5, 6, 7, 8, 10) for by in (-1, 1)), 40000]
LAYOUTS = [
    *SHAPES_IN_LAYOUTS,
    *(((3, 5, 4, 7), layout) for layout in ("sliced", "transposed", "channels_last")),
    *(((5, 6), layout) for layout in ("sliced", "transposed")),
    *(((2, 1, 3, 3), "channels_last"), ((2, 3, 1, 1), "channels_last"), ((2, 300, 5, 3), "channels_last")),
    ((3, 3, 40, 30), "channels_last"),
]
OFFSETS = [(1, 1, 1), (2, 2, 2), (3, 3, 3), (5, 5, 5), (3, 0, 0), (0, 1, 0), (0, 0, 1), (8, 1, 8)]


def edges(name, dtype):
    return [OpCase(shape) for shape in (CPU_EDGES if name == "here" else CUDA_EDGES)]


def masked(name, dtype):
    shapes = [(70, 3, 7), (2, 2, 70000)] if name == "here" else CUDA_MASKED
    laid = [*((shape, "contiguous") for shape in shapes), *LAYOUTS, ((3, 5, 40, 19), "channels_last")]
    for shape, layout in [*laid, ((3, 5, 40, 19), "contiguous")]:
        for mask in (MASKS if len(shape) > 2 else POSITIONS)[: 4 if torch.Size(shape).numel() < 20000 else 1]:
            yield OpCase(shape, layout, mask=mask)
    for shape, mask in (
        ((3, 2, 64), "padded"),
        ((3, 2, 49), "padded"),
        ((9, 64), "scattered"),
        ((1, 1, 20001), "padded"),
        ((2, 2, 70000), "padded"),  # several parts per channel, the first fully masked
    ):
        yield OpCase(shape, offsets=(3, 3, 3), mask=mask)


def activated(name, dtype):
    shapes = CPU_ACTIVATED if name == "here" else CUDA_ACTIVATED
    for number, activation in enumerate(GIVEN):
        if name == "here" and dtype.itemsize == 2 and not activation.is_cheap:
            continue  # gradients are rounded before they are summed
        if name != "here" and number % 3:
            continue  # every activation elsewhere: test_activations_and_their_derivatives_are_those_of_torch
        laid = [*((shape, "contiguous") for shape in shapes), *LAYOUTS[number // 3 % 3 :: 3]]
        for (shape, layout), residual in product(laid, (False, True)):
            parameters = None if number % 2 else torch.float32
            yield OpCase(shape, layout, parameters=parameters, activation=activation, residual=residual)
        for offsets in OFFSETS[number % 2 :: 2]:
            yield OpCase((3, 2, 64 - number % 2), offsets=offsets, activation=activation, residual=True)
            yield OpCase((9, 64), offsets=offsets, activation=activation, residual=True)


def every_channel_count(name, dtype):
    laid = [*product(((), (3,), (2, 2)), ("contiguous", "sliced")), ((2, 2), "channels_last")]
    for channels, (places, layout) in product(CHANNELS, laid):
        # The emulator takes seconds for many blocks: one for each planar channel, or for a tile of interleaved ones.
        is_largest = (places, layout) == laid[0] and dtype == torch.float16
        if is_largest or channels < (100 if name == "emulated" and places and layout != "channels_last" else 2000):
            yield OpCase((2, channels, *places), layout)


TABLE = {
    "rows of every length": edges,
    "layouts": lambda *_: [OpCase(shape, layout) for shape, layout in LAYOUTS],
    "channels": every_channel_count,
    "gradients and residuals with a different layout": lambda *_: [
        OpCase((2, 16, 5, 6), layout, other, activation=activation, residual=residual)
        for layout, other in product(("contiguous", "channels_last", "sliced", "transposed"), repeat=2)
        for activation, residual in ((None, False), (activation_of("relu"), False), (activation_of("relu"), True))
    ],
    "addresses": lambda *_: [
        OpCase(shape, offsets=offsets)
        for shape in ((3, 2, 64), (3, 2, 49), (9, 64), (2, 1, 2**15), (1, 1, 20001), (2, 3, 5))
        for offsets in OFFSETS
    ],
    "parameters": lambda *_: [
        OpCase(shape, parameters=dtype) for shape in ((4, 5, 33), (40, 16)) for dtype in (None, *DTYPES)
    ],
    "masks": masked,
    "activations": activated,
}
OF_ATEN = ("layouts", "channels", "addresses", "parameters")  # the reference computes the rest
OF_LOOPS = ("rows of every length", "channels", "addresses")  # edges of native loops, which the reference doesn't have


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cases", TABLE)
def test_values_and_gradients_equal_the_definition(implementation, cases, dtype):
    name, ops = implementation
    is_reference = name == "reference" or (name == "here" and KERNELS == "reference")
    if (name == "aten" and cases not in OF_ATEN) or (is_reference and cases in OF_LOOPS):
        pytest.skip("compares the reference with itself")
    table = list(TABLE[cases](name, dtype))
    if name == "emulated":  # slow, so each case runs in one wide and one half dtype
        table = table[DTYPES.index(dtype) % 2 :: 2]
    for case in table:
        check(ops, case, dtype)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("buffer_dtype", [None, *DTYPES], ids=str)
def test_the_merge_of_ranks_equals_the_definition(ops, buffer_dtype, momentum):
    sizes = ((5,), 3), ((4, 0, 7, 1), 5), ((3, 2), 300), ((1, 0), 2), ((0, 0), 2), (range(19), 4), (range(67), 37)
    for (ranks, channels), dtype in product(sizes, DTYPES[:2]):
        check_merge(ops, ranks, channels, dtype, buffer_dtype, momentum)
    for channels in CHANNELS if buffer_dtype == torch.float32 else ():
        check_merge(ops, (3, 2), channels, torch.float32, buffer_dtype, momentum)


@pytest.mark.parametrize("activation", GIVEN, ids=str)
def test_activations_and_their_derivatives_are_those_of_torch(ops, activation):
    for dtype in DTYPES[:2]:
        check_activation(ops, activation, dtype)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_values_stay_in_their_channel(ops, value):
    for dtype, shape, where in product(DTYPES, ((5, 4, 33), (1, 3, 20000), (70, 33), (3000, 8)), (0, -1)):
        check_not_finite(ops, torch.randn(shape).to(dtype), value, where)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0)])
def test_empty_input_gives_zeros_and_its_own_shape(ops, shape):
    channels = shape[1]
    for dtype, mask in product((torch.float32, torch.float64), (None, torch.ones(shape[0], *shape[2:]) > 0)):
        input, ones = torch.ones(shape, dtype=dtype), torch.ones(channels, dtype=dtype)
        assert ops.batch_norm_stats(input, 7 * 2**24 + 5, 9, mask).tolist() == [0] * (2 * channels + 2) + [7, 5, 9]
        for residual, activation in ((None, 0), (input, 5)):
            assert ops.batch_norm_elemt(input, None, ones, ones, ones, residual, activation).shape == shape
            more = 5 * 2**24 + 3, None, residual, activation
            sums, *grads = ops.batch_norm_backward_reduce(input, input, ones, ones, ones.half(), *more)
            assert sums.tolist() == [0] * (2 * channels) + [3, 9, 0, 0, 5, 25]
            assert [(grad.tolist(), grad.dtype) for grad in grads] == [([0] * channels, torch.float16)] * 2
            arguments = input, input, None, ones, ones, ones.repeat(2), torch.tensor(0)
            more = mask, ones, activation if mask is None else 0
            assert ops.batch_norm_backward_elemt(*arguments, 1, None, 0, *more).shape == shape
            assert ops.batch_norm_backward_elemt(*arguments, grad_input=input).numel() == 0


def drifting(*shape):
    """Kernels shift by the mean of a few values. Unlucky first values must not degrade the variance."""
    input = torch.randn(shape) * 1e-2 + 1e3
    input.view(-1)[: input.numel() // 32] = 0  # the first rows are far from the mean
    input.view(-1)[1] = 1e6
    return input + torch.linspace(0, 100, shape[-1])


@pytest.mark.parametrize(("input", "rtol"), [
    *((drifting(*shape), 2e-5) for shape in ((4, 3, 128 * 128), (4 * 128 * 128, 3), (2 * 128 * 128, 8))),
    *((torch.randn(shape) * 1e-2 + 1e3, 2e-6) for shape in ((20, 3, 1003), (2, 3, 30000), (5000, 16))),
], ids=lambda given: str([*given.shape]) if isinstance(given, torch.Tensor) else "")  # fmt: skip
def test_statistics_survive_a_large_mean_drift_and_outliers(ops, input, rtol):
    for mask in (None, torch.rand(input.select(1, 0).shape) < 0.3):
        expected = reference.batch_norm_stats(input.double(), mask=mask)
        torch.testing.assert_close(ops.batch_norm_stats(input, mask=mask).double(), expected, rtol=rtol, atol=0)


def test_statistics_survive_a_mask_that_starts_with_an_outlier(ops):
    input, mask = torch.randn(2, 2, 30000), torch.ones(2, 30000, dtype=torch.bool)
    mask[:, :1024], mask[:, 5], input[..., 5] = False, True, 1e5
    expected = reference.batch_norm_stats(input.double(), mask=mask)
    torch.testing.assert_close(ops.batch_norm_stats(input, mask=mask).double(), expected, rtol=2e-5, atol=1e-5)


def test_the_merge_survives_a_large_mean(ops):
    input = torch.randn(4, 3, 2500, dtype=torch.float64) * 1e-2 + 1e3
    gathered = torch.stack([reference.batch_norm_stats(part) for part in input.split(1)])
    mean, invstd, _ = ops.batch_norm_gather_stats(gathered, None, None, None, None, 0.0)
    var, expected_mean = torch.var_mean(input, (0, 2), correction=0)
    torch.testing.assert_close(mean, expected_mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(invstd, var.rsqrt(), rtol=1e-9, atol=0)


def test_expanded_gradients_and_sums_are_accepted(ops):
    grad, input = torch.tensor(2.0).expand(3, 4, 5, 6), torch.randn(3, 4, 5, 6)
    ones, sums, count = torch.ones(4), torch.tensor(1.0).expand(8), torch.tensor(90)
    for function in (
        lambda dy, sums: ops.batch_norm_backward_reduce(dy, input, ones, ones, None),
        lambda dy, sums: ops.batch_norm_backward_elemt(dy, input, None, ones, ones, sums, count),
    ):
        dense = function(grad.contiguous(), sums.contiguous())
        torch.testing.assert_close(function(grad, sums), dense, rtol=0, atol=0)


def test_wrong_arguments_are_refused_by_name(implementation):
    name, ops = implementation
    if name in ("aten", "reference") or KERNELS == "reference":
        pytest.skip("torch raises different errors")
    for call in invalid_calls():
        check_refused(ops, *call)
