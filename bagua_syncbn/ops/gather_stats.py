"""``batch_norm_gather_stats``: the statistics of all ranks together, and the running ones."""

import threading

import torch
from torch import Tensor

from .definition import defines
from .headers import HEADER_SUMS_SIZE, WORD, header_size, headers_differ, record, record_sums
from .moments import Moments, merge_dtype, mixture


class _Thread(threading.local):
    """``holds_buffers``: this thread repeats a forward, whose first run has counted the batch already."""

    holds_buffers = False


this_thread = _Thread()

_MAX_HIGH = 2**29  # counts up to 2**53, which float64 holds exactly


def _average_factor(momentum: float | None, num_batches_tracked: Tensor | None, like: Tensor) -> Tensor:
    if momentum is not None:
        return torch.full_like(like, momentum)
    if num_batches_tracked is None:
        raise RuntimeError("num_batches_tracked: expected a tensor, because momentum is None; got None")
    return 1 / num_batches_tracked.clamp(min=1).to(like.dtype)


def _is_integer(values: Tensor, most: int) -> Tensor:
    """Returns which of ``values`` are integers from 0 to ``most``; NaN is none."""
    return (values == values.floor()) & (values >= 0) & (values <= most)


def _faults_of_rows(low: Tensor, high: Tensor, headers: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns whether something is wrong with a row, and what, as ``fault`` has it."""
    differs = (headers != headers[0]).any(1)
    is_count = _is_integer(low, WORD - 1) & _is_integer(high, _MAX_HIGH)
    wrong = differs | ~is_count.squeeze(1)
    rank = (2 * differs + wrong).argmax().view(1)
    kind = torch.where(differs.any(), 1, 2)
    return wrong.any(), [kind, rank, *((headers[0], headers[rank]) if headers.size(1) else ())]


def _merge_rows(gathered: Tensor, fault: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean and variance (C), and the number of values per channel, of the rows of all ranks together."""
    # Chan, Golub and LeVeque's merge of W sets at once. Every rank adds the same rows in the same order, so all get the
    # same bits. A rank without samples sends zeros and a count of 0, and so weighs nothing.
    size = header_size(gathered)
    channels = (gathered.size(1) - 2 - size) // 2
    rows = gathered.to(merge_dtype(gathered.device))
    means, variances, low, high, headers = rows.split([channels, channels, 1, 1, size], dim=1)
    is_wrong, what = _faults_of_rows(low, high, headers)
    record(fault, is_wrong, what)
    counts = (low.to(torch.int64) + high.to(torch.int64) * WORD).masked_fill(is_wrong, 0)
    total = counts.sum()
    shares = counts.to(rows.dtype) / total.clamp(min=1).to(rows.dtype)
    mean, var = (moment.masked_fill(is_wrong, torch.nan) for moment in mixture(means, variances, shares))
    return mean, var, total


def _moments_of_sums(sums: Tensor, ranks: int, fault: Tensor | None, call: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what :func:`_merge_rows` returns, for what ``ranks`` have added up."""
    sums, header_sums = sums.tensor_split([-HEADER_SUMS_SIZE])
    count = sums[-1]
    differ = headers_differ(header_sums, ranks) | ~_is_integer(count, WORD * _MAX_HIGH)
    record_sums(fault, differ, call)
    mean, var, _ = Moments.of_sums(sums)
    mean, var = (moment.masked_fill(differ, torch.nan) for moment in (mean, var))
    return mean, var, count.masked_fill(differ, 0).to(torch.int64)


def _shapes(gathered: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    if gathered.dim() == 1:
        channels, dtype = (gathered.numel() - 1 - HEADER_SUMS_SIZE) // 2, torch.float32
    else:
        channels, dtype = (gathered.size(1) - 2 - header_size(gathered)) // 2, gathered.dtype
    mean, invstd = (gathered.new_empty(channels, dtype=dtype) for _ in range(2))
    return mean, invstd, gathered.new_empty((), dtype=torch.int64)


@defines(
    "batch_norm_gather_stats(Tensor gathered, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor(c!)? num_batches_tracked, float? momentum, float eps, Tensor(d!)? fault=None, "
    "bool skip_nonfinite=False, int ranks=1, int call=0) -> (Tensor mean, Tensor invstd, Tensor count)",
    _shapes,
)
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
    call: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    if this_thread.holds_buffers:
        running_mean = running_var = num_batches_tracked = None
    is_sum = gathered.dim() == 1
    mean, var, total = _moments_of_sums(gathered, ranks, fault, call) if is_sum else _merge_rows(gathered, fault)
    # An unbiased variance needs two values. Whether there are two is known on the device only: no branch on the host.
    updates = total >= 2
    if skip_nonfinite:
        updates = updates & mean.isfinite().all() & var.isfinite().all()
    if num_batches_tracked is not None:
        num_batches_tracked.add_(updates)
    if running_mean is not None and running_var is not None:
        factor = _average_factor(momentum, num_batches_tracked, mean.new_empty(()))
        unbiased_var = var * (total.to(var.dtype) / (total - 1).clamp(min=1).to(var.dtype))
        for running, new in ((running_mean, mean), (running_var, unbiased_var)):
            old = running.to(new.dtype)
            running.copy_(torch.where(updates, old.lerp(new, factor), old))

    dtype = torch.float32 if is_sum else gathered.dtype
    return mean.to(dtype), (var + eps).rsqrt().to(dtype), total
