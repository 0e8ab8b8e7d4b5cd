"""Which positions of an input count, and what becomes of the rest."""

from typing import NamedTuple

from torch import Tensor

from .reference import of_positions


class Masking(NamedTuple):
    """What a call does with some positions."""

    positions: Tensor  # which count, as the ops take it: bool (N, *), contiguous, or int64 lengths (N)
    zeroes: bool  # whether positions that do not count are 0 in the output

    def zeroed(self) -> Tensor | None:
        """The positions that count, if all other ones are 0 in the output; None if they are not."""
        return self.positions if self.zeroes else None

    def clear(self, values: Tensor) -> Tensor:
        """Returns ``values`` (N, C, \\*) with 0 at the positions that do not count."""
        return values.where(of_positions(self.positions, values), 0)
