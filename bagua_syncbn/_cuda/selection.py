"""Selects the kernels for CUDA tensors: native ones if they agree with plain torch, else ATen's, in the whole process.

The native kernels are compared before the first eager call with each device and dtype.
"""

import logging
import sys
import warnings
from importlib import import_module
from threading import Lock
from typing import ClassVar

import torch
from torch import Tensor

from .._ops.definition import SCHEMAS, library
from .._ops.native import KERNELS, WANTED
from .._torch.autograd import is_capturing, is_transforming
from .._warnings import warn
from . import aten
from .comparison import find_difference, wait_for

EXPERIMENTAL = (
    "experimental: never run on a GPU, compared with plain torch at first use; BAGUA_SYNCBN_KERNELS=aten uses ATen's"
)
_BUILD = "BAGUA_SYNCBN_BUILD=cuda pip install . in a checkout"
NO_CUDA_KERNELS = (
    f"this installation has no CUDA kernels. Build them with nvcc 12.4 or later: {_BUILD}. BAGUA_SYNCBN_KERNELS=aten "
    "keeps ATen's without this warning"
)
_PROBLEMS = (  # by result of _C.cuda_support
    None,
    "the CUDA kernels of this installation need a newer NVIDIA driver (built with CUDA 12: 525 or later, with CUDA 13: "
    f"580 or later). Update it, or build with an older toolkit: CUDA_HOME=/path/to/toolkit {_BUILD}",
    "the CUDA kernels of this installation were built for other GPUs. Build for this one: "
    f"BAGUA_SYNCBN_CUDA_ARCHS=<compute capability, e.g. 89> {_BUILD}",
)

HAS_NATIVE = KERNELS.endswith("cuda")
_log = logging.getLogger("bagua_syncbn")
_lock = Lock()  # DataParallel has a thread for each device
_checked: set[tuple[torch.device, torch.dtype]] = set()


class _State:
    """``problem``: reason for using ATen's kernels or plain torch; None if native kernels run.
    ``warns``: whether the next check warns about the problem. ``in_use``: whether calls may be running native kernels.
    """

    problem: ClassVar[str | None] = None
    warns = WANTED == "native" and (HAS_NATIVE or (sys.platform == "linux" and torch.version.hip is None))
    in_use = False


def cuda_kernels() -> str:
    """Returns a description of the active kernels for CUDA tensors, with the reason."""
    if _State.problem is None:
        return f"native, {EXPERIMENTAL}"
    return f"{'plain torch' if WANTED == 'reference' else 'ATen'}, because {_State.problem}"


def check_kernels(input: Tensor) -> bool:
    """Compares the native kernels with plain torch once for the device and dtype of ``input``.

    ATen's kernels replace them if results differ. Returns False if the comparison must wait for a later call.

    Raises:
        RuntimeError: a graph is being captured, so kernels cannot be compared; a kernel broke CUDA; or native kernels
            differ or do not support the device, but cannot be replaced because other calls may be running them.
    """
    device, dtype = key = input.device, input.dtype
    if key in _checked:
        return True
    with _lock:
        waits = type(input) is not Tensor  # e.g. a fake tensor, whose device may not exist
        if _State.problem is None and not waits:
            problem = _PROBLEMS[import_module("bagua_syncbn._C").cuda_support(device.index or 0)]
            waits = problem is None and is_transforming()
            if problem is None and not waits:
                problem = _compare(device, dtype)
            if problem is not None:
                _use_aten(problem)
        _State.in_use |= _State.problem is None
        if waits:
            return False
        _log.info("kernels on %s for %s: %s", device, dtype, cuda_kernels())
        if _State.problem is not None and _State.warns:
            _State.warns = False
            warn(f"bagua_syncbn uses ATen's kernels on CUDA: {_State.problem}", RuntimeWarning)
        _checked.add(key)
    return True


def _compare(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the first difference between the native kernels and plain torch as text, or None."""
    if is_capturing():
        raise RuntimeError(
            f"the first call with {dtype} on {device} compares kernels, which is impossible while a graph is captured; "
            "call the layer once before the capture"
        )
    wait_for(device)  # raises errors of earlier kernels
    try:
        difference = find_difference(torch.ops.bagua_syncbn, device, dtype)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"comparing the CUDA kernels of bagua_syncbn with plain torch for {dtype} failed on {device}, which may be "
            f"unusable in this process now: {error}. To run without these kernels, set BAGUA_SYNCBN_KERNELS=aten"
        ) from error
    return difference and f"on {torch.cuda.get_device_name(device)}, {difference}"


def _use_aten(problem: str) -> None:
    if _State.in_use:  # torch replaces kernels without waiting for threads that call them
        raise RuntimeError(
            f"{problem}. Other calls use the native kernels, which cannot be replaced now: restart with "
            "BAGUA_SYNCBN_KERNELS=aten"
        )
    _State.problem = problem
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if kernels are replaced
        for name in SCHEMAS:
            library.impl(name, getattr(aten, name), "CUDA")


if WANTED == "reference":
    _State.problem = "BAGUA_SYNCBN_KERNELS is 'reference'"
elif not HAS_NATIVE:
    _use_aten(NO_CUDA_KERNELS if WANTED == "native" else f"BAGUA_SYNCBN_KERNELS is {WANTED!r}")
