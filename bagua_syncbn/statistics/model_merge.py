"""Merges running statistics that differ between ranks."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from .._errors import notifies_peers
from .._groups import LOCAL, ProcessGroupLike, spec_of
from .._ops import Moments
from .._reliability.unsynchronized import check_launch
from .._step.checks import check_number
from .._torch.autograd import is_without_data
from .._torch.modules import copy_all
from .._warnings import warn
from ..conversion.models import check_module
from .freezing import is_frozen
from .over_ranks import sum_over_ranks

# Replaces a counter of 0: negligible compared to a batch, but above 0 if no rank has a batch.
_NO_BATCH = 2.0**-600


@notifies_peers(lambda module=None, process_group=None, **_: (process_group, module))
def merge_statistics(module: nn.Module, process_group: ProcessGroupLike = None, *, weight: float = 1.0) -> None:
    r"""Merges the running statistics of all ranks, in a single collective for the whole model.

    Layers that synchronize within groups (e.g. ``process_group="node"``) or not at all have different running
    statistics on each rank. Call this before evaluation, or before rank 0 saves a checkpoint. All ranks get the same
    bits, computed in float64 and rounded to the dtype of the buffers:

    .. math::

        m = \frac{1}{n} \sum_r n_r m_r, \qquad
        v = \frac{1}{n} \sum_r n_r \left( v_r + (m_r - m)^2 \right), \qquad n = \sum_r n_r

    Rank :math:`r` has ``running_mean`` :math:`m_r`, ``running_var`` :math:`v_r`, and :math:`n_r`, which is
    ``num_batches_tracked`` times ``weight``. If no rank has counted a batch, each rank has the weight ``weight``. Ranks
    of a synchronized group add their weights.

    Counters do not change, so training can continue: with ``momentum=None``, repeated merges give the mean over all
    batches of all ranks. Layers without running statistics and frozen layers (:func:`freeze_statistics`) are skipped.

    Args:
        module: the model, wrapped or not, in any mode, with synchronized or torch's layers. All ranks must make the
            call, with the same layer names and numbers of channels.
        process_group: the ranks to merge; None for the whole job.
        weight: weight of a batch of this rank, for example the number of samples if batch sizes differ.

    Shape:
        - ``running_mean``, ``running_var`` of each layer: (C)
        - ``num_batches_tracked``: scalar

    Raises:
        TypeError: ``module`` is not a module; ``weight`` is not a number; ``process_group`` has an unknown type.
        ValueError: ``weight`` is not finite or not above 0; ``process_group`` does not fit the job.
        RuntimeError: ranks make different calls, or have different layers; merged statistics are not finite;
            ``WORLD_SIZE`` is above 1, but no process group was initialized. In these cases, no buffer is updated.

    Warns if no layer has running statistics, or if :class:`~torch.nn.parallel.DistributedDataParallel` broadcasts
    buffers in forward, so that only rank 0 contributes. No-op outside of jobs and for models on the meta device.

    Example::

        >>> bagua_syncbn.merge_statistics(model)
        >>> if torch.distributed.get_rank() == 0:
        ...     torch.save(model.state_dict(), "model.pt")
    """
    spec = spec_of(process_group)
    check_module(module)
    check_number("weight", weight)
    if not 0 < weight < math.inf:
        raise ValueError(f"weight: expected a finite number above 0, got {weight}")
    layers = layers_with_statistics(module)
    if not layers:
        warn(f"merge_statistics: found no layer with running statistics in {type(module).__name__}")
    if any(isinstance(part, DistributedDataParallel) and part.broadcast_buffers for part in module.modules()):
        warn(
            "merge_statistics: forward of DistributedDataParallel overwrites the buffers with those of rank 0; "
            "set its attribute broadcast_buffers to False"
        )
    own = {}
    for name, layer in layers.items():
        mean, counter = layer.running_mean.double(), layer.num_batches_tracked
        batches = mean.new_ones(1) if counter is None else counter.double().reshape(1).clamp(min=_NO_BATCH)
        own[name] = Moments(mean, layer.running_var.double(), batches * weight)
    check_launch("merge_statistics", spec)
    communicator = LOCAL if any(is_without_data(each.mean) for each in own.values()) else spec.communicator()
    if communicator.size == 1:
        return
    merged = merged_over_ranks("merge_statistics", module, own, communicator, "call recalibrate_statistics instead")
    buffers = [getattr(layer, buffer) for buffer in ("running_mean", "running_var") for layer in layers.values()]
    means, variances = ([getattr(merged[name], kind) for name in layers] for kind in ("mean", "var"))
    copy_all(buffers, means + variances)


def layers_with_statistics(module: nn.Module) -> dict[str, Any]:
    """Returns the layers of ``module`` that have running statistics and are not frozen, by name."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    return {name: layer for name, layer in layers.items() if layer.running_mean is not None and not is_frozen(layer)}


def merged_over_ranks(
    what: str, module: nn.Module, own: Mapping[str, Moments], communicator: Any, remedy: str
) -> dict[str, Moments]:
    """Returns each layer's moments over all ranks, given this rank's ``own`` moments by layer name.

    ``remedy`` is the last part of the error message for results that are not finite.

    Raises:
        RuntimeError: a peer makes a call other than ``what``, or has different layers; a result is not finite.
    """
    merged, sizes = dict(own), {name: moments.mean.numel() for name, moments in own.items()}
    layout = zlib.crc32(repr(list(sizes.items())).encode())
    details = f"channels: {sum(sizes.values())} in {len(sizes)} layers, of names and sizes {layout:08x}"
    if communicator.size > 1:
        sums = [moments.as_sums() for moments in own.values()]
        packed = torch.cat([each.to(sums[0].device) for each in sums]) if sums else torch.empty(0, dtype=torch.float64)
        total = sum_over_ranks(packed, communicator, what, module, details)
        parts = total.split([2 * size + 1 for size in sizes.values()])
        for (name, moments), part in zip(own.items(), parts, strict=True):
            merged[name] = Moments.of_sums(part.to(moments.mean.device))
    wrong = [name or "the model itself" for name, each in merged.items() if not torch.cat(each).isfinite().all()]
    if wrong:
        names = ", ".join(wrong)
        raise RuntimeError(f"{what}: statistics are not finite in {names} on some rank, so none was updated; {remedy}")
    return merged
