"""Which positions of an input count, and what becomes of the rest."""

from typing import NamedTuple

import torch
from torch import Tensor


def of_positions(mask: Tensor, input: Tensor) -> Tensor:
    """Returns which positions of ``input`` (N, C, \\*) count, as a bool tensor that broadcasts to it.

    ``mask`` is bool (N, \\*), or lengths (N) along the last dimension.
    """
    if mask.dtype == torch.bool:
        return mask.unsqueeze(1)
    places = torch.arange(input.size(-1), device=input.device)
    return places < mask.view(-1, *[1] * (input.dim() - 1))


class Masking(NamedTuple):
    """Positions that count, and whether the rest of an output is zero."""

    positions: Tensor  # which count, as the ops take it: bool (N, *), contiguous, or int64 lengths (N)
    zeroes: bool  # whether positions that do not count are 0 in the output

    def clear(self, values: Tensor) -> Tensor:
        """Returns ``values`` (N, C, \\*) with 0 at the positions that do not count."""
        return values.where(of_positions(self.positions, values), 0)

    def clear_outputs(self, values: Tensor) -> Tensor:
        """Returns ``values`` (N, C, \\*) with 0 where the output is 0 for its mask."""
        return self.clear(values) if self.zeroes else values
