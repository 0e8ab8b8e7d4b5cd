"""Compares a training step on the ranks with one process, and reports the first difference with its causes."""

import argparse
import importlib
import os
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from .. import over_ranks
from ..checks import check_callable, is_distributed
from ..dry_run import digest, unchanged
from ..groups import text_of_ranks
from ..models import check_module, is_data_parallel
from ..sync_batchnorm import SyncBatchNorm
from .causes import CAUSES, Layers
from .ranks import Peers, in_float64, joined
from .steps import Comparison, Loss, copied, kind_of, local_functions, loss_of, tensors_of, with_values

# Set by torchrun, Open MPI's mpirun and MPICH's mpirun.
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class Verdict:
    """Result of :func:`verify_synchronization`, equal on all ranks: true if the ranks equal one process."""

    ranks: int
    """Number of ranks."""
    compared: str
    """Number of tensors or layers that were compared."""
    difference: str | None
    """The first tensor that differs, and by how much; None if no tensor differs."""
    notes: tuple[str, ...]
    """Causes of the difference, and what the comparison does not cover."""

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
    process_group: Any = None,
    merge: Callable[[list[Any]], Any] | None = None,
    by_layer: bool = False,
) -> Verdict:
    r"""Compares a training step of ``model`` on all ranks with the same step in one process on all their batches.

    Both steps run in float64 on copies of the model. Gradients are averaged over ranks, as DistributedDataParallel
    does. Outputs, loss, gradients and buffers are compared. If they differ, the verdict names the cause if it is found:
    dropout and other randomness, layers that are not synchronized or whose tensors are used outside their forward,
    other modules whose buffers differ between ranks after the step, parameters without a gradient, losses that are sums
    or means over batches of different sizes. If parameters, buffers or modes differ between ranks before the step, the
    verdict names them and no step runs.

    The model, its gradients, buffers and modes, and all random states are unchanged afterwards, also after an
    exception. An error on one rank is raised on all. All ranks must make the call.

    Args:
        model: in training mode, with or without DistributedDataParallel.
        batch: the batch of this rank: tensors in nested tuples, lists and dicts.
        loss: called with a copy of the model, without its wrapper, and a batch; returns a scalar tensor. It must call
            this copy, and may communicate only by :func:`mean_over_ranks`.
        process_group: the ranks that take part, as for :func:`sync_batch_norm`; None for the whole job.
        merge: makes one batch of a list of all ranks' batches. None concatenates tensors along their first dimension;
            all other values must be equal on all ranks.
        by_layer: compare only the batch normalization layers, each on its inputs in a forward pass of ``model`` without
            gradients. For models that are sharded or do not fit in memory twice.

    Returns:
        A :class:`~bagua_syncbn.verification.Verdict`: true if all tensors are equal on all ranks, and as text the first
        difference with its causes. Tensors are equal if the values of the ranks, :math:`a`, and of one process,
        :math:`b`, satisfy

        .. math:: |a - b| \le 10^{-7} \max |b| + 10^{-12} \max |b'|

        with the maximum over the tensor and, for :math:`b'`, over all tensors of its kind (outputs, gradients, ...). A
        layer that is not synchronized differs by :math:`10^{-2}` or more.

        The verdict is false in a process that a launcher (torchrun, mpirun) started as one of several and that has not
        called ``torch.distributed.init_process_group``. A note says if no wrapper averages the gradients of ``model``.

    Raises:
        TypeError: ``model`` is not a module; ``loss`` or ``merge`` is not callable or returns another type.
        ValueError: ``model`` is in evaluation mode; ``loss`` does not call its first argument; batches cannot be
            merged; with ``by_layer``, a layer cannot be compared without its model.
        RuntimeError: another rank raised; the model cannot be copied.

    Example::

        >>> verdict = bagua_syncbn.verify_synchronization(model, (images, labels), lambda model, batch: ...)
        >>> print(verdict)
        2 ranks equal one process: 1 output, 1 loss, 6 gradients, 6 buffers
    """
    ranks = Peers("verify_synchronization", process_group)
    ranks.run("the check of the model", lambda: _check(model, loss, merge))
    for name in () if ranks.in_job else _WORLD_SIZES:
        number = int(os.environ.get(name) or 1)
        if number > 1:
            text = f"each trains alone: {name} is {number}, but torch.distributed is not initialized; call "
            return Verdict(number, "nothing", f"{text}torch.distributed.init_process_group() first", ())
    module = unwrapped(model)
    wrapper = model if isinstance(model, DistributedDataParallel) else None
    broadcast = dict(module.named_buffers()) if wrapper is not None and wrapper.broadcast_buffers else {}
    with unchanged(module), torch.inference_mode(False):
        states = ranks.gather("the state of the model", lambda: _state_of(module, broadcast, by_layer))
        names = dict.fromkeys(name for own in states for name in own)
        unlike = [name for name in names if any(own.get(name) != states[0].get(name) for own in states)]
        if unlike:
            others = (f"so do {', '.join(unlike[1:])}",) if unlike[1:] else ()
            return Verdict(ranks.size, "nothing", f"{unlike[0]} differs between ranks before the step", others)
        if by_layer:
            return _verify_layers(module, batch, loss, ranks)
        values, *_ = ranks.gather("the buffers that are broadcast", lambda: broadcast)
        copy = lambda: with_values(copied(module), values)  # noqa: E731
        ranks.run("a trial of the loss", lambda: _try_out(copy(), in_float64(batch, batch), loss, model))
        return _verify(model, Comparison(ranks, copy, batch, loss, merge or partial(joined, name="batch")))


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel and torch.compile."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
    return model if inner is None else unwrapped(inner)


def _check(model: Any, loss: Any, merge: Any) -> None:
    check_module(model, "model")
    if not callable(loss):
        raise TypeError(f"loss: expected a function of the model and a batch, got {type(loss).__name__}")
    check_callable("merge", merge, "a function of a list of batches")
    if not model.training:
        raise ValueError("model: expected training mode, got evaluation mode; call model.train() first")


def _state_of(model: nn.Module, broadcast: Container[str], by_layer: bool) -> dict[str, Any]:
    """Returns named facts that must be equal on all ranks."""
    facts: dict[str, Any] = {f"mode of module {name!r}": own.training for name, own in model.named_modules()}
    if not by_layer:  # a sharded model has different tensors on each rank
        for name, own in tensors_of(model).items():
            facts[name] = own.dtype, own.shape, name in broadcast or is_distributed(own) or digest(own)
    return facts


def _try_out(copy: nn.Module, batch: Any, loss: Loss, model: nn.Module) -> None:
    """Calls ``loss`` once without communication, so that no rank waits for a rank that raises.

    Synchronized layers return their input, and ``mean_over_ranks`` the mean of this rank.

    Raises:
        ValueError: ``loss`` calls no module, or a part of ``model`` instead of ``copy``.
    """
    original, called = set(model.modules()), set()
    expected = "loss: expected a function that calls its first argument, a copy of the model, got a function that"

    def check(part: nn.Module, _: Any) -> None:
        called.add(part)
        if part in original:
            raise ValueError(f"{expected} calls the original model")

    for part in copy.modules():
        if isinstance(part, (SyncBatchNorm, nn.SyncBatchNorm)):
            vars(part)["forward"] = lambda input, *_, **__: input
    with ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(check).remove)
        hooks.enter_context(local_functions(over_ranks))
        loss_of(copy, batch, loss)
    if not called:
        raise ValueError(f"{expected} does not")


def _verify_layers(model: nn.Module, batch: Any, loss: Loss, ranks: Peers) -> Verdict:
    layers = Layers(ranks)
    layers.compare(model, batch, loss)
    if not layers.compared:
        raise ValueError("model: expected training calls of batch normalization layers, got none")
    first, *others = (*layers.differ.values(), *layers.unlike) or (None,)
    text = f"{layers.compared} call{'s' * (layers.compared != 1)} of layers"
    return Verdict(ranks.size, text, first, tuple(others))


def _verify(model: nn.Module, found: Comparison) -> Verdict:
    difference = found.difference
    raises = isinstance(model, DistributedDataParallel) and not (model.find_unused_parameters or model.static_graph)
    notes = _unused(found, raises)
    if difference is not None:
        notes += [note for look in CAUSES for note in look(found)]
        if not notes:
            unequal = (
                "outputs are equal, so statistics match, but the loss is not the mean of the ranks' losses; if it is a "
                "mean over boxes or pixels, use mean_over_ranks"
            )
            notes.append(unequal if kind_of(difference) == "loss" else "no cause was found")
    elif raises and notes:
        difference = notes.pop(0)
    if found.ranks.size > 1 and not any(map(is_data_parallel, model.modules())):
        notes.append(
            "this check averaged gradients over ranks, but no wrapper of the model does; wrap it in "
            "DistributedDataParallel or with_bagua to train"
        )
    counted = Counter(map(kind_of, found.pairs))
    compared = ", ".join(f"{number} {kind}{'s' * (number > 1)}" for kind, number in counted.items())
    return Verdict(found.ranks.size, compared, difference, tuple(notes))


def _unused(found: Comparison, raises: bool) -> list[str]:
    """Returns notes on parameters that only some ranks use, or no rank if DistributedDataParallel ``raises`` then."""
    by_rank = found.ranks.gather("the gradients", lambda: found.actual.unused)
    notes = []
    for name in dict.fromkeys(name for names in by_rank for name in names):
        which = [rank for rank, names in enumerate(by_rank) if name in names]
        if raises or len(which) < len(by_rank):
            notes.append(
                f"gradient {name}: {text_of_ranks(which)} did not use the parameter; "
                "pass find_unused_parameters=True to DistributedDataParallel"
            )
    return notes


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs ``python -m bagua_syncbn verify package.module:function``; exits with status 1 if ranks differ."""
    parser = argparse.ArgumentParser(
        prog="python -m bagua_syncbn verify",
        description="Compares a training step on all ranks with one process; start it with torchrun.",
    )
    parser.add_argument("function", help="package.module:function that returns model, batch and loss")
    parser.add_argument("--by-layer", action="store_true", help="compare layers one by one instead of the model")
    given = parser.parse_args(arguments)
    module, _, name = given.function.partition(":")
    if not name:
        parser.error(f"function: expected package.module:function, got {given.function}")
    starts_job = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if starts_job:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group()
    verdict = verify_synchronization(*getattr(importlib.import_module(module), name)(), by_layer=given.by_layer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(verdict)
    if starts_job:
        dist.destroy_process_group()
    raise SystemExit(0 if verdict else 1)
