"""The tests for a GPU on CPU tensors and the emulated kernels: what they say in Python, and the kernels' values.

"cuda" means the CPU in them, and NCCL gloo. Streams, graphs, launches and devices that differ are not rehearsed.
"""

import shutil
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import test_gpu_layers
import test_gpu_ops
import torch
import torch.distributed as dist
import without_pytest
from aten_functions import ATEN
from emulated import find_headers
from test_gpu_layers import nccl  # noqa: F401  a fixture
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from bagua_syncbn import ops

pytestmark = [
    pytest.mark.skipif(find_headers() is None or shutil.which("g++") is None, reason="needs g++ and CUDA's headers"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="they run there"),
]


class OnCPU(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda or (function is torch.Tensor.to and isinstance(args[1], int)):
            return args[0]
        is_cuda = lambda value: isinstance(value, str | torch.device) and str(value).startswith("cuda")  # noqa: E731
        args = ["cpu" if is_cuda(value) else value for value in args]
        return function(*args, **{name: "cpu" if is_cuda(value) else value for name, value in (kwargs or {}).items()})


@pytest.fixture(scope="module", autouse=True)
def on_cpu(library):
    threads, join, compare = torch.get_num_threads(), dist.init_process_group, test_gpu_ops.check

    def check(ops, case, dtype, device):
        """A sample of each image, and few channels and values: emulated, a million values take 0.1 s."""
        most = 40000 if dtype == torch.float16 else 40  # test_values.py tries the kernels in all dtypes
        sizes = [min(size, most) for size in case.shape]
        shape = (1, min(sizes[1], 16), *sizes[2:]) if len(sizes) == 4 else tuple(sizes)
        compare(ops, case._replace(shape=shape), dtype)

    torch.set_num_threads(1)
    library.emulate_stream(0, 0, False)
    with (
        patch.object(test_gpu_ops, "ops", SimpleNamespace(**vars(ops) | vars(library.ops))),
        patch.object(test_gpu_ops, "check", check),
        patch.object(dist, "init_process_group", lambda backend, device_id=None, **rest: join("gloo", **rest)),
        patch.object(test_gpu_layers, "DistributedDataParallel", lambda model, **_: DistributedDataParallel(model)),
        patch.multiple(torch, **ATEN),
        OnCPU(),
    ):
        yield
    torch.set_num_threads(threads)


# All but the tests of what was built, of streams and graphs, of launches, of several ranks, and of billions of values.
for _module in (test_gpu_ops, test_gpu_layers):
    _left_out = ("library", "stream", "graph", "captured", "launch", "wait", "share", "ids", "two_gpus", "to_the_31")
    globals().update(
        {n: t for n, t in vars(_module).items() if n.startswith("test_") and not any(word in n for word in _left_out)}
    )


def test_a_machine_without_pytest_runs_them_too(capsys):
    ends = []
    with (
        patch.dict(sys.modules),
        patch.object(sys, "argv", ["", "test_gpu_ops.py", "-k", "merges"]),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(without_pytest.os, "_exit", ends.append),
    ):
        del sys.modules["test_gpu_ops"]
        without_pytest.main()
    assert (ends, capsys.readouterr().out) == ([0], "8 passed, 0 failed\n")
