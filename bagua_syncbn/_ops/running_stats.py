"""Merges the ranks' statistics, updates running buffers, and applies eps.

``"plus"`` is torch's ``sqrt(var + eps)``; ``"clamp"`` is ``sqrt(max(var, eps))``: no gradient passes through a variance
below eps.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .options import Options

_gather_stats = torch.ops.bagua_syncbn.batch_norm_gather_stats.default


class Buffers(NamedTuple):
    """Buffers that a call updates."""

    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    num_batches_tracked: Tensor | None = None


NO_BUFFERS = Buffers()


class Received(NamedTuple):
    """A message from all ranks, and the arguments with which the next op compares headers."""

    message: Tensor
    """One row per rank, or the sum over ranks."""
    summed_over: int = 1
    """Number of ranks in the sum; 1 for rows."""
    fault: Tensor | None = None
    """Where the op records different headers, see :mod:`bagua_syncbn._ops`."""
    number: int = 0
    """Number of the message, for the record."""


def merge_stats(received: Received, buffers: Buffers, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Calls ``batch_norm_gather_stats`` with the eps mode of ``options`` and a counter of any dtype."""
    counter = buffers.num_batches_tracked
    if counter is not None and counter.dtype != torch.int64:  # cast together with its module
        whole = counter.to(torch.int64)
        merged = merge_stats(received, buffers._replace(num_batches_tracked=whole), options)
        counter.copy_(whole)
        return merged
    eps = options.eps if options.eps_mode == "plus" else 0.0
    merged = _gather_stats(
        received.message,
        buffers.running_mean,
        buffers.running_var,
        counter,
        options.momentum,
        eps,
        received.fault,
        options.skip_nonfinite,
        received.summed_over,
        received.number,
    )
    if eps == options.eps:
        return merged
    mean, invstd, count = merged
    return mean, invstd.clamp(max=options.eps**-0.5), count


@torch.library.custom_op("bagua_syncbn::updated_buffers", mutates_args=())
def _updated_buffers(
    message: Tensor, buffers: list[Tensor], momentum: float | None, skip_nonfinite: bool, summed_over: int
) -> list[Tensor]:
    updated = Buffers(*(buffer.clone() for buffer in buffers))
    options = Options(momentum=momentum, skip_nonfinite=skip_nonfinite)
    merge_stats(Received(message, summed_over), updated, options)
    return [buffer for buffer in updated if buffer is not None]


@_updated_buffers.register_fake
def _(message: Tensor, buffers: list[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(buffer) for buffer in buffers]


def update_buffers(received: Received, buffers: Buffers, options: Options) -> None:
    """Updates ``buffers`` like :func:`merge_stats`, in a torch.compile graph.

    The op does not mutate its arguments, because inductor would move earlier reads of the buffers behind a mutating op.
    """
    given = [buffer for buffer in buffers if buffer is not None]
    message, summed_over, *_ = received
    updated = _updated_buffers(message, given, options.momentum, options.skip_nonfinite, summed_over)
    for buffer, new in zip(given, updated, strict=True):
        buffer.copy_(new)


def inverse_deviation(var: Tensor, options: Options) -> Tensor:
    """Returns the inverse deviation (C) for the variance ``var`` (C)."""
    return (var.clamp(min=options.eps) if options.eps_mode == "clamp" else var + options.eps).rsqrt()


def is_clamped(invstd: Tensor, options: Options) -> Tensor | None:
    """Returns a mask (C) of the channels where ``eps`` replaces the variance; None if there are none."""
    if options.eps_mode == "plus" or not options.eps:
        return None
    limit: float = options.eps**-0.5
    return invstd >= limit


def clear_clamped(sums: Tensor, invstd: Tensor, options: Options) -> None:
    """Sets ``sum_dy_xmu`` in ``sums`` (2C + K) to 0 where ``eps`` replaces the variance."""
    clamped = is_clamped(invstd, options)
    if clamped is not None:
        sums[clamped.numel() : 2 * clamped.numel()].masked_fill_(clamped, 0)
