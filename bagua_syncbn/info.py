"""Prints versions, kernels, devices and engines of this installation, for bug reports."""

import argparse
import json
import platform
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .communicators import bagua, shared
from .cuda import EXPERIMENTAL, check_kernels_on, cuda_kernels
from .ops import DTYPES, KERNELS
from .version import __version__

_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


def collect_info() -> dict[str, Any]:
    """Returns the output of ``python -m bagua_syncbn --json``. First compares native CUDA kernels with plain torch."""
    devices = range(torch.cuda.device_count())
    for index, dtype in product(devices, DTYPES):
        check_kernels_on(torch.device("cuda", index), dtype)
    cuda = [f"cuda:{index}: {cuda_kernels(index)}" for index in devices]
    build_info = Path(__file__).with_name("build_info.json")  # written by setup.py
    problem = shared.problem()
    return {
        "bagua_syncbn": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "kernels": KERNELS,
        "cuda_kernels": cuda or [EXPERIMENTAL] * KERNELS.endswith("cuda"),
        **(json.loads(build_info.read_text()) if build_info.exists() else {}),
        "devices": ["cpu", *map(torch.cuda.get_device_name, devices)],
        "torch_distributed_backends": [
            name for name in _BACKENDS if dist.is_available() and dist.is_backend_available(name)
        ],
        "exchange_on_one_host": f"collectives: {problem}" if problem else "shared memory",
        "bagua": bagua.installed_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bagua_syncbn",
        description=__doc__,
        epilog="python -m bagua_syncbn verify compares a training step on all ranks with one process: verify --help",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    info = collect_info()
    if as_json:
        print(json.dumps(info, indent=2))
        return
    for key, value in info.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        print(f"{key:28}{shown or 'none'}")


if __name__ == "__main__":
    main()
