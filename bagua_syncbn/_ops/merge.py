"""Merges the ranks' statistics with a layer's buffers and options, in eager and compiled code."""

import threading
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .options import Options

_gather_stats = torch.ops.bagua_syncbn.batch_norm_gather_stats.default


# Buffers that a call updates: running_mean, running_var and num_batches_tracked.
Buffers: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]

NO_BUFFERS: Buffers = None, None, None


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
    """Calls ``batch_norm_gather_stats`` with the eps mode of ``options`` and a counter of any dtype.

    The counter counts updates of the running statistics, so it does not change if there are none.
    """
    mean, var, counter = NO_BUFFERS if buffers[0] is None else buffers
    if counter is not None and counter.dtype != torch.int64:  # cast together with its module
        whole = counter.to(torch.int64)
        merged = merge_stats(received, (mean, var, whole), options)
        counter.copy_(whole)
        return merged
    is_clamped = options.eps_mode == "clamp" and options.eps != 0
    merged = _gather_stats(
        received.message,
        mean,
        var,
        counter,
        options.momentum,
        0.0 if is_clamped else options.eps,
        received.fault,
        options.skip_nonfinite,
        received.summed_over,
        received.number,
    )
    return (merged[0], merged[1].clamp(max=options.eps**-0.5), merged[2]) if is_clamped else merged


class _Thread(threading.local):
    is_repeating = False
    """True while this thread repeats a forward, whose first run has updated the buffers."""


this_thread = _Thread()


@torch.library.custom_op("bagua_syncbn::updated_buffers", mutates_args=())
def _updated_buffers(
    message: Tensor, buffers: list[Tensor], momentum: float | None, skip_nonfinite: bool, summed_over: int
) -> list[Tensor]:
    mean, var, *counter = updated = [buffer.clone() for buffer in buffers]
    if this_thread.is_repeating:  # compiled code runs all ops again; eager layers reuse their first statistics
        return updated
    options = Options(momentum=momentum, skip_nonfinite=skip_nonfinite)
    merge_stats(Received(message, summed_over), (mean, var, counter[0] if counter else None), options)
    return updated


@_updated_buffers.register_fake
def _(message: Tensor, buffers: list[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(buffer) for buffer in buffers]


def merge_in_graph(received: Received, buffers: Buffers, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Returns and updates the same as :func:`merge_stats`, in a torch.compile graph.

    The op that computes new buffers does not mutate its arguments, because inductor would move earlier reads of the
    buffers behind a mutating op. It is separate from the statistics: a graph that recomputes them in backward must not
    read updated buffers.
    """
    if buffers[0] is not None:
        given = [buffer for buffer in buffers if buffer is not None]
        message, summed_over, *_ = received
        updated = _updated_buffers(message, given, options.momentum, options.skip_nonfinite, summed_over)
        for buffer, new in zip(given, updated, strict=True):
            buffer.copy_(new)
    return merge_stats(received, NO_BUFFERS, options)
