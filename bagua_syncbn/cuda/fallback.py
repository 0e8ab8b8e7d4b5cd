"""Selects the kernels for CUDA tensors: native ones, else ATen's, else plain torch.

The native library checks each device once. If its kernels do not run there, or if ``comparison.py`` found an error, it
calls the op with the same name in ``torch.ops.bagua_syncbn_fallback``, which uses ATen's kernels. In a library without
CUDA kernels ``torch.ops.bagua_syncbn`` uses ATen's kernels directly.
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
_BUILD = "BAGUA_SYNCBN_BUILD=cuda pip install . in a checkout"
NO_CUDA_KERNELS = (
    f"this installation has no CUDA kernels. Build them with nvcc 12.4 or later: {_BUILD}. BAGUA_SYNCBN_KERNELS=aten "
    "keeps ATen's without this warning"
)
PROBLEMS = (  # by result of _C.cuda_support
    None,
    "the CUDA kernels of this installation need a newer NVIDIA driver (built with CUDA 12: 525 or later, with CUDA 13: "
    f"580 or later). Update it, or build with an older toolkit: CUDA_HOME=/path/to/toolkit {_BUILD}",
    "the CUDA kernels of this installation were built for other GPUs. Build for this one: "
    f"BAGUA_SYNCBN_CUDA_ARCHS=<compute capability, e.g. 89> {_BUILD}",
)

HAS_NATIVE = KERNELS.endswith("cuda")
_library = torch.library.Library("bagua_syncbn_fallback", "DEF")
_turned_off: dict[int, str] = {}  # by device: the error found in its native kernels
_warned: set[int | None] = set()  # devices; None for all, if there are no native kernels


def cuda_kernels(device: int) -> str:
    """Returns a description of the active kernels on a CUDA device, with the reason."""
    problem = cuda_problem(device)
    if problem is None:
        return f"native, {EXPERIMENTAL}"
    return f"{'plain torch' if WANTED == 'reference' else 'ATen'}, because {problem}"


def cuda_problem(device: int) -> str | None:
    """Returns why native kernels do not run on a CUDA device, and what to do; None if they run."""
    if device in _turned_off:
        return _turned_off[device]
    if HAS_NATIVE:
        return PROBLEMS[import_module("bagua_syncbn._C").cuda_support(device)]
    return NO_CUDA_KERNELS if WANTED == "native" else f"BAGUA_SYNCBN_KERNELS is {WANTED!r}"


def turn_off(device: int, problem: str) -> None:
    """Replaces the native kernels on a CUDA device with ATen's."""
    _turned_off[device] = problem
    import_module("bagua_syncbn._C").turn_off_cuda(device)


def _warn_once(device: torch.device) -> None:
    index = device.index if HAS_NATIVE else None
    if index in _warned:
        return
    _warned.add(index)
    can_be_built = sys.platform == "linux" and torch.version.hip is None
    if WANTED == "native" and (HAS_NATIVE or can_be_built):
        problem = cuda_problem(device.index or 0)
        warnings.warn(f"bagua_syncbn uses ATen's kernels on {device}: {problem}", RuntimeWarning, stacklevel=3)


def _as_op(kernel: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns ``kernel``, wrapped to warn before its first call on a device. The wrapper stores the kernel's error for
    Python callers."""

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
