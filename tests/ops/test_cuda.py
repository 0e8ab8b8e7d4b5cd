"""The CUDA kernels and their torch bindings on CPU tensors: ``tests/ops/emulator`` runs threads in random order.

test_values.py compares values. ``make sanitize`` runs both files under sanitizers. The emulator cannot measure speed,
or detect races between two waits of a thread.
"""

import copy
import ctypes
import mmap
import shutil
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bagua_syncbn._ops import reference
from tests.helpers.emulated import CSRC
from tests.helpers.op_calls import op_calls, op_of
from tests.helpers.steps import assert_same_bits
from tests.helpers.tolerances import DTYPES


@pytest.mark.parametrize("shape", [(2, 3, 30000), (5000, 16)])
def test_sums_have_the_same_bits_in_any_order(emulated, shape):
    for key, arguments in op_calls(shape).items():
        if "stats" in key or "reduce" in key:
            first, *others = (op_of(emulated, key)(**copy.deepcopy(arguments)) for _ in range(4))
            assert_same_bits(others, [first] * 3, key)


@pytest.mark.parametrize("shape", [(1, 2, 40001), (20000, 3)])
def test_the_variance_of_equal_values_is_zero(emulated, shape):
    for dtype, masked in product(DTYPES, (False, True)):
        input = torch.full(shape, 1 / 3, dtype=dtype)
        mask = torch.arange(input[:, 0].numel()).view_as(input[:, 0]) % 3 > 0
        stats = emulated.batch_norm_stats(input, mask=mask if masked else None)
        assert stats[: shape[1]].to(dtype).eq(input[0, 0].flatten()[0]).all()
        assert stats[shape[1] : 2 * shape[1]].eq(0).all()


def test_the_variance_survives_a_large_mean_if_the_first_part_has_no_valid_values(emulated):
    input, mask = torch.randn(1, 2, 40000).double() + 1e6, torch.zeros(1, 40000, dtype=torch.bool)
    mask[:, 30000:31000] = True
    stats, expected = (ops.batch_norm_stats(input, mask=mask) for ops in (emulated, reference))
    torch.testing.assert_close(stats, expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("ranks", [4, 8, 9, 32, 33, 600])
def test_the_merge_of_many_ranks_has_the_same_bits_in_any_order(emulated, ranks):
    """Equal channels get equal bits. Covers numbers of ranks around a warp's size and around the number loaded at a
    time."""
    rows = torch.randn(ranks, 142).double()
    rows[:, 70:140].abs_()
    rows[:, 140], rows[:, 141] = torch.randint(0, 9, (ranks,)), torch.randint(0, 2, (ranks,))
    rows[:, [69, 139]] = rows[:, [0, 70]]
    expected = reference.batch_norm_gather_stats(rows, None, None, None, None, 1e-5)
    merged = [emulated.batch_norm_gather_stats(rows, None, None, None, None, 1e-5) for _ in range(3)]
    for mean, invstd, count in merged:
        assert (count, mean[0], invstd[0]) == (expected[2], mean[69], invstd[69])
        torch.testing.assert_close((mean, invstd), expected[:2], rtol=1e-13, atol=1e-14)
        assert torch.equal(mean, merged[0][0])
        assert torch.equal(invstd, merged[0][1])


@pytest.mark.parametrize(("channels", "momentum", "skips", "launches"), [
    (256, None, True, 1), (257, 0.1, False, 1), (257, None, False, 2), (257, 0.1, True, 2),
])  # fmt: skip
def test_a_merge_is_one_kernel_unless_its_blocks_wait_for_each_other(
    emulated, library, channels, momentum, skips, launches
):
    rows, buffers = torch.ones(2, 2 * channels + 2), [*torch.rand(2, channels).unbind(), torch.tensor(4)]
    library.launches()
    emulated.batch_norm_gather_stats(rows, *buffers, momentum, 1e-5, None, skips)
    assert len(library.launches()) == launches


@pytest.mark.parametrize("sizes", [(1, 2000, 2**31), (2**31, 2000, 8)], ids=["values", "samples"])
def test_parts_that_need_64_bit_indices_are_refused(emulated, sizes):
    """The memory is only reserved: reading it would crash."""
    memory = mmap.mmap(-1, 2 * torch.Size(sizes).numel(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it is read-only
        input = torch.frombuffer(memory, dtype=torch.bfloat16).view(sizes)
    with pytest.raises(RuntimeError, match="more than 2\\^30 values in a row, or slots in a channel"):
        emulated.batch_norm_stats(input)


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize(("interleaved", "sizes"), [
    (False, (2**18, 2**10, 17)), (False, (4, 2**21, 2**10)), (True, (2**18, 2**10, 17)), (True, (64, 2**27, 1)),
])  # fmt: skip
def test_offsets_and_steps_beyond_32_bits(library, interleaved, sizes, reduces):
    last = library.native.last_offset(interleaved, *map(ctypes.c_int64, sizes), reduces)
    assert 0 < torch.Size(sizes).numel() - last < 2**20


def test_a_load_that_may_succeed_later_raises(library):
    runs, old_driver, no_image, out_of_memory, unavailable = 0, 35, 209, 2, 46
    assert [library.native.load_with(error) for error in (runs, old_driver, no_image)] == [0, 1, 2]
    assert [library.native.load_with(error) for error in (out_of_memory, unavailable)] == [-1, -1]


def test_the_kind_of_a_fault_is_written_after_the_rest(emulated, library):
    record, at_fence = torch.zeros(8, dtype=torch.int64), (ctypes.c_int64 * 8).in_dll(library.native, "at_fence")
    watched = ctypes.c_void_p.in_dll(library.native, "watched")
    watched.value = record.data_ptr()
    rows = torch.ones(3, 7)
    rows[2, 4] = 5
    emulated.batch_norm_gather_stats(rows, None, None, None, 0.1, 1e-5, record)
    watched.value = None
    assert record.tolist() == [1, 2, 1, 1, 1, 5, 1, 1]
    assert list(at_fence) == [0, *record.tolist()[1:]]


def test_tensors_on_different_devices_are_refused_by_name(emulated):
    """Bypasses the dispatcher, which would pick other kernels for a meta tensor."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for key, arguments in op_calls().items():
        for name, argument in arguments.items():
            if isinstance(argument, torch.Tensor) and name not in ("input", "gathered"):
                message = "expected all tensors on the same device, got an unsupported device and cpu"
                with pytest.raises(RuntimeError, match=f"^{name}: {message}$"):
                    op_of(emulated, key).redispatch(keys, **arguments | {name: argument.to("meta")})


def aten_calls(function, **arguments):
    """Returns the outermost ATen ops that ``function(**arguments)`` runs."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        function(**arguments)
    events = [event for event in prof.events() if event.name.startswith("aten::")]
    return [e.name for e in events if e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::")]


def test_an_op_launches_one_kernel_and_a_second_one_to_merge_parts(emulated, library):
    """On a GPU, each ATen op in a call would be an additional launch."""
    reductions = {"batch_norm_stats": "merge_stats", "batch_norm_backward_reduce": "merge_sums"}
    for shape in ((4, 3, 8, 8), (5000, 8), (1, 1, 40000)):
        for key, arguments in op_calls(shape).items():
            library.launches()
            assert aten_calls(op_of(emulated, key), **arguments) == []
            first, *others = library.launches()
            is_split = first.endswith(" in parts") and first.startswith(("stats_", "backward_reduce_"))
            assert is_split == (key.split()[0] in reductions and shape != (4, 3, 8, 8))
            assert [name.split("<")[0] for name in others] == ([reductions[key.split()[0]]] if is_split else [])


NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", [75, 80, 86, 90, 100, 120])
def test_kernels_compile_without_warnings_and_register_spills(arch, tmp_path):
    flags = f"-std=c++17 -O3 -arch=sm_{arch} -Werror=all-warnings -Xptxas=-warn-spills,-warn-lmem-usage -cubin".split()

    def compile(source):
        subprocess.run([NVCC, *flags, source, "-o", tmp_path / f"{source.stem}.cubin"], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile, (CSRC / "cuda").glob("*.cu")))
