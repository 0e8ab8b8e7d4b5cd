"""Data parallelism in one call, by Bagua in a Bagua job and by torch otherwise."""

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

# Modules with a GradientAllReduceAlgorithm, with and without Bagua.
_MODULES = ("bagua.torch_api.algorithms.gradient_allreduce", f"{__package__}.contrib.algorithms.gradient_allreduce")

# Attributes of a model in which Bagua looks up the names of parameters and buffers to ignore.
_IGNORED = ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore")


def with_bagua(
    module: _Module, optimizers: Sequence[Optimizer], algorithm: Any = None, process_group: Any = None
) -> _Module:
    """Makes ``module`` data parallel in place, by the engine that runs the job: Bagua or torch.

    =====================================================  ===========================================================
    Bagua, after ``bagua.torch_api.init_process_group()``  buffers are broadcast from the first rank of the group, and
                                                           ``module.with_bagua(optimizers, algorithm, process_group)``
    torch.distributed, after ``init_process_group()``      parameters, buffers and optimizer state are broadcast from
                                                           the first rank of the group; each backward averages the
                                                           gradients over the group, in overlapping buckets, as
                                                           :class:`~torch.nn.parallel.DistributedDataParallel` does
    neither                                                no-op
    =====================================================  ===========================================================

    Synchronized layers of ``module`` without a group get ``process_group``. Bagua ignores the parameters and buffers
    whose state dict names are in ``module._bagua_params_and_buffers_to_ignore``.

    With torch, the module gets a subclass of its class. Call its ``set_requires_gradient_sync(False)`` to accumulate
    gradients without communication. It cannot be deep-copied afterwards: copy it before. Warns if ``module`` has no
    synchronized layer.

    Args:
        module: the converted model, on its device.
        optimizers: the optimizers of its parameters.
        algorithm: how to exchange gradients: an algorithm object, class or registered name of Bagua. ``"qadam"`` needs
            a QAdamOptimizer in ``optimizers``. None means ``"gradient_allreduce"``. Without Bagua there is only this
            algorithm: the name, or a ``GradientAllReduceAlgorithm`` with ``average=True`` of Bagua or
            :mod:`bagua_syncbn.contrib.algorithms`.
        process_group: the ranks to train together: a :class:`torch.distributed.ProcessGroup`; in a Bagua job also a
            ``BaguaProcessGroup``; otherwise also a description that :func:`~bagua_syncbn.sync_group` accepts, whose
            groups all ranks of the job make in this call; None for all ranks.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: ``module`` is not a module, ``optimizers`` is not a sequence of optimizers, or ``process_group`` is
            of another kind.
        ValueError: ``algorithm`` is unknown, or needs Bagua, which does not run the job; this rank is not in
            ``process_group``.
        RuntimeError: ``module`` is data parallel already, or no parameter requires a gradient; ``process_group`` is a
            BaguaProcessGroup, and Bagua is not initialized.

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
    """Raises ValueError unless ``algorithm`` averages gradients in each step, as torch does."""
    if algorithm in (None, _GRADIENT_ALLREDUCE):
        return
    known = [sys.modules[name].GradientAllReduceAlgorithm for name in _MODULES if name in sys.modules]
    if algorithm in known or (type(algorithm) in known and algorithm.average):
        return
    got = repr(algorithm) if isinstance(algorithm, str) else getattr(algorithm, "__name__", type(algorithm).__name__)
    if type(algorithm) in known:
        got += " with average=False"
    raise ValueError(
        f'algorithm: expected None, "{_GRADIENT_ALLREDUCE}" or a GradientAllReduceAlgorithm with average=True, got '
        f"{got}; other algorithms need Bagua: call bagua.torch_api.init_process_group() first"
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
            # Make the communicator now, while this device does not exchange gradients.
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
    """Makes ``module`` data parallel by torch's composable DistributedDataParallel, without a wrapper module."""
    _composable.replicate(module, process_group=process_group)
    # Initialize here instead of in the first forward, torch's default, which ranks may reach at different times.
    _composable.replicate.state(module).lazy_init()
    _broadcast_buffers(module.buffers(), partial(_broadcast, process_group=process_group))
    _broadcast_optimizer_states(optimizers, process_group)


def _broadcast_buffers(buffers: Iterable[Tensor], broadcast: Callable[[Tensor], Tensor]) -> None:
    """Sets all buffers to the values of the source rank of ``broadcast``, which returns a uint8 tensor."""
    for buffer in buffers:
        if buffer.numel():
            # Sends bytes, because neither gloo nor Bagua supports every dtype.
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
        if state["state"]:  # else there are only the hyperparameters, which the user has just set
            optimizer.load_state_dict(state)
