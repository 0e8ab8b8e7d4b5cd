"""Moments of a set of values, and their form in messages."""

from typing import NamedTuple

import torch
from torch import Tensor

from .headers import WORD

_LEAST = torch.finfo(torch.float64).tiny


def merge_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype in which statistics on ``device`` are merged."""
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


class Moments(NamedTuple):
    """Mean and biased variance (C) of a set of values, and the number of values as weight (1)."""

    mean: Tensor
    var: Tensor
    weight: Tensor

    def as_sums(self) -> Tensor:
        """Returns ``[n * mean (C) | n * (var + mean**2) (C) | n]``, which can be added for the union of sets."""
        mean, var, weight = self
        return torch.cat([weight * mean, weight * (var + mean.square()), weight])

    @classmethod
    def of_sums(cls, sums: Tensor) -> "Moments":
        """Returns the moments of a union from the added float64 results of :meth:`as_sums`; 0 if the union is empty."""
        weight = sums[-1:]
        mean, square = (sums[:-1] / weight.clamp(min=_LEAST)).chunk(2)
        return cls(mean, (square - mean.square()).clamp(min=0), weight)

    @classmethod
    def of_row(cls, row: Tensor) -> "Moments":
        """Returns the moments in ``row`` (2C + 2), from ``batch_norm_stats`` without header."""
        channels = row.numel() // 2 - 1
        mean, var, low, high = row.split([channels, channels, 1, 1])
        return cls(mean, var, low + high * WORD)

    def as_row(self) -> Tensor:
        """Returns a row (1, 2C + 2) like ``batch_norm_stats``. A NaN weight gives a NaN count."""
        mean, var, count = self
        return torch.cat([mean, var, count % WORD, count.div(WORD, rounding_mode="floor")]).unsqueeze(0)
