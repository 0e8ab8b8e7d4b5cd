"""Data parallelism in one call: Bagua's where Bagua runs the job, torch's own in place where torch does."""

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .communicators import bagua
from .communicators.torch_engine import torch_group_of
from .groups import GroupSpec, engines, spec_of
from .models import check_module, is_data_parallel
from .sync_batchnorm import SyncBatchNorm
from .torch_internals.modules import composable_replicate, pytree

engines.register(bagua)

_composable: Any = composable_replicate() if dist.is_available() else None

_Module = TypeVar("_Module", bound=nn.Module)

_GRADIENT_ALLREDUCE = "gradient_allreduce"

# Modules with a GradientAllReduceAlgorithm: Bagua's, and the one to import without Bagua.
_MODULES = ("bagua.torch_api.algorithms.gradient_allreduce", f"{__package__}.contrib.algorithms.gradient_allreduce")

# Attributes of a model in which Bagua looks for the names of parameters and buffers to ignore.
_IGNORED = ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore")


def with_bagua(
    module: _Module, optimizers: Sequence[Optimizer], algorithm: Any = None, process_group: Any = None
) -> _Module:
    """Makes ``module`` data parallel in place, by Bagua or by torch, whichever runs the job.

    =====================================================  ===========================================================
    Bagua, after ``bagua.torch_api.init_process_group()``  buffers are broadcast from the first rank of the group, and
                                                           ``module.with_bagua(optimizers, algorithm, process_group)``
    torch.distributed, after ``init_process_group()``      parameters, buffers and optimizer state are broadcast from
                                                           the first rank of the group; from then on each backward
                                                           averages the gradients over the group, in buckets that
                                                           overlap with it, by the machinery of
                                                           :class:`~torch.nn.parallel.DistributedDataParallel`
    neither                                                nothing to do
    =====================================================  ===========================================================

    Synchronized layers of ``module`` that have no group of their own get ``process_group``. Bagua leaves out the
    parameters and buffers that ``module._bagua_params_and_buffers_to_ignore`` names, as they are in the state dict.

    On torch the module's class becomes a subclass of what it was. It has ``set_requires_gradient_sync(False)`` to
    accumulate gradients without communication, and cannot be deep-copied: copy it before.

    Args:
        module: the model, converted already, on its device.
        optimizers: the optimizers of its parameters.
        algorithm: how gradients are exchanged: one of Bagua's algorithm objects or classes, or the name that Bagua
            registers it under, for ``"qadam"`` with one of its QAdamOptimizers in ``optimizers``; None for
            ``"gradient_allreduce"``, the only one without Bagua: by this name, or as a ``GradientAllReduceAlgorithm``
            of Bagua or :mod:`bagua_syncbn.contrib.algorithms`, with ``average=True``.
        process_group: the ranks among which ``module`` is data parallel: a :class:`torch.distributed.ProcessGroup`,
            under Bagua a ``BaguaProcessGroup`` too, elsewhere a description too, as :func:`~bagua_syncbn.sync_group`
            takes it (all ranks of the job then make its groups here); None for all.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: ``module`` is no module, ``optimizers`` is not a sequence of optimizers, or ``process_group`` is of
            none of these kinds.
        ValueError: Bagua has no ``algorithm`` of that name; Bagua does not run the job, and ``algorithm`` is none that
            averages gradients in each step; this rank is not in ``process_group``.
        RuntimeError: ``module`` is data parallel already, or has no parameter that requires a gradient;
            ``process_group`` is Bagua's, and Bagua is not initialized.

    A warning says if ``module`` has no synchronized layer.

    Example::

        >>> torch.distributed.init_process_group()  # or bagua.torch_api.init_process_group(), or nothing at all
        >>> model = bagua_syncbn.convert_sync_batchnorm(model)
        >>> model = bagua_syncbn.with_bagua(model, [optimizer])
    """
    check_module(module)
    optimizers = _checked_optimizers(optimizers)
    wrapped = next(filter(is_data_parallel, module.modules()), None)
    if wrapped is not None:
        raise RuntimeError(f"module: expected a model that is not data parallel yet, got {type(wrapped).__name__}")
    if not any(isinstance(layer, SyncBatchNorm) for layer in module.modules()):
        warnings.warn(f"with_bagua: found no synchronized layer in {type(module).__name__}", stacklevel=2)
    spec = spec_of(process_group)
    if bagua.is_initialized():
        _check_that_it_trains(module)
        _train_with_bagua(module, optimizers, algorithm or _GRADIENT_ALLREDUCE, spec)
        return module
    _check_torch_has(algorithm)
    if dist.is_available() and dist.is_initialized():
        _check_that_it_trains(module)
        _replicate(module, optimizers, torch_group_of(spec))
        _give_group_to_layers(module, spec)
    return module


def _check_that_it_trains(module: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RuntimeError("module: expected at least one parameter that requires a gradient, got none")


def _check_torch_has(algorithm: Any) -> None:
    """Raises ValueError unless ``algorithm`` averages gradients in each step, which is what torch's engine does."""
    if algorithm in (None, _GRADIENT_ALLREDUCE):
        return
    known = [sys.modules[name].GradientAllReduceAlgorithm for name in _MODULES if name in sys.modules]
    if algorithm in known or (type(algorithm) in known and algorithm.average):
        return
    got = repr(algorithm) if isinstance(algorithm, str) else getattr(algorithm, "__name__", type(algorithm).__name__)
    if type(algorithm) in known:
        got += " with average=False"
    raise ValueError(
        f'algorithm: expected None, "{_GRADIENT_ALLREDUCE}" or a GradientAllReduceAlgorithm with average=True, all '
        f"that torch's engine does, got {got}; any other needs bagua.torch_api.init_process_group() first"
    )


def _checked_optimizers(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    if not isinstance(optimizers, (list, tuple)):
        raise TypeError(f"optimizers: expected a list of torch.optim.Optimizer, got {type(optimizers).__name__}")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizers: expected torch.optim.Optimizer objects, got {type(optimizer).__name__}")
    return list(optimizers)


def _train_with_bagua(module: Any, optimizers: list[Optimizer], algorithm: Any, spec: GroupSpec) -> None:
    algorithm = bagua.resolve_algorithm(algorithm, optimizers)
    group = bagua.to_bagua_group(spec.process_group)
    _give_group_to_layers(module, spec)
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            # The communicator is made now, while no gradients are being exchanged on this device.
            spec_of(layer.process_group).communicator()
    ignored = {name for attribute in _IGNORED for name in getattr(module, attribute, ())}
    buffers = [buffer for name, buffer in module.named_buffers() if name not in ignored]
    _broadcast_buffers(buffers, partial(bagua.broadcast, group=group or bagua.default_group()))
    module.with_bagua(optimizers, algorithm, process_group=group)


def _give_group_to_layers(module: nn.Module, spec: GroupSpec) -> None:
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm) and layer.process_group is None:
            layer.process_group = spec


def _replicate(module: nn.Module, optimizers: list[Optimizer], process_group: Any) -> None:
    """Makes ``module`` data parallel by torch's composable DistributedDataParallel, which has no wrapper module."""
    _composable.replicate(module, process_group=process_group)
    # Initialized here and not in the first forward, torch's default: ranks may differ in when they make that call.
    _composable.replicate.state(module).lazy_init()
    _broadcast_buffers(module.buffers(), partial(_broadcast, process_group=process_group))
    _broadcast_optimizer_states(optimizers, process_group)


def _broadcast_buffers(buffers: Iterable[Tensor], broadcast: Callable[[Tensor], Tensor]) -> None:
    """Sets all buffers to the values of the source rank of ``broadcast``, which returns a tensor of bytes."""
    for buffer in buffers:
        if buffer.numel():
            # Sent as bytes, because neither gloo nor Bagua carries every dtype.
            received = broadcast(buffer.detach().flatten().view(torch.uint8)).view(buffer.dtype)
            buffer.detach().copy_(received.view_as(buffer))


def _broadcast(tensor: Tensor, process_group: Any) -> Tensor:
    dist.broadcast(tensor, group_src=0, group=process_group)
    return tensor


def _broadcast_optimizer_states(optimizers: list[Optimizer], process_group: Any) -> None:
    states: Any = None
    if dist.get_rank(process_group) == 0:  # only rank 0 sends
        states = [pytree.tree_map_only(Tensor, Tensor.cpu, optimizer.state_dict()) for optimizer in optimizers]
    message = [states]
    dist.broadcast_object_list(message, group_src=0, group=process_group)
    for optimizer, state in zip(optimizers, message[0], strict=True):
        if state["state"]:  # without state there are only the hyperparameters, which the user has just set
            optimizer.load_state_dict(state)
