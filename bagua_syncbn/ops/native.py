"""Loads the native library, whose kernels then stand before the reference ones for their devices."""

import os

from torch import Tensor

_WANTED = os.environ.get("BAGUA_SYNCBN_KERNELS", "native")

# Below these numbers of values the five calls from Python cost what the kernels save, or more: docs/benchmarks.md.
# F.batch_norm is fast where channels are innermost, until its outputs leave the caches.
_WORTHWHILE_PLANAR = 2**17
_WORTHWHILE_INTERLEAVED = 2**22


def _load() -> str:
    if _WANTED not in ("native", "reference"):
        raise ImportError(f'BAGUA_SYNCBN_KERNELS: expected "native" or "reference", got {_WANTED!r}')
    if _WANTED == "reference":
        return "reference"
    try:
        from .. import _C
    except ModuleNotFoundError:  # a pure-Python installation
        return "reference"
    return f"native, cpu: {_C.cpu_capability()}{', cuda' if _C.has_cuda() else ''}"


KERNELS = _load()
"""Which kernels compute the ops: ``"reference"``, or ``"native, cpu: "`` and the instruction set, followed by
``", cuda"`` if the library has CUDA kernels too."""


def beat_torch(input: Tensor) -> bool:
    """Whether the ops normalize ``input`` in training faster than F.batch_norm does. Not known for the CUDA kernels."""
    worthwhile = _WORTHWHILE_INTERLEAVED if input.stride(1) == 1 else _WORTHWHILE_PLANAR
    return KERNELS != "reference" and input.device.type == "cpu" and input.numel() >= worthwhile
