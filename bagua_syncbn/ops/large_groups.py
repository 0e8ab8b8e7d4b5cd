"""Statistics of many ranks by one sum, whose size does not grow with their number."""

from collections.abc import Callable

import torch
from torch import Tensor

from .moments import Moments
from .words import WORD, WORDS

# Values of a message beside the 2C moments: the count, and words in parts that stay exact in sums over any job.
SUMMED_REST = 1 + 4 * WORDS
_PART = 2**12


def add_up_stats(stats: Tensor, ranks: int, all_reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns (1, 2C + 2 + WORDS) in float64: one row of statistics, as those of all ``ranks`` together.

    The message is ``[n * mean (C) | n * (var + mean**2) (C) | n | parts | parts**2]`` in float64. With it float32
    statistics lose nothing while ``|mean| / std`` is below what float32 input itself can hold. All ranks get the same
    bits, since they compute them from the same sums.

    Where the words of the ranks differ, the row has no count, which the merge does not take, and ``-1 - call`` for
    ``call``.
    """
    channels = (stats.numel() - 2 - WORDS) // 2
    mean, var, low, high, words = stats.to(torch.float64).split([channels, channels, 1, 1, WORDS])
    parts = torch.cat([words % _PART, words.div(_PART, rounding_mode="floor")])
    said = torch.cat([parts, parts.square()])
    total = all_reduce(torch.cat([Moments(mean, var, low + high * WORD).as_sums(), said]))
    sums, heard = total.split([2 * channels + 1, 4 * WORDS])
    # The mean of the squares is the square of the mean only where all parts are equal.
    differ = (heard != ranks * said).any()
    merged = Moments.of_sums(sums)
    row = merged._replace(weight=merged.weight.masked_fill(differ, torch.nan)).as_row()
    call = words[-1:]
    return torch.cat([row, words[:-1].unsqueeze(0), torch.where(differ, -1 - call, call).unsqueeze(0)], 1)
