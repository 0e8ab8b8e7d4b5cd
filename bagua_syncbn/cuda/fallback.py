"""Which kernels compute CUDA tensors: the native ones, else ATen's, else plain torch.

The native library asks once for each device whether its kernels run there. Where they do not, or ``comparison.py``
found them wrong, it calls the op of this name in ``torch.ops.bagua_syncbn_fallback``, which warns once and computes by
ATen's kernels. Where the library has no CUDA kernels, ``torch.ops.bagua_syncbn`` itself computes by ATen's.
"""

import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

import torch

from ..ops.definition import SCHEMAS, implement
from ..ops.failures import this_thread
from ..ops.native import KERNELS, LIBRARY_HAS_CUDA, WANTED
from . import aten

_P = ParamSpec("_P")
_R = TypeVar("_R")

EXPERIMENTAL = (
    "experimental: never run on a GPU, compared with plain torch at first use; BAGUA_SYNCBN_KERNELS=aten takes ATen's"
)

_HAS_NATIVE = KERNELS.endswith("cuda")
_RUNS, _OLD_DRIVER, _NO_IMAGE, _TURNED_OFF = range(4)
# The first driver for each major version of CUDA.
_DRIVERS = {11: 450, 12: 525, 13: 580}

_library = torch.library.Library("bagua_syncbn_fallback", "DEF")
_warned: set[int | None] = set()
_turned_off: dict[int, str] = {}  # devices where the native kernels were found wrong, and how


def cuda_kernels(device: int) -> str:
    """Says which kernels compute on the CUDA device ``device``, and why."""
    problem = cuda_problem(device)
    if problem is None:
        return f"native, {EXPERIMENTAL}"
    return f"{'plain torch' if WANTED == 'reference' else 'ATen'}, because {problem}"


def serves(device: int | None) -> bool:
    """Whether native kernels may compute on the CUDA device ``device``: as far as known without asking the driver."""
    return _HAS_NATIVE and (device or 0) not in _turned_off


def turn_off(device: int, problem: str) -> None:
    """Has ATen's kernels compute on the CUDA device ``device`` from now on, because of ``problem``."""
    _turned_off[device] = problem
    import_module("bagua_syncbn._C").turn_off_cuda(device)


def cuda_problem(device: int) -> str | None:
    """Says why native kernels do not compute on the CUDA device ``device``, and what helps; None if they do."""
    if device in _turned_off:
        return _turned_off[device]
    if _HAS_NATIVE:
        return describe(*import_module("bagua_syncbn._C").cuda_support(device))
    return "this installation has no CUDA kernels" if WANTED == "native" else f"BAGUA_SYNCBN_KERNELS is {WANTED!r}"


def describe(support: int, runtime: int, driver: int) -> str | None:
    """The sentence for what ``_C.cuda_support`` gives; versions are 1000 * major + 10 * minor."""
    if support == _RUNS:
        return None
    built = f"the CUDA kernels of this installation were built with CUDA {_version(runtime)}"
    build = "BAGUA_SYNCBN_BUILD=cuda pip install . in a checkout"
    if support == _OLD_DRIVER:
        major = runtime // 1000
        first = f" ({_DRIVERS[major]} or later)" if major in _DRIVERS else ""
        return (
            f"{built}, which needs an NVIDIA driver for CUDA {major}{first}; the one here is for CUDA "
            f"{_version(driver)}. Update it, or build with a toolkit for it: CUDA_HOME=/path/to/toolkit {build}"
        )
    return (
        f"{built} for other cards. Build for this one: BAGUA_SYNCBN_CUDA_ARCHS=<compute capability, as in 89> {build}"
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _called_natively(kernel: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns ``kernel`` with a warning before its first call on each device, and whose errors are kept."""

    @wraps(kernel)
    def kernel_for_native(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        input = args[0]
        assert isinstance(input, torch.Tensor)
        if WANTED == "native" and input.device.index not in _warned:
            _warned.add(input.device.index)
            problem = cuda_problem(input.device.index or 0)
            warnings.warn(
                f"bagua_syncbn has ATen's kernels compute on {input.device}: {problem}", RuntimeWarning, stacklevel=2
            )
        try:
            return kernel(*args, **kwargs)
        except BaseException as error:
            this_thread.failure = error
            raise

    return kernel_for_native


for _name, _schema in SCHEMAS.items():
    _library.define(_schema)
    _kernel = getattr(aten, _name)
    _library.impl(_name, _called_natively(_kernel), "CompositeExplicitAutograd")
    if WANTED != "reference" and not LIBRARY_HAS_CUDA:
        implement(_name, _kernel, "CUDA")
