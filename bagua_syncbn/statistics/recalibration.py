"""Recalibrates running statistics from given batches, for example after weight averaging."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .._errors import notifies_peers
from .._groups import ProcessGroupLike, spec_of
from .._names import name_of
from .._ops import Moments
from .._reliability.unsynchronized import check_launch
from .._torch.modules import copy_all
from .._warnings import warn
from ..conversion.dry_run import batch_loop, dry_run
from ..conversion.models import with_attachments
from ..sync_batchnorm import SyncBatchNorm
from .accumulation import Accumulation
from .model_merge import layers_with_statistics, merged_over_ranks
from .over_ranks import meet

_NAME = "recalibrate_statistics"


@notifies_peers(lambda module=None, *_, process_group=None, **__: (process_group, module))
def recalibrate_statistics(
    module: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[Any], Any] | None = None,
    device: torch.device | str | int | None = None,
    process_group: ProcessGroupLike = None,
) -> None:
    """Recomputes running statistics from the given batches of all ranks (precise batch normalization).

    Averaged weights (e.g. :class:`torch.optim.swa_utils.AveragedModel`) have no running statistics, and statistics from
    training lag behind the weights. This function runs ``batches`` without gradients, and sets the statistics of each
    layer to the mean and the unbiased variance of the layer's inputs in all calls on all ranks.

    Layers normalize each batch as in training, but locally: ranks communicate only once before and once after the pass.
    Results depend on batch sizes, so use batches as large as the training batches of all ranks together. Results do not
    depend on the distribution of batches over ranks; a rank may have no batch.

    All other modules run in evaluation mode, so dropout is off. Frozen layers (:func:`freeze_statistics`) do not
    change. Masks have the same effect as in training. A layer that no batch reaches does not change, and a warning
    names it.

    Parameters, modes, ``num_batches_tracked``, hooks, process groups and random states do not change; after an
    exception, statistics do not either. Tensors in plain attributes are not restored if forward writes to them. Memory
    does not grow with the number of batches.

    Args:
        module: the converted model, wrapped or not.
        batches: batches of this rank: tensors, or lists or tuples that begin with a tensor, as from a ``DataLoader``.
        forward: runs the model on a batch, which may have any type. None for ``module(batch)``.
        device: where to move batches before calling ``module``; None to leave them. Cannot be combined with
            ``forward``.
        process_group: the ranks that make the call; None for the whole job.

    Raises:
        TypeError: ``module`` is not a module; ``batches`` is a tensor, or not iterable; ``forward`` is not callable
            with a batch; ``device`` is not a device; a batch is not a tensor and does not begin with a tensor, and
            there is no ``forward``; a layer with statistics is not synchronized; ``process_group`` has an unknown type.
        ValueError: ``process_group`` does not fit the job; both ``device`` and ``forward`` are given; no rank has a
            batch; a layer gets a single value per channel in a batch.
        RuntimeError: ranks make different calls, or have different layers; a peer raised; statistics are not finite;
            ``WORLD_SIZE`` is above 1, but no process group was initialized.

    A model that communicates in each forward (e.g. after ``fully_shard``) needs equal numbers of batches on all ranks.

    Example::

        >>> averaged = torch.optim.swa_utils.AveragedModel(model)
        >>> bagua_syncbn.recalibrate_statistics(averaged, loader, device="cuda")
    """
    spec = spec_of(process_group)
    run = batch_loop(module, batches, forward, device)
    layers = layers_with_statistics(module)
    for name, layer in layers.items():
        if not isinstance(layer, SyncBatchNorm):
            raise TypeError(f"module: {name_of(layer, name)} is not synchronized; call convert_sync_batchnorm first")
    check_launch(_NAME, spec)
    # All ranks must be in this call, because an error during the pass reaches only peers that wait for a message.
    communicator = meet(_NAME, module, spec, "before its batches")
    with with_attachments(module, _NAME, Accumulation) as found, dry_run(module, set(layers.values())):
        run()
    own = {name: Moments.of_row(found[layer].row[0]) for name, layer in layers.items()}
    merged = merged_over_ranks(_NAME, module, own, communicator, "check batches and parameters for infinities and NaN")
    counts = {name: moments.weight.item() for name, moments in merged.items()}
    if layers and not any(counts.values()):
        raise ValueError("batches: expected a non-empty batch on some rank, got no input to any layer")
    kept = [name for name, count in counts.items() if count < 2]
    if kept:
        warn(f"{_NAME}: no batch reached these layers, which keep their statistics: {', '.join(kept)}")
    reached = [name for name in layers if name not in kept]
    buffers = [getattr(layers[name], buffer) for buffer in ("running_mean", "running_var") for name in reached]
    means = [merged[name].mean for name in reached]
    variances = [merged[name].var * (counts[name] / (counts[name] - 1)) for name in reached]
    copy_all(buffers, means + variances)
