"""Statistics of a call: computed on this rank, gathered from all ranks and merged. No part of the autograd graph."""

from torch import Tensor

from .. import ops
from ..options import Options
from .call import Call, Statistics
from .exchange import Exchange


def batch_statistics(
    input: Tensor, call: Call, exchange: Exchange, options: Options, mask: Tensor | None = None
) -> Statistics:
    """Returns the statistics of the inputs of all ranks, and updates the buffers of ``call``.

    ``input`` is the input of ``call``, outside of the autograd graph. ``mask`` selects the positions that count, in the
    form that the ops take.
    """
    if mask is None and not exchange.uses_sums:
        row = ops.batch_norm_stats(input, *exchange.header)
    else:
        row = ops.batch_norm_stats(input, *exchange.header, mask, exchange.uses_sums)
    buffers = call.buffers if call.buffers.running_mean is not None else ops.NO_BUFFERS  # call.tracked_buffers
    rows, ranks, fault, number = exchange.gather(row)
    if call.accumulate is not None:
        call.accumulate(rows, ranks, buffers, options)
        buffers = ops.NO_BUFFERS
    if exchange.is_traced:
        # Merged without the buffers, since a graph that recomputes it in backward must not depend on changed buffers.
        statistics = ops.merge_stats(rows, ops.NO_BUFFERS, options, ranks)
        ops.merge_stats(rows, buffers, options, ranks, fault, number)
    else:
        statistics = ops.merge_stats(rows, buffers, options, ranks, fault, number)
        exchange.check(rows)
    return statistics
