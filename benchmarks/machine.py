"""Describes the machine and its software; sets up malloc."""

import contextlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import bagua_syncbn
from bagua_syncbn import _ops as ops
from bagua_syncbn.communicators import shared

from .recorded import find_commit

# Turns off mapped blocks, because glibc limits their threshold to 32 MiB, and keeps up to 16 GiB of freed memory at the
# end of the heap, like the allocators of training jobs (jemalloc, tcmalloc, torch's on GPUs): a step reuses the memory
# of the previous step. With glibc's default, large blocks return to the system, and each step of any implementation
# maps its output and gradient again.
_KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**29),
}


def keep_memory() -> None:
    """Restarts the program with a malloc that keeps memory: glibc reads the variables at start. No-op if set."""
    if not all(os.environ.get(name) == value for name, value in _KEEP_MEMORY.items()):
        os.execve(sys.executable, sys.orig_argv, os.environ | _KEEP_MEMORY)


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_counts(processes: int) -> list[int]:
    """Returns 1 and the number of cores per process."""
    return sorted({1, max(1, count_cores() // processes)})


def describe_machine() -> dict[str, Any]:
    facts = {}
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {
        "processor": facts.get("model name") or platform.processor() or platform.machine(),
        "cores": count_cores(),
        "virtual": "hypervisor" in facts.get("flags", "").split(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": platform.system(),
    }


def describe_exchange() -> str:
    """Returns the transport of small messages on this host."""
    return "by collectives" if shared.problem() else "through shared memory"


def describe_versions() -> dict[str, str]:
    versions = {
        "bagua_syncbn": f"{bagua_syncbn.__version__} ({ops.KERNELS})",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if commit := find_commit():
        versions["commit"] = commit
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["fairscale"] = importlib.metadata.version("fairscale")
    return versions
