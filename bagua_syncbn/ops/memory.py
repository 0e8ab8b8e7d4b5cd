"""Memory that torch did not give to a kernel: its own error, which cannot cross the stable ABI, is raised once more."""

import re

import torch

_NO_MEMORY = re.compile(r"memory: expected (\d+) values of (\d) bytes on (\S+), got none")  # csrc/allocate.h


def raise_torchs(error: Exception) -> None:
    """Raises torch's own error, whose class and text handlers know, if ``error`` is that of a kernel without memory.

    It makes the same allocation again. Where memory has become free since, the error has the class that torch has for
    it on that device.
    """
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
