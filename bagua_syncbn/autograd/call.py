"""Calls of the step: options, buffers, mask and ranks of a call, without the tensors that may have gradients."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..options import Options
from ..sync import Sync


class Call:
    """Options, buffers, mask and ranks of a call, and later its statistics."""

    __slots__ = ("buffers", "layer", "masking", "options", "statistics", "sync")

    def __init__(
        self,
        options: Options,
        buffers: ops.Buffers,
        sync: Sync,
        layer: nn.Module | None = None,
        masking: ops.Masking | None = None,
    ) -> None:
        self.options, self.buffers, self.sync, self.layer, self.masking = options, buffers, sync, layer, masking
        self.statistics: ops.MergedStats | None = None  # set by the forward pass

    def gather(self, input: Tensor) -> ops.MergedStats:
        """Returns the statistics of all ranks' inputs, and moves the buffers by them."""
        sync = self.sync
        if self.masking is None:
            stats = ops.batch_norm_stats(input, *sync.header())
        else:
            stats = ops.batch_norm_stats(input, *sync.header(), mask=self.masking.positions)
        # Averages over all batches need as many batches on all ranks.
        counter = self.buffers.num_batches_tracked if self.options.momentum is None else None
        gathered = sync.gather(stats, counter)
        record = None if sync.record is None else sync.record.tensor
        if torch.compiler.is_compiling():
            # Merged without the buffers, since a graph that repeats it in backward must not depend on changed buffers.
            merged = ops.merge_stats(gathered, ops.NO_BUFFERS, self.options)
            ops.merge_stats(gathered, self.buffers, self.options, record)
        else:
            merged = ops.merge_stats(gathered, self.buffers, self.options, record)
            sync.check(gathered, counter)
        if gathered.dtype != stats.dtype:  # a sum of all ranks
            mean, invstd, *rest = merged
            return mean.to(stats.dtype), invstd.to(stats.dtype), *rest  # type: ignore[return-value]
        return merged

    def without_activation(self) -> "Call":
        """Returns the call that normalizes alone."""
        options = self.options._replace(activation=None)
        return Call(options, self.buffers, self.sync, self.layer, self.masking)

    def after(self, residual: Tensor | None) -> tuple[Any, ...]:
        """Returns mask, residual and activation as trailing arguments of ``batch_norm_elemt``."""
        mask = None if self.masking is None else self.masking.output_mask
        activation = self.options.activation
        if activation is not None:
            return mask, residual, activation.code, activation.parameter
        return () if mask is residual is None else (mask, residual)


def follow(output: Tensor, residual: Tensor | None, options: Options, masking: ops.Masking | None = None) -> Tensor:
    """Returns ``output`` with residual, activation and mask applied, in operations of torch."""
    if residual is not None:
        residual = residual if masking is None else masking.clear_outputs(residual)
        output = output + residual.to(output.dtype)
    if options.activation is not None:
        output = options.activation.of(output)
    return output if masking is None else masking.clear_outputs(output)
