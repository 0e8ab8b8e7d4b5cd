"""Accumulation of statistics: running statistics move once for all micro-batches of a step."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .. import ops
from ..models import check_module
from ..sync_batchnorm import SyncBatchNorm


@contextmanager
def accumulate_statistics(model: nn.Module) -> Iterator[None]:
    """Moves the running statistics of ``model`` once for all micro-batches of a step, when the context is left.

    Enter the context around all forward passes of the step. Within it the buffers of synchronized layers do not change.
    At its end they move by the mean and variance of all micro-batches together, each value with the same weight, as one
    batch of them all would have moved them; ``num_batches_tracked`` increases by one. No more is communicated: what
    each micro-batch has gathered is merged into one row of 2C + 2 values, however many there are.

    Outputs and gradients do not change: each micro-batch is normalized by its own statistics.

    A layer with ``skip_nonfinite`` leaves its buffers if any of the micro-batches has statistics that are not finite.
    If an exception leaves the context, all buffers have the values from before it. A warning says if ``model`` has no
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
        if layer._accumulator is not None:
            raise RuntimeError(
                f"model: expected layers that do not accumulate yet, got {name!r} within another accumulate_statistics"
            )
    for layer in layers.values():
        device = torch.device("cpu") if layer.running_mean is None else layer.running_mean.device
        layer._accumulator = ops.StatisticsAccumulator(layer.num_features, device)
    try:
        yield
        for name, layer in layers.items():
            _check_buffers(name, layer)
        for layer in layers.values():
            _move_buffers(layer)
    finally:
        for layer in layers.values():
            del layer._accumulator


def _check_buffers(name: str, layer: SyncBatchNorm) -> None:
    """Raises RuntimeError unless the accumulated statistics belong to the present buffers of ``layer``."""
    assert layer._accumulator is not None
    own = {buffer.data_ptr() for buffer in layer.buffers(recurse=False)}
    if not own.issuperset(buffer.data_ptr() for buffer in layer._accumulator.buffers()):
        raise RuntimeError(
            f"model: expected the same buffers at the end of accumulate_statistics as in the forward passes within it, "
            f"got others in {name!r}; none has moved"
        )


def _move_buffers(layer: SyncBatchNorm) -> None:
    accumulator = layer._accumulator
    assert accumulator is not None
    with torch.no_grad():
        if accumulator.counted is not None and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.copy_(accumulator.counted)
        accumulator.move()
