"""Checks whether a training step on the ranks equals one process and, if not, names likely causes."""

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._groups import ProcessGroupLike
from .._step.checks import check_callable
from ..conversion.dry_run import unchanged
from ..conversion.models import check_module, is_data_parallel
from .causes import causes_of
from .ranks import Peers, digest
from .steps import Comparison, Loss, Twin, differences, joined, tensor_kind


@dataclass(frozen=True)
class Verdict:
    """Result of :func:`~bagua_syncbn.verify_synchronization`, equal on all ranks.

    The verdict is true if the ranks equal one process.
    """

    ranks: int
    """Number of ranks."""
    compared: str
    """Numbers of compared tensors."""
    difference: str | None
    """Name and error of the first tensor that differs; None if all are equal."""
    notes: tuple[str, ...]
    """Likely causes, and limits of the comparison."""

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        are = ("ranks", "equal", "differ from") if self.ranks > 1 else ("rank", "equals", "differs from")
        text = f"{are[1]} one process: {self.compared}"
        if self.difference is not None:
            text = f"{are[2]} one process: {self.difference}"
        return "\n- ".join([f"{self.ranks} {are[0]} {text}", *self.notes])


def verify_synchronization(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    process_group: ProcessGroupLike = None,
    merge: Callable[[list[Any]], Any] | None = None,
) -> Verdict:
    r"""Compares a training step of ``model`` on all ranks with one process on the merged batch.

    Both steps run in float64 on copies of the model. Outputs, loss, buffers, and gradients averaged over ranks are
    compared. If they differ, the verdict names the likely causes: dropout and other randomness, unconverted layers,
    modules with buffers that differ between ranks after the step, losses that are sums, or means over batches of
    different sizes. If parameters, buffers or modes differ between ranks before the step, the verdict lists them.

    The model, gradients and random states are unchanged afterwards, even after an exception. All ranks must make the
    call, and all raise if any rank raises.

    Args:
        model: in training mode, with or without DistributedDataParallel. Call this function before ``fully_shard`` and
            :func:`with_bagua`, because the model is copied.
        batch: the batch of this rank: tensors in nested tuples, lists and dicts. Copied tensors require a gradient if
            the original does.
        loss: called with an unwrapped copy of the model and a batch; returns a scalar tensor. ``loss`` must call this
            copy, and may communicate only through :func:`mean_over_ranks`.
        process_group: the ranks that take part, as for :func:`sync_group`; None for the whole job.
        merge: merges a list of all ranks' batches. None concatenates tensors along their first dimension; all other
            values must be equal on all ranks.

    Returns:
        A :class:`~bagua_syncbn.verification.Verdict`: true if all tensors are equal on all ranks, and as text the first
        difference with its causes. Values are equal if they differ by less than 1e-7 of the largest value of the tensor
        plus 1e-12 of the largest value of all outputs, gradients, or buffers. Unsynchronized layers differ by 1e-2 or
        more. A note is added if no wrapper averages gradients.

    Raises:
        TypeError: ``model`` is not a module; ``loss`` or ``merge`` is not callable; ``loss`` does not return a scalar
            tensor; ``process_group`` has an unsupported type.
        ValueError: ``model`` is in evaluation mode; ``loss`` does not call its first argument; batches cannot be
            merged.
        RuntimeError: another rank raised, or makes another call; the model cannot be copied; ``WORLD_SIZE`` is above 1,
            but no process group was initialized.

    Example::

        >>> verdict = bagua_syncbn.verify_synchronization(model, (images, labels), lambda model, batch: ...)
        >>> print(verdict)
        2 ranks equal one process: 1 output, 1 loss, 6 gradients, 6 buffers
    """
    ranks = Peers("verify_synchronization", model, process_group)
    ranks.run("the check of arguments", lambda: _check(model, loss, merge))
    module = inner_model(model)
    with torch.inference_mode(False), unchanged(module):
        torch.set_grad_enabled(True)  # the merged batch may require gradients
        found = Comparison(ranks, module, batch, loss)
        # Layers do not communicate here, so no rank waits for a rank that raises.
        found.run_alone("the step on this rank's batch", batch, Twin())
        unlike = ranks.differing(_state_of(module))
        if unlike:
            others = (f"so do {', '.join(unlike[1:])}",) if unlike[1:] else ()
            return Verdict(ranks.size, "nothing", f"{unlike[0]} differs between ranks before the step", others)
        ranks.run("the batch", lambda: pickle.dumps(batch))  # raises before a peer waits for the batch
        batches = ranks.gather(batch)
        whole = ranks.run("the merge of batches", lambda: joined(batches) if merge is None else merge(batches))
        expected, actual = found.run_alone("the step in one process", whole), found.run()
        compared = differences(found.combined(actual), expected)
        # A loss that depends on the rank may differ on some ranks only.
        difference = next(filter(None, ranks.gather(next(filter(None, compared.values()), None))), None)
        notes = []
        if difference:
            repeated = differences(found.run_alone("the step in one process", whole), expected)
            if any(ranks.gather(any(repeated.values()))):
                notes.append("the step is random (e.g. dropout): repeated in one process, the result differs")
            else:
                notes.extend(causes_of(difference, found, actual, expected))
            notes = notes or ["no cause was found"]
    if ranks.size > 1 and not any(map(is_data_parallel, model.modules())):
        notes.append(
            "this check averaged gradients over ranks, but no wrapper of the model does; wrap it in "
            "DistributedDataParallel or with_bagua to train"
        )
    counted = Counter(map(tensor_kind, compared))
    text = ", ".join(f"{number} {kind}{'s' * (number > 1)}" for kind, number in counted.items())
    return Verdict(ranks.size, text, difference, tuple(notes))


def inner_model(model: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel and torch.compile."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
    return model if inner is None else inner_model(inner)


def _check(model: Any, loss: Any, merge: Any) -> None:
    check_module(model, "model")
    if not callable(loss):
        raise TypeError(f"loss: expected a function of a model and a batch, got {type(loss).__name__}")
    check_callable("merge", merge, "batches")
    if not model.training:
        raise ValueError("model: expected training mode, got evaluation mode; call model.train() first")


def _state_of(model: nn.Module) -> dict[str, Any]:
    """Returns modes, and digests of parameters and buffers, for comparison between ranks."""
    state: dict[str, Any] = {f"mode of module {name!r}": module.training for name, module in model.named_modules()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state[name] = tensor.dtype, tensor.shape, digest(tensor)
    return state
