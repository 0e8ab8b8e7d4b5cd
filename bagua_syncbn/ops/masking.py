"""Positions of an input that count for the statistics."""

from typing import NamedTuple

import torch
from torch import Tensor


def of_positions(mask: Tensor, input: Tensor) -> Tensor:
    """Returns the valid positions as a bool tensor that broadcasts to ``input`` (N, C, \\*).

    ``mask`` is bool (N, \\*), or lengths (N) along the last dimension.
    """
    if mask.dtype == torch.bool:
        return mask.unsqueeze(1)
    indices = torch.arange(input.size(-1), device=input.device)
    return indices < mask.view(-1, *[1] * (input.dim() - 1))


class Masking(NamedTuple):
    """The checked mask or lengths of a call."""

    positions: Tensor
    """Valid positions for the ops: bool (N, \\*), contiguous, or int64 lengths (N)."""
    zeroes: bool
    """Whether the output is 0 at all other positions."""

    def clear(self, values: Tensor) -> Tensor:
        """Returns ``values`` (N, C, \\*) with 0 at invalid positions."""
        return values.where(of_positions(self.positions, values), 0)

    def clear_outputs(self, values: Tensor) -> Tensor:
        """Returns ``values`` (N, C, \\*) with 0 at the positions where the output is 0."""
        return self.clear(values) if self.zeroes else values
