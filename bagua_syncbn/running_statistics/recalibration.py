"""Recalibrates running statistics from given batches, for example after weight averaging."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from .. import ops
from ..checks import named
from ..dry_run import forward_of, observe_inputs
from ..errors import notifies_peers
from ..groups import spec_of
from ..masked import masks_of
from ..masks import masking_of
from ..models import check_module
from ..names import name_of
from ..over_ranks import sum_over_ranks
from ..sync_batchnorm import SyncBatchNorm
from .accumulation import empty_row, merged_row
from .merging import layers_with_statistics, merged_over_ranks

_NAME = "recalibrate_statistics"


@notifies_peers(lambda module=None, *_, process_group=None, **__: (process_group, module))
def recalibrate_statistics(
    module: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[Any], Any] | None = None,
    device: torch.device | str | int | None = None,
    process_group: Any = None,
) -> None:
    """Recomputes running statistics from the given batches of all ranks (precise batch normalization).

    Averaged weights (e.g. :class:`torch.optim.swa_utils.AveragedModel`) have no running statistics, and statistics from
    training lag behind the weights. One pass without gradients over ``batches`` sets the statistics of each layer to
    the mean and the unbiased variance of all its inputs, in all batches of all ranks and in all its calls.

    Each batch is normalized by its own statistics, as in training, but without communication: ranks communicate only
    once before and once after the pass. A rank may have any number of batches of any sizes, or none, and the result
    does not depend on how batches are distributed over ranks. It depends on their sizes, because earlier layers
    normalize by batch: use batches as large as all ranks' batches together in training.

    All other modules run in evaluation mode, without dropout. Frozen layers (:func:`freeze_statistics`) normalize by
    their running statistics and keep them. Masks have the same effect as in training. A layer that gets no batch keeps
    its statistics, and a warning names it.

    Nothing else changes: parameters, modes, momentum, ``num_batches_tracked``, hooks, process groups, and the random
    states of torch, ``random`` and NumPy. After an exception the statistics are unchanged too. Memory does not grow
    with the number of batches. If ``tqdm`` is installed and standard error is a terminal, rank 0 shows a progress bar.

    Args:
        module: the model, wrapped or not; its layers may be synchronized or torch's.
        batches: batches of this rank: tensors, or lists or tuples that begin with a tensor, as from a ``DataLoader``.
        forward: called with each batch, runs the model; for other kinds of batches. None for ``module(batch)``.
        device: where batches are moved before ``module`` is called; None to leave them. Not together with ``forward``.
        process_group: the ranks that take part, as for :func:`sync_batch_norm`; None for the whole job.

    Raises:
        TypeError: ``module`` is not a module; ``forward`` is not callable; a batch has another type, and there is no
            ``forward``; a layer is a :class:`torch.nn.SyncBatchNorm`, which communicates in each forward: convert it.
        ValueError: ``device`` is given together with ``forward``; no rank has a batch; a layer gets one value per
            channel in a batch.
        RuntimeError: ranks make different calls, or have different layers; another rank raised; statistics are not
            finite.

    A model that communicates in each forward (e.g. after ``fully_shard``) needs the same number of batches on each
    rank.

    Example::

        >>> averaged = torch.optim.swa_utils.AveragedModel(model)
        >>> bagua_syncbn.recalibrate_statistics(averaged, loader, device="cuda")
    """
    spec = spec_of(process_group)
    check_module(module)
    layers = layers_with_statistics(module)
    for name, layer in layers.items():
        if isinstance(layer, nn.SyncBatchNorm):
            raise TypeError(
                f"module: expected layers that can run without communication, got torch's {name_of(layer, name)}; "
                "call convert_sync_batchnorm first"
            )
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, torch.Tensor) or not is_iterable:  # a tensor would be taken for samples without a batch
        raise TypeError(f"batches: expected a list of batches, or an iterable, got {type(batches).__name__}")
    run = forward_of(module, forward, device)
    if not layers:
        warn(f"{_NAME}: found no layer with running statistics in {type(module).__name__}", stacklevel=3)
    communicator = spec.communicator(_NAME)
    # A rank that raises in the pass can notify only ranks that wait for its message: all ranks have to start first.
    device_of_ranks = next((layer.running_mean.device for layer in layers.values()), torch.device("cpu"))
    nothing = torch.empty(0, dtype=torch.float64, device=device_of_ranks)
    sum_over_ranks(nothing, communicator, _NAME, module, "before its batches")
    shown = _with_progress(batches) if communicator.rank == 0 else batches
    rows = {name: empty_row(layer.running_mean.numel(), layer.running_mean.device) for name, layer in layers.items()}
    observe_inputs(module, layers, partial(_add, Lock(), rows), shown, run, training=True)
    own = [ops.Moments.of_row(row[0]) for row in rows.values()]
    _set_statistics(layers, merged_over_ranks(_NAME, module, layers, own, communicator))


def _with_progress(batches: Iterable[Any]) -> Iterable[Any]:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return batches
    shown: Iterable[Any] = tqdm(batches, _NAME, leave=False, disable=None)  # disabled without a terminal
    return shown


def _add(
    lock: Lock,  # replicas of a layer run in threads
    rows: dict[str, Tensor],
    name: str,
    layer: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Merges the statistics of one input of ``layer`` into its row."""
    input = args[0] if args else options["input"]
    if hasattr(input, "to_local"):  # a DTensor; only a replicated one needs no communication
        input = input.to_local()
    masking = None
    try:
        layer._check_input_dim(input)
        if isinstance(layer, SyncBatchNorm):
            masking = masking_of(input, masks_of(layer, options))
    except (TypeError, ValueError, RuntimeError) as error:
        raise named(error, layer) from None
    stats = ops.batch_norm_stats(input, mask=None if masking is None else masking.positions)
    with lock:
        rows[name] = merged_row(rows[name], stats.unsqueeze(0))


def _set_statistics(layers: dict[str, Any], merged: Sequence[ops.Moments]) -> None:
    counts = [moments.weight.item() for moments in merged]
    if layers and not any(counts):
        raise ValueError("batches: expected a non-empty batch on some rank, got none that reaches a layer")
    kept = [name for name, count in zip(layers, counts, strict=True) if count < 2]
    if kept:
        warn(f"{_NAME}: no batch reached these layers, which keep their statistics: {', '.join(kept)}", stacklevel=4)
    for layer, moments, count in zip(layers.values(), merged, counts, strict=True):
        if count >= 2:
            layer.running_mean.copy_(moments.mean)
            layer.running_var.copy_(moments.var * (count / (count - 1)))
