"""A call: what the step needs beside tensors that may have gradients."""

from typing import Any

from torch import Tensor, nn

from .. import ops
from ..options import Options
from ..sync import Sync


class Call:
    """A call without the tensors that may have gradients: options, buffers, mask and ranks.

    It has a number in the group, and statistics, once these are gathered. A checkpoint repeats the call with all of it.
    """

    __slots__ = ("buffers", "layer", "masking", "number", "options", "statistics", "sync")

    def __init__(
        self,
        options: Options,
        buffers: ops.Buffers,
        sync: Sync,
        layer: nn.Module | None = None,
        masking: ops.Masking | None = None,
    ) -> None:
        self.options, self.buffers, self.sync, self.layer, self.masking = options, buffers, sync, layer, masking
        self.number = 0
        self.statistics: ops.MergedStats | None = None

    def gather(self, input: Tensor) -> ops.MergedStats:
        """Returns the statistics of all ranks' inputs, and moves the buffers by them."""
        sync, buffers, options = self.sync, self.buffers, self.options
        speaker, self.number = sync.header()
        if self.masking is None:
            stats = ops.batch_norm_stats(input, speaker, self.number)
        else:
            stats = ops.batch_norm_stats(input, speaker, self.number, self.masking.positions)
        # Averages over all batches need as many batches on all ranks.
        counter = buffers.num_batches_tracked if options.momentum is None else None
        gathered, fault = sync.gather(stats, self.number, counter)
        if sync.is_traced:
            # Merged without the buffers, since a graph that repeats it in backward must not depend on changed buffers.
            merged = ops.merge_stats(gathered, ops.NO_BUFFERS, options)
            ops.merge_stats(gathered, buffers, options, fault)
        else:
            merged = ops.merge_stats(gathered, buffers, options, fault)
            sync.check(self.number, gathered, counter)
        if gathered.dtype != stats.dtype:  # a sum of all ranks
            mean, invstd, *rest = merged
            merged = mean.to(stats.dtype), invstd.to(stats.dtype), *rest  # type: ignore[assignment]
        self.statistics = merged
        return merged

    def without_activation(self) -> "Call":
        """Returns the call that normalizes alone."""
        options = self.options._replace(activation=None)
        return Call(options, self.buffers, self.sync, self.layer, self.masking)

    def after(self, residual: Tensor | None) -> tuple[Any, ...]:
        """Returns residual and activation as trailing arguments of ``batch_norm_elemt``."""
        activation = self.options.activation
        return (residual,) if activation is None else (residual, activation.code, activation.parameter)

    def follow(self, output: Tensor, residual: Tensor | None) -> Tensor:
        """Returns ``output`` with residual, activation and mask applied, in operations of torch."""
        return follow(output, residual, self.options, self.masking)


def follow(output: Tensor, residual: Tensor | None, options: Options, masking: ops.Masking | None = None) -> Tensor:
    """Returns ``output`` with residual, activation and mask applied, in operations of torch."""
    if residual is not None:
        residual = residual if masking is None else masking.clear_outputs(residual)
        output = output + residual.to(output.dtype)
    if options.activation is not None:
        output = options.activation.of(output)
    return output if masking is None else masking.clear_outputs(output)
