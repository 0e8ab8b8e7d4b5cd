"""Selects the kernels for CUDA tensors: native ones, else ATen's, else plain torch.

The native library checks once per device whether its kernels run there. If not, or if ``comparison.py`` found an error,
the library calls the op of the same name in ``torch.ops.bagua_syncbn_fallback``, which uses ATen's kernels. In a
library without CUDA kernels ``torch.ops.bagua_syncbn`` uses them directly.
"""

import sys
import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

import torch

from ..ops.definition import SCHEMAS, library
from ..ops.native import KERNELS, LIBRARY_HAS_CUDA, WANTED
from ..threads import this_thread
from . import aten

_P = ParamSpec("_P")
_R = TypeVar("_R")

EXPERIMENTAL = (
    "experimental: never run on a GPU, compared with plain torch at first use; BAGUA_SYNCBN_KERNELS=aten uses ATen's"
)
NO_CUDA_KERNELS = (
    "this installation has no CUDA kernels. Build them with nvcc 12.4 or later: BAGUA_SYNCBN_BUILD=cuda pip install . "
    "in a checkout. BAGUA_SYNCBN_KERNELS=aten keeps ATen's without this warning"
)

_HAS_NATIVE = KERNELS.endswith("cuda")
_RUNS, _OLD_DRIVER, _NO_IMAGE, _TURNED_OFF = range(4)
_FIRST_DRIVERS = {11: 450, 12: 525, 13: 580}  # by major version of CUDA

_library = torch.library.Library("bagua_syncbn_fallback", "DEF")
_turned_off: dict[int, str] = {}  # by device: the error found in its native kernels
_warned: set[int | None] = set()  # devices; None stands for all if there are no native kernels


def cuda_kernels(device: int) -> str:
    """Returns a description of the active kernels on a CUDA device, with the reason."""
    problem = cuda_problem(device)
    if problem is None:
        return f"native, {EXPERIMENTAL}"
    return f"{'plain torch' if WANTED == 'reference' else 'ATen'}, because {problem}"


def may_be_native(device: int | None) -> bool:
    """Returns whether native kernels may run on a CUDA device, as far as known without asking the driver."""
    return _HAS_NATIVE and (device or 0) not in _turned_off


def turn_off(device: int, problem: str) -> None:
    """Replaces the native kernels on a CUDA device by ATen's."""
    _turned_off[device] = problem
    import_module("bagua_syncbn._C").turn_off_cuda(device)


def cuda_problem(device: int) -> str | None:
    """Returns why native kernels do not run on a CUDA device, and what to do; None if they run."""
    if device in _turned_off:
        return _turned_off[device]
    if _HAS_NATIVE:
        return describe(*import_module("bagua_syncbn._C").cuda_support(device))
    return NO_CUDA_KERNELS if WANTED == "native" else f"BAGUA_SYNCBN_KERNELS is {WANTED!r}"


def describe(support: int, runtime: int, driver: int) -> str | None:
    """Returns the sentence for a result of ``_C.cuda_support``; versions are 1000 * major + 10 * minor."""
    if support == _RUNS:
        return None
    built = f"the CUDA kernels of this installation were built with CUDA {_version(runtime)}"
    build = "BAGUA_SYNCBN_BUILD=cuda pip install . in a checkout"
    if support == _OLD_DRIVER:
        major = runtime // 1000
        first = f" ({_FIRST_DRIVERS[major]} or later)" if major in _FIRST_DRIVERS else ""
        return (
            f"{built}, which needs an NVIDIA driver for CUDA {major}{first}; this machine's is for CUDA "
            f"{_version(driver)}. Update it, or build with an older toolkit: CUDA_HOME=/path/to/toolkit {build}"
        )
    return f"{built} for other GPUs. Build for this one: BAGUA_SYNCBN_CUDA_ARCHS=<compute capability, e.g. 89> {build}"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _warn_once(device: torch.device) -> None:
    index = device.index if _HAS_NATIVE else None
    if index in _warned:
        return
    _warned.add(index)
    can_be_built = sys.platform == "linux" and torch.version.hip is None
    if WANTED == "native" and (_HAS_NATIVE or can_be_built):
        problem = cuda_problem(device.index or 0)
        warnings.warn(f"bagua_syncbn uses ATen's kernels on {device}: {problem}", RuntimeWarning, stacklevel=3)


def _as_op(kernel: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns ``kernel`` with a warning before its first call on a device. Its error is stored for Python callers."""

    @wraps(kernel)
    def op(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        assert isinstance(args[0], torch.Tensor)
        _warn_once(args[0].device)
        try:
            return kernel(*args, **kwargs)
        except BaseException as error:
            this_thread.fallback_error = error
            raise

    return op


for _name, _schema in SCHEMAS.items():
    _op = _as_op(getattr(aten, _name))
    _library.define(_schema)
    _library.impl(_name, _op, "CompositeExplicitAutograd")
    if WANTED != "reference" and not LIBRARY_HAS_CUDA:
        library.impl(_name, _op, "CUDA")
