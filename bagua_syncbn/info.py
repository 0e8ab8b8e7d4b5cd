"""``python -m bagua_syncbn.info [--json]``: what this installation consists of, for bug reports."""

import argparse
import json
import platform
from typing import Any

import torch
import torch.distributed as dist

from .communicators import bagua
from .version import __version__

_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


def collect_info() -> dict[str, Any]:
    """Returns versions, kernels, devices and engines, as printed by ``python -m bagua_syncbn.info --json``."""
    backends = [name for name in _BACKENDS if dist.is_available() and dist.is_backend_available(name)]
    return {
        "bagua_syncbn": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "kernels": "reference (plain torch)",
        "devices": ["cpu", *(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))],
        "torch_distributed_backends": backends,
        "bagua": bagua.installed_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bagua_syncbn.info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    info = collect_info()
    if parser.parse_args().json:
        print(json.dumps(info, indent=2))
        return
    for key, value in info.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        print(f"{key:28}{'none' if shown in (None, '') else shown}")


if __name__ == "__main__":
    main()
