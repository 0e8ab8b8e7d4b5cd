"""The CUDA kernels, run on the CPU by ``tests/ops/emulator``: in random order, under sanitizers, against the reference.

What this cannot show: a missing fence between blocks, and speed. The planted bugs at the end show what it can.
"""

import math
import re
import shutil
from itertools import product

import pytest
import torch
from comparison import check_act_ops, check_activation, check_activations, check_masked_ops, check_not_finite, check_ops
from emulated import (
    CSRC,
    LEFT_OUT,
    NO_BUFFER,
    EmulatedOps,
    EmulationError,
    build,
    build_changed,
    find_headers,
    keep_dtypes,
)
from tolerances import DTYPES, assert_close

from bagua_syncbn.ops import accumulate_dtype, reference
from bagua_syncbn.ops.activations import ACTIVATIONS, IDENTITY, activation_of

pytestmark = pytest.mark.skipif(
    find_headers() is None or shutil.which("g++") is None, reason="needs g++ and the headers of the CUDA toolkit"
)

# Kernels take long to compile under sanitizers, and test_cuda_bindings runs all dtypes. Seldom float16, of which
# a vector holds as many values as of bfloat16.
MOST = [pytest.param(dtype, marks=pytest.mark.slow if dtype == torch.float16 else ()) for dtype in DTYPES]

# Around: 1, a slot of 2 to 8 values, a warp, rows of four slots, from which on they need not be aligned, a block of 256
# slots, and two batches of one, from which on there are parts.
PLANAR = [
    *((3, 3, size) for size in (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 49, 64, 196)),
    *((2, 1, size) for size in (255, 256, 257, 1023, 1024, 1025, 2049)),
    *((1, 1, size) for size in (4095, 8192, 16383, 16384, 16385, 40000)),
    (70, 3, 7),
    (257, 1, 49),
    (520, 2, 31),
    (2, 300, 4),
]
INTERLEAVED = [
    *product((1, 2, 7, 33), (1, 2, 3, 4, 8, 9, 16, 31, 32, 33, 64, 65, 72)),
    *product((255, 256, 257), (1, 5, 8)),
    (2047, 8),
    (2048, 8),
    (2049, 8),
    (4100, 3),
    (530, 40),
    (1000, 136),
    (3, 260),
    (4700, 64),
]
MANY_PARTS = (18600, 16)  # 136 of float32, more than the last block loads at once


GIVEN = [IDENTITY, *map(activation_of, (*ACTIVATIONS, ("leaky_relu", 0.3), ("elu", 0.7)))]


@pytest.fixture(scope="session")
def server(built):
    ops = EmulatedOps(built)
    yield ops
    ops.close()


@pytest.fixture(scope="session")
def server_of_all_dtypes(tmp_path_factory):
    ops = EmulatedOps(build(tmp_path_factory.mktemp("emulator"), find_headers(), all_dtypes=True))
    yield ops
    ops.close()


@pytest.fixture
def emulated(request):
    slow = request.node.get_closest_marker("slow")
    server = request.getfixturevalue("server_of_all_dtypes" if slow else "server")
    server.offset, server.grad_offset = 0, None
    return server


def tensors(shape, dtype):
    return (torch.randn(shape) * 2 + 1).to(dtype), torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_planar_rows_of_every_length_equal_the_reference(emulated, dtype):
    for shape in PLANAR:
        check_ops(emulated, *tensors(shape, dtype), torch.float32)


@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_groups_of_channels_equal_the_reference(emulated, dtype):
    """Rows of which a group ends at a multiple of 16 bytes, or half of that, as 14 x 14 does, and odd rows."""
    width = 16 // dtype.itemsize
    few = 132  # groups from which on they are taken
    check_ops(emulated, *tensors((9, few * width, 4 * width + 1), dtype), torch.float32)
    check_ops(emulated, *tensors((2, few * 2, 4 * width + width // 2), dtype), torch.float32)
    check_ops(emulated, *tensors((3, few * 2 - 1, 4 * width + width // 2), dtype), torch.float32)
    if width <= 4:  # a block of one row, which has more samples than a batch
        check_ops(emulated, *tensors((5, few * width, 129), dtype), torch.float32)


@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_interleaved_rows_of_every_width_equal_the_reference(emulated, dtype):
    for shape in [*INTERLEAVED, MANY_PARTS] if dtype == torch.float32 else INTERLEAVED:
        check_ops(emulated, *tensors(shape, dtype), torch.float32)


@pytest.mark.parametrize("dtype", MOST, ids=str)
@pytest.mark.parametrize(("shape", "memory_format"), [
    ((2, 24, 3, 5), torch.channels_last),
    ((3, 3, 40, 30), torch.channels_last),
    ((2, 3, 4, 5, 6), torch.channels_last_3d),
])  # fmt: skip
def test_channels_last_equals_the_reference(emulated, shape, memory_format, dtype):
    input, grad_output = (t.contiguous(memory_format=memory_format) for t in tensors(shape, dtype))
    check_ops(emulated, input, grad_output)


def masks(shape):
    """Scattered; padded, with lengths and with a mask; nothing but padding, all. Of many values the first two."""
    size = (shape[0], *shape[2:])
    found = [torch.rand(size) < 0.5]
    if len(shape) > 2:
        lengths = torch.randint(-1, shape[-1] + 2, shape[:1])
        padded = torch.arange(shape[-1]) < lengths.view(-1, *[1] * (len(shape) - 2))
        found += [lengths, padded.expand(size).contiguous()]
    found += [torch.zeros(size, dtype=torch.bool), torch.ones(size, dtype=torch.bool)]
    return found if math.prod(shape) < 20000 else found[:2]


MASKED = [
    *((3, 3, size) for size in (1, 2, 7, 8, 16, 33, 64)),
    *((2, 1, 1025), (1, 2, 40000), (70, 3, 7), (257, 1, 49), (3, 2, 5, 8), (2, 2, 7, 9)),
    *((1, 5), (33, 8), (257, 5), (2049, 8), (4100, 3), (1000, 136)),
]


@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_ops_with_a_mask_equal_the_reference(emulated, dtype):
    for shape in [*MASKED, MANY_PARTS] if dtype == torch.float32 else MASKED:
        for mask in masks(shape):
            check_masked_ops(emulated, *tensors(shape, dtype), mask)
    for shape in ((2, 24, 3, 5), (3, 3, 40, 30)):
        for mask in masks(shape):
            pair = (t.contiguous(memory_format=torch.channels_last) for t in tensors(shape, dtype))
            check_masked_ops(emulated, *pair, mask)
    emulated.offset = 3
    for shape in ((3, 2, 64), (3, 2, 49), (9, 64), (1, 1, 20001)):
        for mask in masks(shape):
            check_masked_ops(emulated, *tensors(shape, dtype), mask)


@pytest.mark.parametrize("shape", [(2, 3, 30000), (5000, 16)])
def test_masked_statistics_are_the_same_bits_in_any_order_and_survive_a_large_mean(emulated, shape):
    input = torch.randn(shape) * 1e-2 + 1e3
    mask = torch.rand(shape[0], *shape[2:]) < 0.3
    results = [emulated.batch_norm_stats(input, mask=mask) for _ in range(4)]
    assert all(torch.equal(result, results[0]) for result in results)
    expected = reference.batch_norm_stats(input.double(), mask=mask)
    torch.testing.assert_close(results[0].double(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_tensors_at_any_address_equal_the_reference(emulated, dtype, offset):
    """All tensors alike, which planar kernels read 16 bytes at a time still, and not alike."""
    emulated.offset = offset
    for grad_offset in (None, 0, 1):
        emulated.grad_offset = grad_offset
        for shape in ((3, 2, 64), (3, 2, 49), (9, 64), (1, 1, 20001), (2, 3, 5)):
            check_ops(emulated, *tensors(shape, dtype))


@pytest.mark.parametrize("parameter_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_parameters_of_any_dtype_equal_the_reference(emulated, dtype, parameter_dtype):
    check_ops(emulated, *tensors((4, 5, 33), dtype), parameter_dtype)
    check_ops(emulated, *tensors((40, 16), dtype), parameter_dtype)


@pytest.mark.parametrize("shape", [(4, 3, 9), (7, 8)])
def test_ops_without_weight_and_bias_equal_the_reference(emulated, shape):
    input, grad_output = tensors(shape, torch.float32)
    mean, invstd = torch.randn(shape[1]), torch.rand(shape[1]) + 0.5
    output = emulated.batch_norm_elemt(input, None, None, mean, invstd)
    assert_close(output, reference.batch_norm_elemt(input.double(), None, None, mean.double(), invstd.double()), "y")
    arguments = grad_output, input, mean, invstd, None
    results = zip(
        emulated.batch_norm_backward_reduce(*arguments), reference.batch_norm_backward_reduce(*arguments), strict=True
    )
    for actual, expected in results:
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_ops_with_an_activation_equal_the_reference(emulated, dtype):
    given = GIVEN[DTYPES.index(dtype) * 3 :] + GIVEN
    check_activations(emulated, given, [(3, 3, 5), (3, 3, 33), (2, 1, 257), (2, 2, 8200), (70, 3, 7)], dtype)
    check_activations(emulated, given[5:], [(7, 5), (33, 9), (257, 8), (2049, 8), (530, 40)], dtype)
    emulated.offset = 1
    for emulated.grad_offset in (None, 2):
        check_activations(emulated, given, [(3, 2, 49), (9, 64), (2, 3, 5)], dtype)
    emulated.offset, emulated.grad_offset = 0, 1  # the residual alone is not aligned
    check_activations(emulated, given, [(3, 2, 64), (9, 64)], dtype)


@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_ops_with_an_activation_and_a_mask_equal_the_reference(emulated, dtype):
    for shape, activation in zip(((3, 3, 33), (2, 2, 8200), (3, 2, 7, 9), (33, 9), (2049, 8)), GIVEN[1:], strict=False):
        for mask in masks(shape):
            for residual in (None, torch.randn(shape).to(dtype)):
                check_act_ops(emulated, activation, *tensors(shape, dtype), residual, mask=mask)


@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_the_gradient_in_place_of_the_other_has_the_same_bits(emulated, dtype):
    for emulated.offset, shape in ((0, (3, 3, 33)), (1, (3, 2, 49)), (0, (2, 1, 8200)), (0, (33, 9)), (0, (2049, 8))):
        input, grad = tensors(shape, dtype)
        factors = torch.rand(3, shape[1]).to(accumulate_dtype(dtype)).unbind()
        arguments = input, *factors, torch.randn(2 * shape[1]).to(factors[0]), torch.tensor(7)
        expected = emulated.batch_norm_backward_elemt(grad, *arguments)
        emulated.batch_norm_backward_elemt_(grad, *arguments)
        assert torch.equal(grad, expected)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("activation", GIVEN, ids=str)
def test_values_and_derivatives_are_those_of_torch(emulated, activation, dtype):
    check_activation(emulated, activation, dtype)


@pytest.mark.parametrize("shape", [(4, 3, 128 * 128), (4 * 128 * 128, 3), (2 * 128 * 128, 8)])
def test_statistics_survive_data_that_drifts_and_has_outliers(emulated, shape):
    input = torch.randn(shape) * 1e-2 + 1e3
    input.view(-1)[: input.numel() // 32] = 0  # the first rows are far off
    input.view(-1)[1] = 1e6
    input += torch.linspace(0, 100, shape[-1])
    packed = emulated.batch_norm_stats(input)
    torch.testing.assert_close(packed.double(), reference.batch_norm_stats(input.double()), rtol=2e-5, atol=0)


def test_statistics_survive_a_large_mean_where_the_last_slot_of_some_rows_is_empty(emulated):
    input = torch.randn(20, 3, 1003) * 1e-2 + 1e3
    packed = emulated.batch_norm_stats(input)
    torch.testing.assert_close(packed.double(), reference.batch_norm_stats(input.double()), rtol=2e-7, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("shape", [(5, 4, 33), (1, 3, 20000), (70, 33), (3000, 8)])
def test_values_that_are_not_finite_stay_in_their_channel(emulated, shape, value, place):
    check_not_finite(emulated, *tensors(shape, torch.float32), value, place)


@pytest.mark.parametrize("shape", [(2, 3, 30000), (5000, 16)])
def test_sums_have_the_same_bits_in_any_order(emulated, shape):
    input, grad_output = tensors(shape, torch.float32)
    ones = torch.ones(shape[1])
    results = set()
    for _ in range(4):
        stats = emulated.batch_norm_stats(input)
        sums = emulated.batch_norm_backward_reduce(grad_output, input, ones, ones, ones)
        results.add(torch.cat([stats, *sums]).numpy().tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("buffer_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("sizes", "channels"),
    [((5,), 3), ((4, 0, 7, 1), 5), ((3, 2), 300), ((1, 0), 2), ((0, 0), 2), (range(19), 4), (range(67), 37)],
)
def test_the_merge_of_ranks_equals_the_reference(emulated, sizes, channels, momentum, buffer_dtype, dtype):
    rows = torch.stack([reference.batch_norm_stats(torch.randn(n, channels, dtype=dtype)) for n in sizes])
    for tracked in (True, False):
        running = [torch.rand(channels).to(buffer_dtype) for _ in range(2)] if tracked else [None, None]
        counter = torch.tensor(4) if tracked or momentum is None else None
        buffers = [None if t is None else t.clone() for t in (*running, counter)]
        results = emulated.batch_norm_gather_stats(rows, *buffers, momentum, 1e-5)
        expected_buffers = [t if t is None or t.dtype == torch.int64 else t.double() for t in (*running, counter)]
        expected = reference.batch_norm_gather_stats(rows.double(), *expected_buffers, momentum, 1e-5)
        assert emulated.launches == 1
        for name, actual, wanted in zip(("mean", "invstd"), results, expected, strict=False):
            assert_close(actual, wanted, name)
        assert results[2] == expected[2]
        for actual, wanted in zip(buffers, expected_buffers, strict=True):
            assert_close(actual, wanted, "buffer") if actual is not None and actual.dtype != torch.int64 else None
        assert counter is None or torch.equal(buffers[2], expected_buffers[2])


def check_merge(ops, ranks):
    """Around the sizes of a group and a tile; channels of equal values get the same bits, in any order of threads."""
    rows = torch.randn(ranks, 42).double()
    rows[:, 20:40].abs_()
    rows[:, 40], rows[:, 41] = torch.randint(0, 9, (ranks,)), torch.randint(0, 2, (ranks,))
    rows[:, [19, 39]] = rows[:, [0, 20]]
    expected = reference.batch_norm_gather_stats(rows, None, None, None, None, 1e-5)
    merged = [ops.batch_norm_gather_stats(rows, None, None, None, None, 1e-5) for _ in range(3)]
    for mean, invstd, count in merged:
        assert (count, mean[0], invstd[0]) == (expected[2], mean[19], invstd[19])
        torch.testing.assert_close((mean, invstd), expected[:2], rtol=1e-13, atol=1e-14)
        assert torch.equal(mean, merged[0][0])
        assert torch.equal(invstd, merged[0][1])


@pytest.mark.parametrize("ranks", [4, 8, 9, 256, 257, 600])
def test_the_merge_of_many_ranks_has_the_same_bits_in_any_order(emulated, ranks):
    check_merge(emulated, ranks)


@pytest.mark.parametrize("count", [1, 2**24 + 1, 3 * 2**24 + 5])
def test_counts_are_exact(emulated, count):
    rows = torch.zeros(3, 6)
    rows[:, 4], rows[:, 5] = count % 2**24, count // 2**24
    assert emulated.batch_norm_gather_stats(rows, None, None, None, 0.1, 1e-5)[2] == 3 * count


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 1, 40000), (5, 8), (5000, 8)])
def test_each_op_is_one_kernel(emulated, shape):
    input, grad_output = tensors(shape, torch.float32)
    ones = torch.ones(shape[1])
    calls = [
        lambda: emulated.batch_norm_stats(input),
        lambda: emulated.batch_norm_elemt(input, ones, ones, ones, ones),
        lambda: emulated.batch_norm_backward_reduce(grad_output, input, ones, ones, ones),
        lambda: emulated.batch_norm_backward_elemt(
            grad_output, input, ones, ones, ones, ones.repeat(2), torch.tensor(3)
        ),
    ]
    for call in calls:
        call()
        assert emulated.launches == 1


def test_the_emulator_sees_one_value_too_many(emulated):
    """Its buffers end where they end: a tensor that is said to be larger than it is does not go unnoticed."""
    input = torch.ones(2, 3, 5)
    header = emulated._header(0, {"input": input})
    header[3] = 3
    with pytest.raises(EmulationError, match="heap-buffer-overflow"):
        emulated._call([*header, 0, 0, 0], [0.0], [(input, 0), NO_BUFFER, (torch.zeros(8), 0)])


@pytest.mark.parametrize("sizes", [(1, 2000, 2**31), (2**31, 2000, 8)], ids=["values", "samples"])
def test_parts_that_do_not_fit_32_bits_are_refused(emulated, sizes):
    """No card has the memory for them. Nothing is read: the buffers hold less than is said here."""
    header = emulated._header(0, {"input": torch.ones(2, 3, 8)})
    header[3:6] = sizes
    with pytest.raises(EmulationError, match="more than 2\\^30 values in a row, slots of a channel, or rows"):
        emulated._call([*header, 0, 0, 0], [0.0], [(torch.ones(8), 0), NO_BUFFER, (torch.zeros(8), 0)])


def test_the_last_block_has_seen_what_all_others_wrote():
    """In the source, since the emulator runs one thread at a time: it sees no missing release, acquire or barrier."""
    source = (CSRC / "cuda" / "reduce.cuh").read_text()
    body = source[source.index("bool arrives_last(") :]
    steps = re.findall(r"__syncthreads|count_up|return", body[: body.index("\n}")])
    assert steps == ["__syncthreads", "count_up", "__syncthreads", "return"]
    assert "atom.acq_rel.gpu" in source


# A bug of each kind that the emulator itself has to see, in which kernel it shows, and the error if one is certain.
PLANTED = {
    "no barrier between warps": ("stats", "reduce.cuh",
        "of_warps[thread / kWarp] = own;\n  __syncthreads();", "of_warps[thread / kWarp] = own;", None),
    "a lane missing in the mask": ("stats", "reduce.cuh", "0xffffffffu", "0x7fffffffu", "shuffle"),
    "one ticket too many": ("stats", "reduce.cuh",
        "static_cast<unsigned>(parts - 1)", "static_cast<unsigned>(parts)", "ticket counter is not zero"),
    "kernels that are not loaded before the first one": ("elemt", "launch.cuh",
        "static_cast<void>(&known_of<Kernels>);", "", "not among all_kernels"),
    "vectors from any address": ("elemt", "split.h",
        "first == 0 && g.channels % width == 0", "true", "misaligned address|heap-buffer-overflow"),
}  # fmt: skip
ALWAYS = {"no barrier between warps", "one ticket too many"}  # each takes seconds to compile


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug in ALWAYS else pytest.mark.slow) for bug in PLANTED])
def test_planted_bugs_are_found(bug, tmp_path):
    kernel, file, old, new, error = PLANTED[bug]
    shutil.copytree(CSRC, tmp_path / "csrc")
    changed = tmp_path / "csrc" / "cuda"
    text = (changed / file).read_text()
    assert old in text, "the kernels have changed: plant this bug anew"
    (changed / file).write_text(text.replace(old, new, 1))
    keep_dtypes(tmp_path / "csrc", "float")
    ops = EmulatedOps(build_changed(tmp_path, find_headers(), changed / f"{kernel}.cu"))
    try:
        with pytest.raises(EmulationError if error else AssertionError, match=error) as raised:  # noqa: PT012
            for shape in 40 * [(3, 3, 33), (1, 2, 40000), (7, 5), (9, 8), (300, 8), (9000, 8)]:  # other thread orders
                check_ops(ops, *tensors(shape, torch.float32))
        assert LEFT_OUT not in str(raised.value)
    finally:
        ops.close()
