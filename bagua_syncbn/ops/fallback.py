"""Plain torch for CUDA tensors where the kernels of this installation do not run, with one warning that says why.

The native library asks once for each device. Where its kernels do not run there, it calls the op of the same name and
schema in ``torch.ops.bagua_syncbn_fallback``.
"""

import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

import torch

from . import reference
from .definition import SCHEMAS
from .native import KERNELS

_P = ParamSpec("_P")
_R = TypeVar("_R")

_RUNS, _OLD_DRIVER, _NO_IMAGE = range(3)
# The first driver for each major version of CUDA.
_DRIVERS = {11: 450, 12: 525, 13: 580}

_library = torch.library.Library("bagua_syncbn_fallback", "DEF")
_warned: set[int | None] = set()


def cuda_problem(device: int) -> str | None:
    """Says why the CUDA kernels of this installation do not run on ``device``, and what helps; None if they do."""
    if not KERNELS.endswith("cuda"):
        return None
    return describe(*import_module("bagua_syncbn._C").cuda_support(device))


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


def _saying_so(kernel: Callable[_P, _R]) -> Callable[_P, _R]:
    @wraps(kernel)
    def computed_in_torch(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        input = args[0]
        assert isinstance(input, torch.Tensor)
        if input.device.index not in _warned:
            _warned.add(input.device.index)
            problem = cuda_problem(input.device.index or 0)
            warnings.warn(
                f"bagua_syncbn computes in plain torch on {input.device}: {problem}", RuntimeWarning, stacklevel=2
            )
        return kernel(*args, **kwargs)

    return computed_in_torch


for _name, _schema in SCHEMAS.items():
    _library.define(_schema)
    _library.impl(_name, _saying_so(getattr(reference, _name)), "CompositeExplicitAutograd")
