"""Accumulates the statistics of several batches before they update running statistics."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._ops import NO_BUFFERS, Buffers, Moments, Received, merge_stats
from .._ops.moments import merge_dtype
from .._ops.options import Options
from .._step.call import Call, Statistics
from .._step.checks import named
from .._torch.autograd import is_capturing, is_without_data
from .._warnings import context
from ..conversion.models import with_attachments
from ..sync_batchnorm import SyncBatchNorm


class Accumulation:
    """Attachment that merges the statistics of a layer's training calls, which then update no buffers."""

    counts_batches = True
    """Makes custom forwards skip the count of each micro-batch, see ``conversion/own_forward.py``."""

    def __init__(self, layer: Any) -> None:
        device = torch.device("cpu") if layer.running_mean is None else layer.running_mean.device
        # Statistics of all batches so far, as in batch_norm_stats. Allocated at full size (except in lazy layers), so
        # that torch.compile needs a single graph for any number of batches.
        self.row = torch.zeros(1, 2 * layer.num_features + 2, dtype=merge_dtype(device), device=device)
        self._options: Options | None = None

    def __call__(self, go: Callable[[Call], Tensor], call: Call) -> Tensor:
        is_outer = call.accumulate is not None  # inside recalibrate_statistics
        if not call.uses_batch or call.buffers[0] is None or is_outer or is_without_data(call.input):
            return go(call)
        error = ""
        if call.buffers[0] is not getattr(call.layer, "running_mean", None):
            error = "running_mean: while statistics accumulate, a custom forward must pass the buffer, not a view"
        elif call.mode != "compiled" and is_capturing():
            error = "a CUDA graph cannot be captured while statistics accumulate, because replays run no Python"
        if error:
            raise named(RuntimeError(error), call.layer)
        return go(call._replace(accumulate=self.take))

    def take(self, received: Received, _: Buffers, options: Options) -> Statistics:
        """Adds the statistics of a batch, and returns them merged. Updates no buffers."""
        batch = self._merged(received)
        is_lazy = self.row.size(1) != batch.size(1)
        self.row = batch if is_lazy else self._merged(Received(torch.cat([self.row, batch])))
        self._options = options
        return merge_stats(received, NO_BUFFERS, options)

    def _merged(self, received: Received) -> Tensor:
        mean, invstd, count = merge_stats(received, NO_BUFFERS, Options(eps=0.0))
        # If headers differ between ranks, the op returns NaN and a count of 0. A count of -1 keeps the row invalid.
        count = count.masked_fill((count == 0) & mean.isnan().any(), -1)
        return Moments(mean, invstd**-2, count.view(1)).as_row().to(self.row.dtype)

    def update_buffers(self, layer: SyncBatchNorm) -> None:
        """Updates the buffers of ``layer`` as a single batch would, with the options of the last batch."""
        if self._options is not None:
            tensors = layer.running_mean, layer.running_var, layer.num_batches_tracked
            mean, var, counter = (None if tensor is None else tensor.detach() for tensor in tensors)
            merge_stats(Received(self.row), (mean, var, counter), self._options)


@context
def accumulate_statistics(model: nn.Module) -> Iterator[None]:
    """Updates the running statistics of ``model`` once for all micro-batches of a step, on exit of the context.

    Enter the context around all forward passes of the step. Outputs and gradients do not change: each micro-batch is
    normalized with separate statistics. On exit, buffers are updated as if all micro-batches were a single batch, and
    ``num_batches_tracked`` increases by 1. Accumulation needs no additional communication. A layer stores 2C + 2 values
    for any number of micro-batches.

    With ``skip_nonfinite``, buffers do not change if the statistics of any micro-batch are not finite. After an
    exception inside the context, no buffer changes. In nested contexts, the outermost context updates the buffers.
    Warns if ``model`` has no synchronized layer, and without a ``with`` statement.

    Args:
        model: the model, wrapped or not. All ranks of a group must enter the context for the same layers.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: a custom forward normalizes with tensors other than the layer's buffers; a CUDA graph is captured
            inside the context.

    Example::

        >>> with bagua_syncbn.accumulate_statistics(model):
        ...     for batch in micro_batches:
        ...         loss(model(batch)).backward()
        >>> optimizer.step()
    """

    def outermost(layer: SyncBatchNorm) -> Accumulation | None:
        return None if layer._sync_state.find(Accumulation) else Accumulation(layer)

    with with_attachments(model, "accumulate_statistics", outermost) as accumulations:
        yield
        for layer, accumulation in accumulations.items():
            accumulation.update_buffers(layer)
