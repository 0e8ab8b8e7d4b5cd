"""Statistics of a call: this rank's, gathered from all ranks, merged. No part of autograd's graph."""

from torch import Tensor

from .. import ops
from ..options import Options
from .call import Statistics
from .exchange import Exchange


def batch_statistics(
    input: Tensor, exchange: Exchange, buffers: ops.Buffers, options: Options, mask: Tensor | None = None
) -> Statistics:
    """Returns the statistics of the inputs of all ranks, and moves ``buffers`` by them.

    ``input`` takes part in no graph. ``mask`` says which of its positions count, as the ops take it.
    """
    if mask is None and not exchange.adds_up:
        row = ops.batch_norm_stats(input, *exchange.header)
    else:
        row = ops.batch_norm_stats(input, *exchange.header, mask, exchange.adds_up)
    # Averages over all batches need as many batches on all ranks.
    counter = buffers.num_batches_tracked if options.momentum is None else None
    gathered, *compared = exchange.gather(row, counter)
    if exchange.is_traced:
        # Merged without the buffers, since a graph that repeats it in backward must not depend on changed buffers.
        statistics = ops.merge_stats(gathered, ops.NO_BUFFERS, options, *compared[:1])
        ops.merge_stats(gathered, buffers, options, *compared)
    else:
        statistics = ops.merge_stats(gathered, buffers, options, *compared)
        exchange.check(gathered, counter)
    return statistics
