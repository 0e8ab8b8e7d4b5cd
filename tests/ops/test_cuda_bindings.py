"""Files between torch and the CUDA kernels, csrc/cuda/torch, run on CPU tensors.

The kernels below are emulated (``tests/ops/emulator``). context.cpp, which asks for device and stream, is replaced:
a test says which stream it is, and whether a graph is captured on it.
"""

import shutil
import warnings

import pytest
import torch
from aten_functions import ATEN
from cases import SHAPES_IN_LAYOUTS, laid_out
from comparison import check_act_ops, check_masked_ops, check_ops
from emulated import find_headers
from tolerances import DTYPES, assert_close
from torch.profiler import ProfilerActivity, profile
from wrong_arguments import WRONG_ARGUMENTS, check_refused

from bagua_syncbn.ops import fallback, reference
from bagua_syncbn.ops.activations import activation_of

pytestmark = pytest.mark.skipif(
    find_headers() is None or shutil.which("g++") is None, reason="needs g++ and the headers of the CUDA toolkit"
)

SPLIT = (1, 1, 40000)  # a shape whose reductions are split


@pytest.fixture
def ops(library):
    library.emulate_stream(0, 0, False)
    return library.ops


def tensors(shape, dtype):
    return (torch.randn(shape) * 2 + 1).to(dtype), torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "layout"), [*SHAPES_IN_LAYOUTS, (SPLIT, "contiguous")])
def test_ops_called_by_torch_equal_the_reference(ops, shape, layout, dtype):
    check_ops(ops, *(laid_out(tensor, layout) for tensor in tensors(shape, dtype)), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ops_with_an_activation_equal_the_reference(ops, dtype):
    for shape, layout, activation in (
        ((3, 4, 33), "transposed", "silu"),
        ((2, 16, 5, 6), "channels_last", "gelu"),
        ((2, 3, 5, 6), "sliced", ("elu", 0.5)),
        (SPLIT, "contiguous", "tanh"),
    ):
        input, grad_output = (laid_out(tensor, layout) for tensor in tensors(shape, dtype))
        for residual in (None, laid_out(input.cos(), layout), input.cos().contiguous()):
            check_act_ops(ops, activation_of(activation), input, grad_output, residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ops_with_a_mask_equal_the_reference(ops, dtype):
    for shape, layout in (((7, 5), "contiguous"), ((3, 4, 33), "transposed"), ((2, 16, 5, 6), "channels_last")):
        masks = [torch.rand(shape[0], *shape[2:]) < 0.5]
        masks += [torch.randint(shape[-1] + 1, shape[:1])] * (len(shape) > 2)
        for mask in masks:
            check_masked_ops(ops, *(laid_out(tensor, layout) for tensor in tensors(shape, dtype)), mask)
    empty, ones, mask = torch.ones(0, 3, 4), torch.ones(3), torch.ones(0, dtype=torch.int64)
    assert ops.batch_norm_stats(empty, 7 * 2**24 + 5, 9, mask).tolist() == [0] * 8 + [7, 5, 9]
    assert ops.batch_norm_elemt(empty, None, None, ones, ones, mask).shape == (0, 3, 4)
    assert ops.batch_norm_backward_reduce(empty, empty, ones, ones, None, mask=mask)[0].tolist() == [0] * 6


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced", "transposed"])
def test_the_gradient_is_written_where_it_is_asked_for(ops, layout):
    """In place of the other, and of a residual to a tensor of any layout."""
    input, grad_output = tensors((2, 16, 5, 6), torch.float32)
    ones, sums, count = torch.ones(16), torch.randn(32), torch.tensor(60)
    for own in ("contiguous", "channels_last"):
        x, grad = laid_out(input, own), laid_out(grad_output, layout)
        expected = ops.batch_norm_backward_elemt(grad_output, input, None, ones, ones, sums, count)
        ops.batch_norm_backward_elemt_(grad, x, None, ones, ones, sums, count)
        torch.testing.assert_close(grad, expected, rtol=0, atol=0)
        ops.batch_norm_backward_reduce(grad_output, x, ones, ones, None, None, None, None, None, 1, 0.0, grad)
        torch.testing.assert_close(grad, grad_output.where(input > 1, 0), rtol=0, atol=0)


def test_a_grad_output_of_another_layout_equals_the_reference(ops):
    input, grad_output = tensors((2, 16, 5, 6), torch.float32)
    check_ops(ops, input, laid_out(grad_output, "channels_last"))
    check_ops(ops, laid_out(input, "channels_last"), laid_out(grad_output, "sliced"))


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0)])
def test_empty_input_gives_zeros_and_its_own_shape(ops, shape):
    input, ones = torch.ones(shape), torch.ones(3)
    assert ops.batch_norm_stats(input).tolist() == [0] * 8
    assert ops.batch_norm_stats(input.double(), 7, 9).tolist() == [0] * 8 + [0, 7, 9]
    assert set(aten_calls(ops.batch_norm_stats, input, 7, 9)) <= {"aten::copy_"}  # an empty copy launches nothing
    assert ops.batch_norm_elemt(input, None, None, ones, ones).shape == shape
    sums, *_ = ops.batch_norm_backward_reduce(input, input, ones, ones, None, 5 * 2**24 + 3)
    assert sums.tolist() == [0] * 6 + [3, 9, 0, 0, 5, 25]
    results = ops.batch_norm_backward_reduce(input, input, ones, ones, ones.half())
    assert [t.tolist() for t in results] == [[0] * 6, [0] * 3, [0] * 3]
    assert [t.dtype for t in results] == [torch.float32, torch.float16, torch.float16]
    assert ops.batch_norm_backward_elemt(input, input, None, ones, ones, ones.repeat(2), torch.tensor(1)).shape == shape
    assert ops.batch_norm_elemt(input, None, ones, ones, ones, None, input, 5, 0.0).shape == shape
    sums, *_ = ops.batch_norm_backward_reduce(input, input, ones, ones, None, 3, None, None, input, 5, 0.0, input + 0)
    assert sums.tolist() == [0] * 6 + [3, 9, 0, 0, 0, 0]
    arguments = input, input, None, ones, ones, ones.repeat(2), torch.tensor(1)
    assert ops.batch_norm_backward_elemt(*arguments, bias=ones, activation=5).shape == shape
    ops.batch_norm_backward_elemt_(*arguments)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_running_statistics_that_are_strided_views_are_updated(ops, dtype, momentum):
    rows = torch.stack([reference.batch_norm_stats(torch.randn(n, 3)) for n in (4, 0, 7)])
    wide = torch.rand(2, 7).to(dtype)
    untouched, counter = wide[:, ::2].clone(), torch.tensor(4)
    buffers = [view.double() for view in wide[:, 1::2].unbind()]
    mean, invstd, count = ops.batch_norm_gather_stats(rows, *wide[:, 1::2].unbind(), counter, momentum, 1e-5)
    expected = reference.batch_norm_gather_stats(rows.double(), *buffers, torch.tensor(4), momentum, 1e-5)
    for actual, wanted in zip((mean, invstd, *wide[:, 1::2].unbind()), (*expected[:2], *buffers), strict=True):
        assert_close(actual, wanted, "merged")
    assert (count, counter) == (11, 5)
    assert torch.equal(wide[:, ::2], untouched)


@pytest.mark.parametrize("rows", [torch.rand(8, 2).T, torch.rand(2, 16)[:, ::2]], ids=["transposed", "sliced"])
def test_gathered_rows_may_be_strided_views(ops, rows):
    rows[:, -2:] = torch.tensor([[3.0, 0.0], [5.0, 1.0]])
    results = ops.batch_norm_gather_stats(rows, None, None, None, None, 1e-5)
    expected = reference.batch_norm_gather_stats(rows.double(), None, None, None, None, 1e-5)
    assert_close(results[0], expected[0], "mean")
    assert results[2] == 2**24 + 8


@pytest.mark.parametrize(("call", "message"), WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused_by_name(ops, call, message):
    check_refused(ops, call, message)


def test_all_must_be_on_one_device(ops):
    """Called past the dispatcher, which would send a call with a meta tensor elsewhere."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    x, c, count, mask = torch.ones(2, 3, 4), torch.ones(3), torch.tensor(8), torch.ones(2, 4, dtype=torch.bool)
    calls = {
        ops.batch_norm_gather_stats: ([torch.ones(2, 8), c, c, count, 0.1, 1e-5], range(1, 4)),
        ops.batch_norm_elemt: ([x, c, c, c, c, mask, x, 1], range(1, 7)),
        ops.batch_norm_backward_reduce: ([x, x, c, c, c, None, mask, c, x, 1, 0.0, x], (0, 2, 3, 6, 7, 8, 11)),
        ops.batch_norm_backward_elemt: (
            [x, x, c, c, c, torch.ones(6), count, 1, None, 0, mask, False, c, 1],
            (0, *range(2, 7), 10, 12),
        ),
        ops.batch_norm_backward_elemt_: ([x, x, c, c, c, torch.ones(6), count], range(2, 7)),
    }
    for op, (arguments, places) in calls.items():
        for place in places:
            elsewhere = [a.to("meta") if i == place else a for i, a in enumerate(arguments)]
            message = "expected it on the device of the other arguments, got a device of another kind beside cpu"
            with pytest.raises(RuntimeError, match=f"^{op._schema.arguments[place].name}: {message}$"):
                op.redispatch(keys, *elsewhere)


def aten_calls(function, *args):
    """The ATen ops that ``function(*args)`` runs, outermost ones only."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        function(*args)
    events = [event for event in prof.events() if event.name.startswith("aten::")]
    return [e.name for e in events if e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::")]


def test_nothing_is_copied_filled_or_read_in_between(ops, library):
    """Whatever op of ATen a call came to would be a launch, or worse, on a GPU. Memory is allocated by none."""
    emulate_stream = library.emulate_stream
    emulate_stream(1, 1, False)
    ops.batch_norm_stats(torch.randn(SPLIT))  # makes the counters of the stream
    for shape in ((4, 3, 8, 8), SPLIT):
        x, g = tensors(shape, torch.float32)
        c = torch.ones(shape[1])
        sums, rows, counter = c.repeat(2), torch.ones(2, 2 * len(c) + 2), torch.tensor(0)
        mask, gradient = x.select(1, 0) > 0, (g, x, c, c, c, sums, counter)
        calls = [
            (ops.batch_norm_stats, (x,)),
            (ops.batch_norm_stats, (x, None, 0, mask)),
            (ops.batch_norm_gather_stats, (rows, c.clone(), c.clone(), counter, None, 1e-5)),
            (ops.batch_norm_elemt, (x, c, c, c, c)),
            (ops.batch_norm_elemt, (x, c, c, c, c, mask, g, 1, 0.0)),
            (ops.batch_norm_backward_reduce, (g, x, c, c, c)),
            (ops.batch_norm_backward_reduce, (g, x, c, c, c, None, mask, c, g, 1, 0.0, x + 0)),
            (ops.batch_norm_backward_elemt, gradient),
            (ops.batch_norm_backward_elemt, (*gradient, 1, None, 0, mask, True, c, 1, 0.0)),
            (ops.batch_norm_backward_elemt_, gradient),
        ]
        for op, arguments in calls:
            assert aten_calls(op, *arguments) == []


def test_each_stream_has_counters_of_its_own_which_are_made_once(ops, library):
    emulate_stream = library.emulate_stream
    input = torch.randn(SPLIT)
    expected = ops.batch_norm_stats(input)

    def sets_made(handle, id, capturing=False):
        emulate_stream(handle, id, capturing)
        results = []
        made = aten_calls(lambda: results.append(ops.batch_norm_stats(input))).count("aten::new_zeros")
        assert torch.equal(results[0], expected)
        return made

    assert [sets_made(100, 7) for _ in range(3)] == [1, 0, 0]
    assert [sets_made(200, 8) for _ in range(2)] == [1, 0]
    assert sets_made(100, 7) == 0
    # The handle of a destroyed stream has come back as another one's.
    assert [sets_made(100, 9) for _ in range(2)] == [1, 0]
    assert sets_made(200, 8) == 0
    # A captured kernel takes no set that others have, and leaves none to them.
    assert [sets_made(100, 9, capturing=True) for _ in range(2)] == [1, 1]
    assert sets_made(300, 10, capturing=True) == 1
    assert [sets_made(300, 10) for _ in range(2)] == [1, 0]
    # Where nothing is split there is nothing to count.
    emulate_stream(400, 11, False)
    assert aten_calls(lambda: ops.batch_norm_stats(torch.randn(2, 3, 4))).count("aten::new_zeros") == 0
    assert sets_made(400, 11) == 1


@pytest.mark.parametrize(("support", "message"), [
    (1, r"CUDA 13\.0, which needs an NVIDIA driver for CUDA 13 \(580 or later\); the one here is for CUDA 12\.8"),
    (2, "CUDA 13.0 for other cards. Build for this one: BAGUA_SYNCBN_CUDA_ARCHS"),
], ids=["old driver", "no machine code"])  # fmt: skip
def test_where_the_kernels_do_not_run_atens_compute_and_say_so_once(ops, library, monkeypatch, support, message):
    monkeypatch.setattr(fallback, "cuda_problem", lambda device: fallback.describe(support, 13000, 12080))
    monkeypatch.setattr(fallback, "_warned", set())
    for name, function in ATEN.items():
        monkeypatch.setattr(torch, name, function)
    input, grad_output = tensors(SPLIT, torch.float16)
    ops.batch_norm_stats(input)  # makes the counters of the stream
    expected = torch.ops.bagua_syncbn.batch_norm_stats.default(input.double())
    library.emulate_support(support)
    try:
        with pytest.warns(RuntimeWarning, match=message):
            stats = ops.batch_norm_stats(input)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            buffers = torch.zeros(1), torch.ones(1), torch.tensor(4)
            ops.batch_norm_gather_stats(stats[None], *buffers, None, 1e-5)
        assert aten_calls(ops.batch_norm_stats, input) != []
        check_ops(ops, input, grad_output, torch.float32)
    finally:
        library.emulate_support(0)
    assert_close(stats, expected, "stats")
    assert_close(buffers[0], expected[:1] / 5, "running_mean")
    assert buffers[2] == 5
    assert aten_calls(ops.batch_norm_stats, input) == []


def test_a_driver_and_a_card_that_will_do_are_no_problem():
    assert fallback.describe(0, 13000, 13010) is None
