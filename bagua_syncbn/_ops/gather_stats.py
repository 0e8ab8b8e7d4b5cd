"""``batch_norm_gather_stats``: merges the ranks' statistics and updates the running statistics."""

import torch
from torch import Tensor

from .definition import defines
from .headers import HEADER_SUMS_SIZE, WORD, headers_differ, record, record_sums, row_layout
from .moments import Moments, merge_dtype

_MAX_HIGH = 2**29  # counts up to 2**53, which float64 holds exactly


def _is_integer(values: Tensor, most: int) -> Tensor:
    """Returns True for integers from 0 to ``most``; False for NaN."""
    return (values == values.floor()) & (values >= 0) & (values <= most)


def _merge_rows(gathered: Tensor, fault: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the mean and variance (C) of all ranks' values, and their number per channel."""
    # All ranks merge the same rows in the same order (Chan, Golub and LeVeque), so they get the same bits. An empty
    # rank's row has a count of 0, and so no weight.
    channels, size = row_layout(gathered)
    rows = gathered.to(merge_dtype(gathered.device))
    means, variances, low, high, headers = rows.split([channels, channels, 1, 1, size], dim=1)
    differs = (headers != headers[0]).any(1)
    is_wrong = differs | ~(_is_integer(low, WORD - 1) & _is_integer(high, _MAX_HIGH)).squeeze(1)
    # The first rank with a different header, or else the first with an invalid count.
    fails, rank = is_wrong.any(), (2 * differs + is_wrong).argmax().view(1)
    record(fault, fails, [torch.where(differs.any(), 1, 2), rank, headers[0], headers[rank]])
    counts = (low.to(torch.int64) + high.to(torch.int64) * WORD).masked_fill(fails, 0)
    total = counts.sum()
    shares = counts.to(rows.dtype) / total.clamp(min=1).to(rows.dtype)
    mean = (shares * means).sum(0)
    var = (shares * (variances + (means - mean).square())).sum(0)
    return mean.masked_fill(fails, torch.nan), var.masked_fill(fails, torch.nan), total


def _moments_of_sums(sums: Tensor, ranks: int, fault: Tensor | None, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the results of :func:`_merge_rows` from sums over ``ranks``."""
    sums, header_sums = sums.tensor_split([-HEADER_SUMS_SIZE])
    differ = headers_differ(header_sums, ranks) | ~_is_integer(sums[-1], WORD * _MAX_HIGH)
    record_sums(fault, differ, number)
    mean, var, count = Moments.of_sums(sums.masked_fill(differ, torch.nan))
    return mean, var, count.nan_to_num().to(torch.int64).view(())


def _fake(gathered: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    if gathered.dim() == 1:
        channels, dtype = (gathered.numel() - 1 - HEADER_SUMS_SIZE) // 2, torch.float32
    else:
        channels, dtype = row_layout(gathered)[0], gathered.dtype
    mean, invstd = (gathered.new_empty(channels, dtype=dtype) for _ in range(2))
    return mean, invstd, gathered.new_empty((), dtype=torch.int64)


@defines(_fake, mutates=("running_mean", "running_var", "num_batches_tracked", "fault"))
def batch_norm_gather_stats(
    gathered: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    fault: Tensor | None = None,
    skip_nonfinite: bool = False,
    ranks: int = 1,
    number: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    summed = gathered.dim() == 1
    mean, var, total = _moments_of_sums(gathered, ranks, fault, number) if summed else _merge_rows(gathered, fault)
    # An unbiased variance needs two values. The count is on the device, so the host must not branch on it.
    updates = total >= 2
    if skip_nonfinite:
        updates = updates & mean.isfinite().all() & var.isfinite().all()
    if num_batches_tracked is not None:
        num_batches_tracked.add_(updates)
    if running_mean is not None and running_var is not None:
        if momentum is not None:
            factor = mean.new_full((), momentum)
        elif num_batches_tracked is not None:
            factor = 1 / num_batches_tracked.clamp(min=1).to(mean.dtype)
        else:
            raise RuntimeError("num_batches_tracked: expected a tensor, because momentum is None; got None")
        unbiased_var = var * (total.to(var.dtype) / (total - 1).clamp(min=1).to(var.dtype))
        for running, new in ((running_mean, mean), (running_var, unbiased_var)):
            old = running.to(new.dtype)
            running.copy_(torch.where(updates, old.lerp(new, factor), old))
    dtype = torch.float32 if summed else gathered.dtype
    return mean.to(dtype), (var + eps).rsqrt().to(dtype), total
