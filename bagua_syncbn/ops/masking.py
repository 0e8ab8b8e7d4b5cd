"""Positions of an input that count for the statistics."""

from typing import NamedTuple

from torch import Tensor


class Masking(NamedTuple):
    """The checked mask of a call."""

    positions: Tensor
    """Valid positions for the ops: bool (N, \\*), contiguous."""
    zeroes: bool
    """Whether the output is 0 at all other positions."""

    def clear(self, values: Tensor) -> Tensor:
        """Returns ``values`` (N, C, \\*) with 0 at invalid positions."""
        return values.where(self.positions.unsqueeze(1), 0)

    def clear_outputs(self, values: Tensor) -> Tensor:
        """Returns ``values`` (N, C, \\*) with 0 at the positions where the output is 0."""
        return self.clear(values) if self.zeroes else values
