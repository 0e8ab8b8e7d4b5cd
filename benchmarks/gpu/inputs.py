"""Inputs that the device's cache does not hold: each call gets the next ones of a pool larger than it."""

import itertools
from math import ceil

import torch
from torch import Tensor

from .shapes import Case

# Of the cache, that lie between two uses of the same memory.
_CACHES = 4
_MOST_SETS = 2048


class Pool:
    """Random values, as ``x`` and ``dy``, in one dtype at a time.

    Args:
        largest: bytes of the largest input that will be asked for.
        cache: bytes of the device's last cache.
    """

    def __init__(self, device: torch.device, cache: int, largest: int) -> None:
        self.device = device
        self._cache = cache
        self._size = max(_CACHES * cache, largest) + 2**20
        self._dtype: torch.dtype | None = None
        self._values: list[Tensor] = []

    def _fill(self, dtype: torch.dtype) -> None:
        self._values, self._dtype = [], dtype  # frees the old ones first
        count = self._size // dtype.itemsize
        self._values = [torch.empty(count, dtype=dtype, device=self.device).normal_() for _ in range(2)]

    def sets(self, case: Case) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of x and dy, each where an allocation of its own could begin."""
        dtype = getattr(torch, case.dtype)
        if self._dtype != dtype:
            self._fill(dtype)
        stride = ceil(case.size / 512) * 512 // dtype.itemsize
        wanted = min(_MOST_SETS, ceil(_CACHES * self._cache / case.size))
        count = max(1, min(wanted, self._values[0].numel() // stride))
        starts = range(0, count * stride, stride)
        x, dy = ([lay_out(pool[i : i + case.values], case) for i in starts] for pool in self._values)
        return list(zip(x, dy, strict=True))


def lay_out(values: Tensor, case: Case) -> Tensor:
    if case.layout == "planar":
        return values.view(case.shape)
    batch, channels, *inner = case.shape
    last = len(case.shape) - 1
    return values.view(batch, *inner, channels).permute(0, last, *range(1, last))


class Cycle:
    """The sets one after another, and from the first again."""

    def __init__(self, sets: list[tuple[Tensor, Tensor]]) -> None:
        self.first = sets[0]
        self._rest = itertools.cycle(sets)

    def next(self) -> tuple[Tensor, Tensor]:
        return next(self._rest)
