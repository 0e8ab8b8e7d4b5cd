"""The merge of all ranks' statistics, with its two divisors, the ways in which eps keeps the deviation from zero.

``"plus"`` is ``sqrt(var + eps)``, torch's; ``"clamp"`` is ``sqrt(max(var, eps))``, with the derivative of ``max``:
where ``eps`` replaces the variance, no gradient passes through it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import schemas  # noqa: F401, declares the op

EPS_MODES = ("plus", "clamp")

_gather_stats = torch.ops.bagua_syncbn.batch_norm_gather_stats.default


class MergeOptions(NamedTuple):
    """How the statistics of all ranks are merged, and the buffers that they update."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    eps: float
    eps_mode: str
    skip_nonfinite: bool = False


class MergedStats(NamedTuple):
    """What the merge of all ranks' statistics gives."""

    mean: Tensor  # (C)
    invstd: Tensor  # (C)
    total_count: Tensor  # values per channel on all ranks, int64 scalar
    clamped: Tensor | None  # (C), bool: where eps replaces the variance; None for "plus"


def merge_stats(gathered: Tensor, options: MergeOptions, words: int = 0, fault: Tensor | None = None) -> MergedStats:
    """Calls ``batch_norm_gather_stats``, and adapts its result to ``eps_mode``."""
    counter = options.num_batches_tracked
    if counter is not None and counter.dtype != torch.int64:  # as in a module whose buffers were all cast
        whole = counter.to(torch.int64)
        merged = merge_stats(gathered, options._replace(num_batches_tracked=whole), words, fault)
        counter.copy_(whole)
        return merged
    *arguments, eps, eps_mode, skip_nonfinite = options
    if eps_mode == "plus":
        mean, invstd, count = _gather_stats(gathered, *arguments, eps, words, skip_nonfinite, fault)
        return MergedStats(mean, invstd, count, None)
    mean, invstd, count = _gather_stats(gathered, *arguments, 0.0, words, skip_nonfinite, fault)
    limit = eps**-0.5 if eps else math.inf
    return MergedStats(mean, invstd.clamp(max=limit), count, invstd > limit)


def clear_clamped(sums: Tensor, clamped: Tensor | None) -> Tensor:
    """Sets ``sum_dy_xmu`` of ``sums`` (2C + K), what passes through the variance, to 0 where ``clamped`` (C)."""
    if clamped is not None:
        sums[clamped.numel() : 2 * clamped.numel()].masked_fill_(clamped, 0)
    return sums
