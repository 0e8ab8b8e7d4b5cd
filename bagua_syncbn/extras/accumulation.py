"""Accumulation of statistics: running statistics move once for all micro-batches of a step."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from ..checks import named
from ..conversion.hooks import own_forward_contexts
from ..conversion.own_forward import restored_counter
from ..models import check_module
from ..ops.gather_stats import this_thread
from ..step.call import Call
from ..sync_batchnorm import SyncBatchNorm
from ..torch_internals.autograd import is_capturing
from .accumulator import StatisticsAccumulator


class Accumulation:
    """Attached to a layer, it takes the statistics of calls in training, in place of the running statistics."""

    def __init__(self, layer: SyncBatchNorm) -> None:
        device = torch.device("cpu") if layer.running_mean is None else layer.running_mean.device
        self.statistics = StatisticsAccumulator(layer.num_features, device)

    def __call__(self, go: Callable[[Call], Tensor], call: Call) -> Tensor:
        buffers = call.buffers
        if not call.training or buffers.running_mean is None:
            return go(call)
        error = ""
        if buffers.running_mean is not getattr(call.layer, "running_mean", None):
            error = (
                "running_mean: expected the buffer of the layer within accumulate_statistics, which moves it at its "
                "end; got another tensor"
            )
        elif not torch.compiler.is_compiling() and is_capturing():
            error = (
                "accumulate_statistics: expected no capture of a CUDA graph, because it does not see replays; capture "
                "outside of it"
            )
        if error:
            raise named(RuntimeError(error), call.layer)
        return go(call._replace(accumulate=self.statistics.take))


def accumulation_of(layer: SyncBatchNorm) -> StatisticsAccumulator | None:
    """Returns what takes the statistics of ``layer`` within :func:`accumulate_statistics`; None outside of it."""
    found = layer._sync_state.attached(Accumulation)
    return None if found is None else found.statistics


@own_forward_contexts.register
def _counter_in_accumulation(layer: SyncBatchNorm) -> AbstractContextManager[None] | None:
    """Makes the micro-batches of a layer whose own forward counts them count as one batch."""
    accumulation, counter = accumulation_of(layer), getattr(layer, "num_batches_tracked", None)
    return None if accumulation is None or counter is None else _counted_once(accumulation, counter)


@contextmanager
def _counted_once(accumulation: StatisticsAccumulator, counter: Tensor) -> Iterator[None]:
    with restored_counter(counter):
        yield
        if torch.compiler.is_compiling() or not this_thread.holds_buffers:  # a recomputation does not count
            accumulation.counted = counter.clone()


@contextmanager
def accumulate_statistics(model: nn.Module) -> Iterator[None]:
    """Moves the running statistics of ``model`` once for all micro-batches of a step, when the context is left.

    Enter the context around all forward passes of the step. Within it the buffers of synchronized layers do not change.
    At its end they move as one batch of all micro-batches would have moved them; ``num_batches_tracked`` increases by
    one. Nothing more is communicated. A layer keeps one row of 2C + 2 values, however many micro-batches there are.
    Outputs and gradients do not change: each micro-batch is normalized by its own statistics.

    A layer with ``skip_nonfinite`` leaves its buffers if any of the micro-batches has statistics that are not finite.
    If an exception leaves the context, all buffers have the values from before it. It warns if ``model`` has no
    synchronized layer.

    Args:
        model: the model whose layers accumulate, wrapped or not. All ranks of a group must enter the context for the
            same layers.

    Raises:
        RuntimeError: a layer of ``model`` is within another accumulate_statistics; a layer has other buffers than in
            its last forward, in which case no buffer moves; a layer with a forward of its own passes running statistics
            that are not its buffers.

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
            raise RuntimeError(
                f"model: expected layers that do not accumulate yet, got {name!r} within another accumulate_statistics"
            )
    for layer in layers.values():
        layer._sync_state.attach(Accumulation, Accumulation(layer))
    try:
        yield
        accumulators = ((name, layer, accumulation_of(layer)) for name, layer in layers.items())
        found = [(name, layer, accumulator) for name, layer, accumulator in accumulators if accumulator is not None]
        for name, layer, accumulator in found:
            own = {buffer.data_ptr() for buffer in layer.buffers(recurse=False)}
            if not own.issuperset(buffer.data_ptr() for buffer in accumulator.buffers()):
                raise RuntimeError(
                    "model: expected the same buffers at the end of accumulate_statistics as in the forward passes "
                    f"within it, got others in {name!r}; none has moved"
                )
        with torch.no_grad():
            for _, layer, accumulator in found:
                if accumulator.counted is not None and layer.num_batches_tracked is not None:
                    layer.num_batches_tracked.copy_(accumulator.counted)
                accumulator.move()
    finally:
        for layer in layers.values():
            layer._sync_state.attach(Accumulation, None)
