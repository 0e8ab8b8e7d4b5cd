"""What the machine has of what ``make gpu`` needs, each missing thing by its name. Run by the Python that will run all.

Prints one JSON object: ``machine``, facts for the results, and ``missing``.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib import metadata, util
from pathlib import Path
from typing import Any

CUDA_HOME = os.environ.get("CUDA_HOME", "/usr/local/cuda")


def find_tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(f"{CUDA_HOME}/bin/{name}")


def first_line(command: list[str], having: str = "") -> str | None:
    """The first line of what a command prints that has ``having`` in it; None if it cannot be run."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next((line.strip() for line in output.splitlines() if having in line), None)


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def pytest_version() -> str | None:
    """None where there is none, or one that does not know where the tests' helpers are: the tests are run without."""
    version = version_of("pytest")
    return version if version and util.find_spec("pytest") and int(version.split(".")[0]) >= 7 else None


def bagua_version() -> str | None:
    """By the name of the package: Bagua's wheels, one for each CUDA, have names of their own."""
    found = metadata.packages_distributions().get("bagua")
    return metadata.version(found[0]) if found else None


def examine_torch() -> tuple[dict[str, Any], list[str]]:
    start = time.monotonic()
    try:
        import torch
    except Exception as error:  # a broken installation raises other things than ImportError
        return {}, [f"torch ({type(error).__name__}: {error})"]
    facts: dict[str, Any] = {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
    facts["import_seconds"] = round(time.monotonic() - start, 1)
    missing = []
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        missing.append(f"torch 2.10 or later (this is {torch.__version__})")
    if torch.version.cuda is None:
        missing.append("a CUDA build of torch")
    elif not torch.cuda.is_available():
        missing.append("a CUDA device that torch can use")
    else:
        device = torch.cuda.get_device_properties(0)
        facts |= {
            "card": device.name,
            "architecture": f"{device.major}{device.minor}",
            "multiprocessors": device.multi_processor_count,
            "l2_bytes": device.L2_cache_size,
            "memory_bytes": device.total_memory,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        }
        if facts["nccl"] is None:
            missing.append("NCCL in torch")
    return facts, missing


def examine() -> dict[str, Any]:
    facts, missing = examine_torch()
    nvcc = find_tool(os.environ.get("NVCC", "nvcc"))
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    facts |= {
        "python": platform.python_version(),
        "driver": first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "nvcc": nvcc and first_line([nvcc, "--version"], "release"),
        "compiler": compiler and first_line([*compiler.split(), "--version"]),
        "compute_sanitizer": find_tool("compute-sanitizer"),
        "bagua": bagua_version(),
        "pytest": pytest_version(),
    }
    needed = {
        "Python 3.10 or later": sys.version_info >= (3, 10),
        "nvcc (set NVCC or CUDA_HOME)": nvcc,
        "a C++17 compiler (g++, or set CXX)": compiler,
        "Python.h (python3-dev)": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    return {"machine": facts, "missing": missing + [name for name, found in needed.items() if not found]}


if __name__ == "__main__":
    print(json.dumps(examine()))
