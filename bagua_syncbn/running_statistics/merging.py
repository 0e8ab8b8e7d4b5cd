"""Merges running statistics that differ between ranks."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from warnings import warn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ..checks import check_number
from ..errors import notifies_peers
from ..groups import spec_of
from ..models import check_module
from ..ops import Moments
from ..over_ranks import sum_over_ranks
from .freezing import is_frozen

# Weight of a rank that has counted no batch: negligible compared with one batch, and equal on all ranks if no rank has.
_NO_BATCH = 2.0**-600


@notifies_peers(lambda module=None, process_group=None, **_: (process_group, module))
def merge_statistics(module: nn.Module, process_group: Any = None, *, weight: float = 1.0) -> None:
    r"""Merges the running statistics of all ranks, in one collective for the whole model.

    Layers that synchronize within groups (e.g. ``process_group="node"``) or not at all have different running
    statistics in each group or on each rank, and a checkpoint saves only those of rank 0. Call this before evaluation
    or saving. The result is bitwise equal on all ranks,

    .. math::

        m = \frac{1}{n} \sum_r n_r m_r, \qquad
        v = \frac{1}{n} \sum_r n_r \left( v_r + (m_r - m)^2 \right), \qquad n = \sum_r n_r

    from ``running_mean`` :math:`m_r` and ``running_var`` :math:`v_r` of rank :math:`r`: mean and variance of all ranks'
    data together. It is computed in float64, then rounded to the dtype of the buffers.

    :math:`n_r` is ``num_batches_tracked`` of the rank times ``weight``. A rank without a batch has no weight; if all
    ranks have none, or there is no counter, all have the same weight. The ranks of a synchronized group have counted
    the same batches, so a group's weight is proportional to its size.

    ``num_batches_tracked`` does not change on any rank, so training can continue, and later merges weight everything
    that a rank has seen: with ``momentum=None`` the mean is then the mean over all batches of all ranks. Layers without
    running statistics and frozen layers (:func:`freeze_statistics`) are skipped.

    Args:
        module: the model, wrapped or not, in any mode; its layers may be synchronized or torch's. All ranks make the
            call, with layers of the same names and numbers of channels.
        process_group: the ranks to merge, as for :func:`sync_batch_norm`; None for the whole job.
        weight: the weight of a batch of this rank; for example its number of samples, if that differs between ranks.

    Shape:
        - ``running_mean``, ``running_var`` of each layer: (C)
        - ``num_batches_tracked``: scalar

    Raises:
        TypeError: ``module`` is not a module; ``process_group`` has an unknown type.
        ValueError: ``weight`` is not finite or not above 0; a layer has ``momentum=None`` and no
            ``num_batches_tracked``.
        RuntimeError: ranks make different calls, or have different layers; merged statistics are not finite. No buffer
            is updated then.

    It warns if there is nothing to merge, and if ``module`` is in a
    :class:`~torch.nn.parallel.DistributedDataParallel` without ``broadcast_buffers=False``, which copies the buffers of
    rank 0 to all ranks in each forward pass. Without a job it is a no-op.

    Example::

        >>> bagua_syncbn.merge_statistics(model)
        >>> if torch.distributed.get_rank() == 0:
        ...     torch.save(model.state_dict(), "model.pt")
    """
    spec = spec_of(process_group)
    check_module(module)
    check_number("weight", weight)
    if not (math.isfinite(weight) and weight > 0):
        raise ValueError(f"weight: expected a finite number above 0, got {weight}")
    layers = layers_with_statistics(module)
    if not layers:
        warn(f"merge_statistics: found no layer with running statistics in {type(module).__name__}", stacklevel=3)
    if any(isinstance(part, DistributedDataParallel) and part.broadcast_buffers for part in module.modules()):
        warn(
            "merge_statistics: ranks lose their running statistics, because DistributedDataParallel copies the buffers "
            "of rank 0 in each forward pass; create it with broadcast_buffers=False",
            stacklevel=3,
        )
    own = [_moments_of(name, layer, weight) for name, layer in layers.items()]
    communicator = spec.communicator("merge_statistics")
    if communicator.size == 1:
        return
    merged = merged_over_ranks("merge_statistics", module, layers, own, communicator)
    with torch.no_grad():
        for layer, moments in zip(layers.values(), merged, strict=True):
            layer.running_mean.copy_(moments.mean)
            layer.running_var.copy_(moments.var)


def layers_with_statistics(module: nn.Module) -> dict[str, Any]:
    """Returns the layers of ``module`` that have running statistics and are not frozen, by name."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    return {
        name: layer
        for name, layer in layers.items()
        if layer.running_mean is not None and layer.running_var is not None and not is_frozen(layer)
    }


def _moments_of(name: str, layer: Any, weight: float) -> Moments:
    mean, var, counter = layer.running_mean.double(), layer.running_var.double(), layer.num_batches_tracked
    if counter is not None:
        return Moments(mean, var, counter.double().reshape(1).clamp(min=_NO_BATCH) * weight)
    if layer.momentum is None:
        raise ValueError(f"module: expected num_batches_tracked in a layer with momentum=None, got None in {name!r}")
    return Moments(mean, var, mean.new_tensor([weight]))


def merged_over_ranks(
    what: str, module: nn.Module, layers: Mapping[str, Any], own: Sequence[Moments], communicator: Any
) -> list[Moments]:
    """Returns the moments of all ranks together for each of ``layers``, given this rank's ``own``.

    Raises:
        RuntimeError: ranks make different calls than ``what``, or have different layers; a result is not finite.
    """
    sizes = [moments.mean.numel() for moments in own]
    layout = zlib.crc32(repr(list(zip(layers, sizes, strict=True))).encode())
    details = f"channels: {sum(sizes)} in {len(sizes)} layers, of names and sizes {layout:08x}"
    sums = [moments.as_sums() for moments in own]
    packed = torch.cat([one.to(sums[0].device) for one in sums]) if sums else torch.empty(0, dtype=torch.float64)
    total = sum_over_ranks(packed, communicator, what, module, details).split([2 * size + 1 for size in sizes])
    merged = list(own)
    if communicator.size > 1:
        merged = [Moments.of_sums(one.to(moments.mean.device)) for one, moments in zip(total, own, strict=True)]
    finite = {name: bool(torch.cat(own).isfinite().all()) for name, own in zip(layers, merged, strict=True)}
    wrong = [name or "the model itself" for name, is_finite in finite.items() if not is_finite]
    if wrong:
        raise RuntimeError(f"{what}: statistics are not finite in {', '.join(wrong)} on some rank; none was updated")
    return merged
