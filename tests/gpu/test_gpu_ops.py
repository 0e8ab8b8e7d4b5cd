"""The ops on a CUDA device: ``pytest -m gpu``, with FAIL_WITHOUT_CUDA=1 where there must be one."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from bagua_syncbn import SyncBatchNorm1d
from bagua_syncbn import _ops as ops
from bagua_syncbn._cuda import aten, comparison, selection
from bagua_syncbn._ops import activation_of
from tests.helpers.comparison import OpCase, check, check_last_of_many, check_merge
from tests.helpers.tolerances import DTYPES
from tests.ops.test_values import TABLE

pytestmark = pytest.mark.gpu


@pytest.fixture
def on_cuda():
    """Creates tensors on the device by default."""
    with torch.device("cuda"):
        yield


def test_the_library_has_cuda_kernels():
    assert ops.KERNELS.endswith(", cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_agree_with_plain_torch_on_this_device(dtype):
    assert comparison.find_difference(torch.ops.bagua_syncbn, torch.device("cuda", 0), dtype) is None


DISAGREE = """
import torch
from bagua_syncbn import sync_batch_norm
from bagua_syncbn._cuda import selection
find_difference = selection.find_difference

class Wrong:
    def __getattr__(self, name):
        op = getattr(torch.ops.bagua_syncbn, name)
        return (lambda *arguments: -op(*arguments)) if name == "batch_norm_elemt" else op

selection.find_difference = lambda native, *where: find_difference(Wrong(), *where)
x = torch.randn(8, 4, 9, 9)
options = {"activation": "silu", "mask": x[:, :1] > 0}
expected = sync_batch_norm(x, None, None, **options)
actual = sync_batch_norm(x.cuda(), None, None, **options | {"mask": options["mask"].cuda()})
torch.testing.assert_close(actual.cpu(), expected)
"""


def test_wrong_kernels_are_replaced_by_atens(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(ops.__file__).parents[2])}
    command = [sys.executable, "-c", DISAGREE]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = "uses ATen's kernels on CUDA: on .*, batch_norm_elemt for torch.float32 differs"
    assert re.search(f"RuntimeWarning: .*{said}", run.stderr)


# Inputs in several parts, aligned and misaligned rows, more channels than blocks.
LARGE = [(4100, 8), (8, 64, 28, 28), (4, 3, 100, 101), (2, 2000, 7, 7), (1, 2, 300000)]


def large(masks):
    for shape, mask in product(LARGE, masks):
        if mask != "padded" or len(shape) > 2:
            for layout in ("contiguous", "channels_last") if len(shape) == 4 else ("contiguous",):
                yield OpCase(shape, layout, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cases", ["large", *TABLE])
def test_values_and_gradients_equal_the_reference(cases, dtype, on_cuda):
    """Large inputs in all dtypes, each case of the other tables in one dtype."""
    if cases == "large":
        table = large((None, "scattered", "padded"))
    else:
        table = list(TABLE[cases]("cuda", dtype))[DTYPES.index(dtype) :: len(DTYPES)]
    for case in table:
        check(ops, case, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ops_on_atens_kernels_equal_the_reference(dtype, on_cuda):
    for case in large((None,)):
        # ATen rounds products of planar halves.
        if len(case.shape) == 2 or case.layout == "channels_last" or dtype.itemsize > 2:
            check(aten, case, dtype)


@pytest.mark.parametrize("shape", [(2**31 // 64 + 3, 64), (2, 1, 2**30), (3, 2**30 // 2**12, 2**12)], ids=str)
def test_more_than_two_to_the_31_elements(shape):
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of memory on the device")
    check_last_of_many(ops, shape, "cuda")


# Aligned and misaligned rows, channels that do and do not fill slots, several parts.
SMALL = [
    (3, 2, 16, 16),
    (2, 3, 7, 7),
    (2, 1056, 3, 11),
    (2, 8, 64, 64),
    (1, 2, 150, 151),
    (40, 24, 5, 5),
    (3, 2500, 1, 2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_every_kernel_on_small_inputs(shape, dtype, on_cuda):
    """Small, because compute-sanitizer slows kernels down a hundredfold."""
    options = {}, {"activation": activation_of("silu"), "residual": True}, {"mask": "scattered"}
    for layout, given in product(("contiguous", "channels_last"), options):
        check(ops, OpCase(shape, layout, **given), dtype)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("buffer_dtype", DTYPES, ids=str)
def test_every_kernel_that_merges_ranks(buffer_dtype, momentum, on_cuda):
    for dtype in (torch.float32, torch.float64):
        check_merge(ops, (4, 0, 7), 300, dtype, buffer_dtype, momentum)


def test_a_first_call_in_a_capture_is_refused(monkeypatch):
    monkeypatch.setattr(selection, "_checked", set())
    layer, input = SyncBatchNorm1d(3).cuda(), torch.randn(8, 3).cuda()
    with pytest.raises(RuntimeError, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(input)
    layer(input)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(input)
