"""The statistics of all ranks together, and the buffers that they move, with the two ways in which eps bounds them.

``"plus"`` is ``sqrt(var + eps)``, torch's; ``"clamp"`` is ``sqrt(max(var, eps))``, with the derivative of ``max``:
where ``eps`` replaces the variance, no gradient passes through it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..options import Options
from .moments import Moments, merge_dtype, merge_rows
from .words import PARTS, parts_differ, words_in

_gather_stats = torch.ops.bagua_syncbn.batch_norm_gather_stats.default


class Buffers(NamedTuple):
    """The buffers that a call moves, and what takes the statistics in their place until a step is over."""

    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    num_batches_tracked: Tensor | None = None
    accumulator: "StatisticsAccumulator | None" = None


NO_BUFFERS = Buffers()


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

    def add(self, gathered: Tensor, ranks: int = 1) -> None:
        """Adds what ``batch_norm_gather_stats`` takes for one batch: the rows of all ranks, or their sum."""
        rows = (_checked(gathered) if gathered.dim() > 1 else _row_of(gathered, ranks)).to(merge_dtype(gathered.device))
        if self.row.size(1) == rows.size(1):  # else the first batch of a layer that was lazy
            rows = torch.cat([self.row.to(rows), rows])
        self.row = merge_rows(rows)

    def moments(self) -> Moments:
        """Returns the moments of all batches so far."""
        return Moments.of_row(self.row[0])

    def move_later(self, buffers: Buffers, options: Options) -> None:
        """Takes what :meth:`move` is to move, and how."""
        self._buffers, self._options = Buffers(*buffers[:3]), options

    def buffers(self) -> list[Tensor]:
        """Returns the buffers that :meth:`move` is to move."""
        return [buffer for buffer in self._buffers[:3] if buffer is not None]

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


def merge_stats(
    gathered: Tensor, buffers: Buffers, options: Options, ranks: int = 1, fault: Tensor | None = None, call: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls ``batch_norm_gather_stats``, with the arguments by which it compares the ranks, and adapts its result."""
    running_mean, running_var, counter, accumulator = buffers
    eps = options.eps
    if accumulator is not None:
        accumulator.add(gathered, ranks)
        accumulator.move_later(buffers, options)
        return merge_stats(gathered, NO_BUFFERS, options, ranks, fault, call)
    if counter is not None and counter.dtype != torch.int64:  # as in a module that was cast, buffers included
        whole = counter.to(torch.int64)
        merged = merge_stats(gathered, buffers._replace(num_batches_tracked=whole), options, ranks, fault, call)
        counter.copy_(whole)
        return merged
    is_clamp = options.eps_mode != "plus"
    added = 0.0 if is_clamp else eps
    arguments = gathered, running_mean, running_var, counter, options.momentum, added, fault
    # To be given one more argument takes an op half a microsecond.
    is_plain = ranks == 1 and not options.skip_nonfinite
    merged = _gather_stats(*arguments) if is_plain else _gather_stats(*arguments, options.skip_nonfinite, ranks, call)
    if not is_clamp or not eps:
        return merged  # type: ignore[no-any-return]
    mean, invstd, count = merged
    return mean, invstd.clamp(max=eps**-0.5), count


def inverse_deviation(var: Tensor, options: Options) -> Tensor:
    """Returns the factor (C) by which values with the variance ``var`` (C) are normalized."""
    return (var.clamp(min=options.eps) if options.eps_mode == "clamp" else var + options.eps).rsqrt()


def is_clamped(invstd: Tensor, options: Options) -> Tensor | None:
    """Returns in which channels (C) ``eps`` replaces the variance; None for in none."""
    if options.eps_mode == "plus" or not options.eps:
        return None
    limit: float = options.eps**-0.5
    return invstd >= limit


def clear_clamped(sums: Tensor, invstd: Tensor, options: Options) -> None:
    """Sets ``sum_dy_xmu`` of ``sums`` (2C + K), what passes through the variance, to 0 where ``eps`` replaces that."""
    clamped = is_clamped(invstd, options)
    if clamped is not None:
        sums[clamped.numel() : 2 * clamped.numel()].masked_fill_(clamped, 0)
