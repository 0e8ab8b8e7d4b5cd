"""Accumulates statistics: running statistics are updated once for all micro-batches of a step."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from ..checks import named
from ..conversion.hooks import own_forward_contexts
from ..conversion.own_forward import restored_counter
from ..models import check_module
from ..ops import NO_BUFFERS, Buffers, merge_stats
from ..ops.headers import HEADER_SUMS_SIZE, WORD, header_size, headers_differ
from ..ops.moments import Moments, merge_dtype, mixture
from ..options import Options
from ..step.call import Call
from ..sync_batchnorm import SyncBatchNorm
from ..threads import this_thread
from ..torch_internals.autograd import is_capturing


class Accumulation:
    """Attached to a layer, it takes the statistics of training calls instead of the running statistics."""

    def __init__(self, layer: SyncBatchNorm) -> None:
        device = torch.device("cpu") if layer.running_mean is None else layer.running_mean.device
        self.row = empty_row(layer.num_features, device)
        self.buffers = NO_BUFFERS
        self._options: Options | None = None
        # num_batches_tracked after the micro-batches, if the layer counts them itself.
        self.counted: Tensor | None = None

    def __call__(self, go: Callable[[Call], Tensor], call: Call) -> Tensor:
        if not call.training or call.buffers.running_mean is None:
            return go(call)
        error = ""
        if call.buffers.running_mean is not getattr(call.layer, "running_mean", None):
            error = (
                "running_mean: expected the layer's buffer inside accumulate_statistics, which updates it on exit; got "
                "another tensor"
            )
        elif not torch.compiler.is_compiling() and is_capturing():
            error = (
                "accumulate_statistics: a CUDA graph cannot be captured inside the context, because it does not see "
                "replays; capture it outside"
            )
        if error:
            raise named(RuntimeError(error), call.layer)
        return go(call._replace(accumulate=self.take))

    def take(self, gathered: Tensor, ranks: int, buffers: Buffers, options: Options) -> None:
        """Adds one batch. :meth:`update_buffers` will use the last batch's buffers and options."""
        self.row, self.buffers, self._options = merged_row(self.row, gathered, ranks), buffers, options

    def update_buffers(self) -> None:
        """Updates the buffers once, by the statistics of all batches together."""
        if self._options is not None:
            merge_stats(self.row, self.buffers, self._options)


def accumulation_of(layer: SyncBatchNorm) -> Accumulation | None:
    """Returns the accumulation of ``layer`` inside :func:`accumulate_statistics`; None outside."""
    return layer._sync_state.attached(Accumulation)


@own_forward_contexts.register
def _counter_in_accumulation(layer: SyncBatchNorm) -> AbstractContextManager[None] | None:
    """Makes the micro-batches of a layer whose own forward counts them count as one batch."""
    accumulation, counter = accumulation_of(layer), getattr(layer, "num_batches_tracked", None)
    return None if accumulation is None or counter is None else _counted_once(accumulation, counter)


@contextmanager
def _counted_once(accumulation: Accumulation, counter: Tensor) -> Iterator[None]:
    with restored_counter(counter):
        yield
        if torch.compiler.is_compiling() or not this_thread.holds_buffers:  # a recomputation does not count
            accumulation.counted = counter.clone()


def empty_row(channels: int, device: torch.device) -> Tensor:
    """Returns statistics of no values (1, 2C + 2); C is 0 for a lazy layer.

    The row has its final size, so that torch.compile makes one graph for any number of batches.
    """
    return torch.zeros(1, 2 * channels + 2, dtype=merge_dtype(device), device=device)


def merged_row(row: Tensor, gathered: Tensor, ranks: int = 1) -> Tensor:
    """Merges one batch into ``row``, which has mean (C), biased variance (C) and count (2).

    Args:
        row: (1, 2C + 2), statistics of all batches so far.
        gathered: as for ``batch_norm_gather_stats``: the rows of all ranks, or their sum over ``ranks``. If the headers
            of the ranks differ, the count of the result is NaN, which no buffer is updated by.
        ranks: number of ranks in a sum.
    """
    if gathered.dim() > 1:
        rows, header = gathered.tensor_split([gathered.size(1) - header_size(gathered)], 1)
        differ = (header != header[:1]).any()
    else:
        sums, header = gathered.tensor_split([-HEADER_SUMS_SIZE])
        rows, differ = Moments.of_sums(sums).as_row(), headers_differ(header, ranks)
    rows = rows.to(merge_dtype(rows.device))
    if row.size(1) == rows.size(1):  # otherwise the first batch of a lazy layer
        rows = torch.cat([row.to(rows), rows])
    channels = rows.size(1) // 2 - 1
    means, variances, low, high = rows.split([channels, channels, 1, 1], 1)
    counts = (low + high * WORD).masked_fill(differ, torch.nan)
    total = counts.sum().view(1)
    return Moments(*mixture(means, variances, counts / total.clamp(min=1)), total).as_row()


@contextmanager
def accumulate_statistics(model: nn.Module) -> Iterator[None]:
    """Updates the running statistics of ``model`` once for all micro-batches of a step, on exit of the context.

    Enter the context around all forward passes of the step. Inside it the buffers of synchronized layers do not change.
    On exit they are updated as by one batch of all micro-batches, and ``num_batches_tracked`` increases by one. This
    needs no additional communication, and a layer stores one row of 2C + 2 values for any number of micro-batches.
    Outputs and gradients do not change: each micro-batch is normalized by its own statistics.

    A layer with ``skip_nonfinite`` keeps its buffers if the statistics of any micro-batch are not finite. After an
    exception inside the context, all buffers have their previous values. It warns if ``model`` has no synchronized
    layer.

    Args:
        model: the model whose layers accumulate, wrapped or not. All ranks of a group must enter the context for the
            same layers.

    Raises:
        RuntimeError: a layer of ``model`` is inside another accumulate_statistics; buffers were replaced after the last
            forward, in which case no buffer is updated; a custom forward passes running statistics that are not the
            layer's buffers.

    Example::

        >>> with bagua_syncbn.accumulate_statistics(model):
        ...     for batch in micro_batches:
        ...         loss(model(batch)).backward()
        >>> optimizer.step()
    """
    check_module(model, "model")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, SyncBatchNorm)}
    if not layers:
        warnings.warn(f"accumulate_statistics: found no synchronized layer in {type(model).__name__}", stacklevel=3)
    for name, layer in layers.items():
        if accumulation_of(layer) is not None:
            raise RuntimeError(f"model: {name!r} is inside another accumulate_statistics; use one context at a time")
    for layer in layers.values():
        layer._sync_state.attach(Accumulation, Accumulation(layer))
    try:
        yield
        found = {name: accumulation_of(layer) for name, layer in layers.items()}
        accumulations = {name: accumulation for name, accumulation in found.items() if accumulation is not None}
        for name, accumulation in accumulations.items():
            own = {buffer.data_ptr() for buffer in layers[name].buffers(recurse=False)}
            if not own.issuperset(buffer.data_ptr() for buffer in accumulation.buffers if buffer is not None):
                raise RuntimeError(
                    f"model: the buffers of {name!r} were replaced inside accumulate_statistics, so no buffer was "
                    "updated; convert or move the model before"
                )
        with torch.no_grad():
            for name, accumulation in accumulations.items():
                counter = layers[name].num_batches_tracked
                if accumulation.counted is not None and counter is not None:
                    counter.copy_(accumulation.counted)
                accumulation.update_buffers()
    finally:
        for layer in layers.values():
            layer._sync_state.attach(Accumulation, None)
