"""Errors of kernels that callers handle by torch's class and text, which cannot cross the stable ABI."""

import re
import threading

import torch

_NO_MEMORY = re.compile(r"memory: expected (\d+) values of (\d) bytes on (\S+), got none")  # csrc/allocate.h
_FAILED = re.compile(r"bagua_syncbn_fallback::\w+: expected success")  # csrc/cuda/torch/register.cpp


class _Thread(threading.local):
    """``failure``: the last error of an op of ``bagua_syncbn_fallback`` in this thread."""

    failure: BaseException | None = None


this_thread = _Thread()


def raise_torchs(error: Exception) -> None:
    """Raises torch's own error in place of ``error``, if a kernel got no memory or ATen's kernels failed.

    The error of the fallback was kept, and an allocation is made again. If memory has become free since, the error has
    torch's class for that device.
    """
    failure, this_thread.failure = this_thread.failure, None
    if failure is not None and _FAILED.match(str(error)):
        raise failure from None
    found = _NO_MEMORY.match(str(error))
    if found is None:
        return
    values, itemsize, device = found.groups()
    try:
        torch.empty(int(values), int(itemsize), dtype=torch.uint8, device=device)
    except RuntimeError as torchs:
        raise torchs from None
    if device != "cpu":
        raise torch.OutOfMemoryError(str(error)) from None
