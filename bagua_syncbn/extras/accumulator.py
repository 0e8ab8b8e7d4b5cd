"""Statistics of several batches in one row."""

import torch
from torch import Tensor

from ..ops import NO_BUFFERS, Buffers, merge_stats
from ..ops.moments import Moments, merge_dtype, mixture
from ..ops.words import PARTS, WORD, parts_differ, words_in
from ..options import Options


class StatisticsAccumulator:
    """The statistics of several batches, merged as they come into one row, by which the buffers move once.

    Args:
        channels: C; 0 where it is not known before the first batch.
        device: of the statistics.
    """

    def __init__(self, channels: int, device: torch.device) -> None:
        # Mean (C), biased variance (C) and count (2) of all batches so far. Has its size from the start, so that
        # torch.compile needs one graph for all batches.
        self.row = torch.zeros(1, 2 * channels + 2, dtype=merge_dtype(device), device=device)
        self._buffers = NO_BUFFERS
        self._options: Options | None = None
        # num_batches_tracked after the batches, where the layer counts them itself.
        self.counted: Tensor | None = None

    def take(self, gathered: Tensor, ranks: int, buffers: Buffers, options: Options) -> None:
        """Adds one batch, and takes what :meth:`move` is to move, and how."""
        self.add(gathered, ranks)
        self._buffers, self._options = buffers, options

    def add(self, gathered: Tensor, ranks: int = 1) -> None:
        """Adds what ``batch_norm_gather_stats`` takes for one batch: the rows of all ranks, or their sum."""
        rows = (_checked(gathered) if gathered.dim() > 1 else _row_of(gathered, ranks)).to(merge_dtype(gathered.device))
        if self.row.size(1) == rows.size(1):  # else the first batch of a layer that was lazy
            rows = torch.cat([self.row.to(rows), rows])
        self.row = _merge_rows(rows)

    def moments(self) -> Moments:
        """Returns the moments of all batches so far."""
        return Moments.of_row(self.row[0])

    def buffers(self) -> list[Tensor]:
        """Returns the buffers that :meth:`move` is to move."""
        return [buffer for buffer in self._buffers if buffer is not None]

    def move(self) -> None:
        """Updates the buffers once, by the statistics of all batches together, with the last batch's options."""
        if self._options is not None:
            merge_stats(self.row, self._buffers, self._options)


def _checked(rows: Tensor) -> Tensor:
    """Returns ``rows`` without their words, and where these differed with a count that the merge does not take."""
    words = words_in(rows)
    if words == 0:
        return rows
    rows, said = rows.tensor_split([-words], 1)
    differ = (said != said[0]).any()
    return torch.cat([rows[:, :-1], rows[:, -1:].masked_fill(differ, torch.nan)], 1)


def _row_of(sums: Tensor, ranks: int) -> Tensor:
    """Returns the row (1, 2C + 2) of all ``ranks`` together, given what they add up."""
    sums, said = sums.tensor_split([-PARTS])
    moments = Moments.of_sums(sums)
    return moments._replace(weight=moments.weight.masked_fill(parts_differ(said, ranks), torch.nan)).as_row()


def _merge_rows(rows: Tensor) -> Tensor:
    """Returns (1, 2C + 2), the moments of all sets together, given those of each set in a row of ``rows`` (R, 2C + 2).

    A NaN count makes the count of the result NaN.
    """
    channels = rows.size(1) // 2 - 1
    means, variances, low, high = rows.split([channels, channels, 1, 1], 1)
    counts = low + high * WORD
    total = counts.sum().view(1)
    return Moments(*mixture(means, variances, counts / total.clamp(min=1)), total).as_row()
