"""``python -m bagua_syncbn`` prints versions, kernels, devices and engines as JSON, for bug reports."""

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ._cuda import EXPERIMENTAL, agreed, check_kernels, cuda_kernels
from ._ops import DTYPES, KERNELS
from ._ops.native import PROBLEM, build_info
from .bagua import engine as bagua
from .communicators import shared
from .version import __version__

_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


def collect_info() -> dict[str, Any]:
    """Compares native CUDA kernels with plain torch, and returns the information to print."""
    devices = range(torch.cuda.device_count())
    cards = [_compare_on(index) for index in devices]
    problem, has_backends = shared.problem(), dist.is_available()
    return {
        "bagua_syncbn": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "kernels": f"{KERNELS}: {PROBLEM}" if PROBLEM else KERNELS,
        "cuda_kernels": cards or [EXPERIMENTAL] * KERNELS.endswith("cuda"),
        **build_info(Path(__file__).parent),
        "devices": ["cpu", *map(torch.cuda.get_device_name, devices)],
        "torch_distributed_backends": [name for name in _BACKENDS if has_backends and dist.is_backend_available(name)],
        "exchange_on_one_host": f"collectives: {problem}" if problem else "shared memory",
        "bagua": bagua.installed_version(),
    }


def _compare_on(index: int) -> str:
    """Compares the kernels on a device, in all dtypes. Returns a line with the card, the result and the time."""
    device, begin = torch.device("cuda", index), time.perf_counter()
    try:
        for dtype in DTYPES:
            check_kernels(torch.empty(0, dtype=dtype, device=device))
        result = cuda_kernels()
    except RuntimeError as error:  # for example, a kernel broke CUDA
        result = str(error)
    name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    line = f"{device}: {name}, sm_{major}{minor}: {result}"
    cases = agreed[device]
    return f"{line} ({cases} cases equal plain torch, {time.perf_counter() - begin:.1f} s)" if cases else line


if __name__ == "__main__":
    print(json.dumps(collect_info(), indent=2))
