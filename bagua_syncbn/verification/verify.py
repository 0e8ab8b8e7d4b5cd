"""Checks whether a training step on the ranks equals one process and, if not, names likely causes."""

import argparse
import copy
import importlib
import os
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from .. import over_ranks
from ..checks import is_distributed
from ..dry_run import digest, unchanged
from ..models import check_module, is_data_parallel
from ..over_ranks import mean_over_ranks
from ..torch_internals.modules import pytree
from .causes import causes_of
from .ranks import Peers, joined, tensors_in
from .steps import Comparison, Layers, Loss, copied, first_difference, kind_of, local_functions

# Set by torchrun, Open MPI's mpirun and MPICH's mpirun.
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class Verdict:
    """Result of :func:`verify_synchronization`, equal on all ranks: true if the ranks equal one process."""

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
    process_group: Any = None,
    merge: Callable[[list[Any]], Any] | None = None,
    by_layer: bool = False,
) -> Verdict:
    r"""Compares a training step of ``model`` on all ranks with one process on the merged batch.

    Both steps run in float64 on copies of the model. Outputs, loss, buffers, and gradients averaged over ranks are
    compared. If they differ, the verdict names the likely causes: dropout and other randomness, unconverted layers,
    modules with buffers that differ between ranks after the step, losses that are sums, or means over batches of
    different sizes. If parameters, buffers or modes differ between ranks before the step, the verdict lists them.

    The model, gradients and random states are unchanged afterwards, even after an exception. All ranks must make the
    call, and all raise if any rank raises.

    Args:
        model: in training mode, with or without DistributedDataParallel.
        batch: the batch of this rank: tensors in nested tuples, lists and dicts.
        loss: called with an unwrapped copy of the model and a batch; returns a scalar tensor. It must call this copy,
            and may communicate only through :func:`mean_over_ranks`.
        process_group: the ranks that take part, as for :func:`sync_batch_norm`; None for the whole job.
        merge: merges a list of all ranks' batches. None concatenates tensors along their first dimension; all other
            values must be equal on all ranks.
        by_layer: compare only the batch normalization layers, on inputs recorded in a forward pass with running
            statistics and without the mask of :func:`masked`. For models that cannot be copied, e.g. sharded models.

    Returns:
        A :class:`~bagua_syncbn.verification.Verdict`: true if all tensors are equal on all ranks, and as text the first
        difference with its causes. Values are equal if they differ by less than 1e-7 of the largest value of the tensor
        plus 1e-12 of the largest value of all outputs, gradients, or buffers. Unsynchronized layers differ by 1e-2 or
        more.

        The verdict is false if a launcher (torchrun, mpirun) started several processes, but
        ``torch.distributed.init_process_group`` was not called. A note is added if no wrapper averages gradients.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` is in evaluation mode; ``loss`` does not call its first argument; batches cannot be
            merged; with ``by_layer``, there is a DTensor.
        RuntimeError: another rank raised; the model cannot be copied.

    Example::

        >>> verdict = bagua_syncbn.verify_synchronization(model, (images, labels), lambda model, batch: ...)
        >>> print(verdict)
        2 ranks equal one process: 1 output, 1 loss, 6 gradients, 6 buffers
    """
    ranks = Peers("verify_synchronization", process_group)
    ranks.run("the check of the model", lambda: _check(model))
    for name in () if ranks.in_job else _WORLD_SIZES:
        number = int(os.environ.get(name) or 1)
        if number > 1:
            text = f"each trains alone: {name} is {number}, but torch.distributed is not initialized; call "
            return Verdict(number, "nothing", f"{text}torch.distributed.init_process_group() first", ())
    module = unwrapped(model)
    with unchanged(module), torch.inference_mode(False):
        compared, clone = module, lambda: copy.deepcopy(module).double()
        first = lambda: _first_pass(module if by_layer else copy.deepcopy(module), batch, loss, by_layer)  # noqa: E731
        layers, calls = ranks.run("the first forward pass", first)
        if by_layer:
            compared, clone, batch = layers, partial(copied, layers), calls
            loss, merge = partial(_mean_of_sines, process_group), None
        unlike = ranks.differing(_state_of(compared))
        if unlike:
            others = (f"so do {', '.join(unlike[1:])}",) if unlike[1:] else ()
            return Verdict(ranks.size, "nothing", f"{unlike[0]} differs between ranks before the step", others)
        ranks.run("the batch", lambda: pickle.dumps(batch))  # raises before a peer waits for the batch
        batches = ranks.gather(batch)
        whole = ranks.run("the merge of batches", lambda: joined(batches) if merge is None else merge(batches))
        found = Comparison(ranks, clone, batch, whole, loss)
        expected, actual = found.run_alone(), found.run()
        pairs = found.pairs(actual, expected)
        difference = first_difference(ranks, pairs)
        notes = list(causes_of(difference, found, compared, actual, expected)) if difference else []
    if difference and not notes:
        notes = ["no cause was found"]
    if ranks.size > 1 and not by_layer and not any(map(is_data_parallel, model.modules())):
        notes.append(
            "this check averaged gradients over ranks, but no wrapper of the model does; wrap it in "
            "DistributedDataParallel or with_bagua to train"
        )
    counted = Counter(map(kind_of, pairs))
    text = ", ".join(f"{number} {kind}{'s' * (number > 1)}" for kind, number in counted.items())
    return Verdict(ranks.size, text, difference or None, tuple(notes))


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel and torch.compile."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
    return model if inner is None else unwrapped(inner)


def _check(model: Any) -> None:
    check_module(model, "model")
    if not model.training:
        raise ValueError("model: expected training mode, got evaluation mode; call model.train() first")


def _state_of(model: nn.Module) -> dict[str, Any]:
    """Returns modes, and digests of parameters and buffers, which ranks can compare."""
    state: dict[str, Any] = {f"mode of module {name!r}": module.training for name, module in model.named_modules()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state[name] = tensor.dtype, tensor.shape, is_distributed(tensor) or digest(tensor)
    return state


def _first_pass(model: nn.Module, batch: Any, loss: Loss, records: bool) -> tuple[Layers, list[Any]]:
    """Calls ``loss`` once without communication, so that no rank waits for a rank that raises.

    Returns copies of the batch normalization layers, and the calls of these layers, if ``records`` is true. Layers run
    in evaluation mode, and the caller restores it.
    """
    layers, calls, called = Layers(), [], set()

    def record(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if any(map(is_distributed, tensors_in((args, kwargs, layer._parameters, layer._buffers)))):
            raise ValueError(f"model: expected layers without DTensors if by_layer, got a DTensor in {name!r}")
        if not kwargs and args[0].dim() > 2:
            # Ranks may have images of different sizes: (N, C, *) becomes (N * positions, C, 1, ...).
            ones = (..., *[None] * (args[0].dim() - 2))
            args = pytree.tree_map_only(Tensor, lambda input: input.movedim(1, -1).flatten(0, -2)[ones], args)
        layers._modules.setdefault(name, copied(layer))
        copy = lambda tensor: tensor.detach().clone().requires_grad_(tensor.is_floating_point())  # noqa: E731
        calls.append((name, *pytree.tree_map_only(Tensor, copy, (args, kwargs))))

    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if isinstance(layer, _BatchNorm) and layer.training:
                vars(layer)["training"] = False
                if records:
                    stack.callback(layer.register_forward_pre_hook(partial(record, name), with_kwargs=True).remove)
        stack.enter_context(register_module_forward_pre_hook(lambda part, _: called.add(part)))
        stack.enter_context(local_functions(over_ranks))
        stack.enter_context(torch.set_grad_enabled(not records))
        loss(model, batch)
    if called.isdisjoint(model.modules()):
        raise ValueError("loss: expected a function that calls its first argument, an unwrapped copy of the model")
    if records and not calls:
        raise ValueError("model: expected training calls of batch normalization layers, got none")
    return layers, calls


def _mean_of_sines(process_group: Any, layers: nn.Module, calls: list[Any]) -> Tensor:
    """A loss with a different gradient for each output of a layer."""
    outputs = [output.flatten() for output in tensors_in(layers(calls))]
    return mean_over_ranks((torch.cat(outputs) + 1).sin(), process_group=process_group)


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
