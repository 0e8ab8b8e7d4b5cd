"""Data parallelism in one call, with Bagua in Bagua jobs and torch otherwise."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .._groups import ProcessGroupLike, engines, spec_of, text_of_argument
from .._reliability.unsynchronized import warn_at_launch
from .._torch.modules import pytree, replicate_in_place
from ..communicators.torch_engine import torch_group_of
from ..conversion.convert import name_layers
from ..conversion.models import check_module, is_data_parallel, synchronized_layers
from ..statistics.over_ranks import meet
from ..sync_batchnorm import SyncBatchNorm
from . import engine as bagua

engines.append(bagua)

_Module = TypeVar("_Module", bound=nn.Module)

# Attributes of a model in which Bagua looks up the names of parameters and buffers to ignore.
_IGNORED = ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore")


def with_bagua(
    module: _Module, optimizers: Sequence[Optimizer], algorithm: Any = None, process_group: ProcessGroupLike = None
) -> _Module:
    """Makes ``module`` data parallel in place, with the engine that runs the job: Bagua or torch; returns ``module``.

    - Bagua (after ``bagua.torch_api.init_process_group()``): broadcasts the buffers of the group's first rank and calls
      ``module.with_bagua(optimizers, algorithm, process_group)``.
    - torch (after ``torch.distributed.init_process_group()``): broadcasts parameters, buffers and optimizer state of
      the group's first rank. Each backward averages the gradients over the group, in overlapping buckets, like
      :class:`~torch.nn.parallel.DistributedDataParallel`.
    - Without a job: no-op; it warns if ``WORLD_SIZE`` is above 1.

    Error messages show the names that layers have in ``module``. Layers without a group get ``process_group``. Bagua
    ignores parameters and buffers with state dict names in ``module._bagua_params_and_buffers_to_ignore``.

    With torch, the module's class becomes a subclass. Call ``module.set_requires_gradient_sync(False)`` to accumulate
    gradients locally. Copy the module before: it cannot be deep-copied afterwards. Warns if ``module`` has no
    synchronized layer.

    Args:
        module: the converted model, on the device to train on.
        optimizers: the module's optimizers.
        algorithm: how to exchange gradients: an algorithm object, class or registered name of Bagua. None means
            ``"gradient_allreduce"``. Without Bagua, this is the only algorithm: pass its name, or a
            ``GradientAllReduceAlgorithm`` with ``average=True`` from Bagua or ``bagua_syncbn.contrib.algorithms``.
        process_group: the ranks to train together; None for all ranks. In a Bagua job, a ``BaguaProcessGroup`` or a
            :class:`torch.distributed.ProcessGroup`; otherwise as for :func:`~bagua_syncbn.sync_group`, and all ranks of
            the job create the groups in this call.

    Raises:
        TypeError: ``module`` is not a module, ``optimizers`` is not a sequence of optimizers, or ``process_group`` is
            of an unsupported kind.
        ValueError, KeyError: ``algorithm`` is unknown, or needs Bagua, which does not run the job; this rank is not in
            ``process_group``.
        RuntimeError: ``module`` is data parallel already, or no parameter requires a gradient; ``process_group`` is a
            BaguaProcessGroup, and Bagua is not initialized; with torch, another rank makes another call.

    Example::

        >>> torch.distributed.init_process_group()  # or bagua.torch_api.init_process_group(), or no call
        >>> model = bagua_syncbn.convert_sync_batchnorm(model)
        >>> model = bagua_syncbn.with_bagua(model, [optimizer])
    """
    check_module(module)
    if not isinstance(optimizers, (list, tuple)) or not all(isinstance(each, Optimizer) for each in optimizers):
        raise TypeError(f"optimizers: expected a list of torch.optim.Optimizer, got {text_of_argument(optimizers)}")
    optimizers = list(optimizers)
    wrapped = next(filter(is_data_parallel, module.modules()), None)
    if wrapped is not None:
        raise RuntimeError(f"module: expected a model that is not data parallel yet, got {type(wrapped).__name__}")
    layers = synchronized_layers(module, "with_bagua")
    spec: Any = spec_of(process_group)
    by_bagua = bagua.is_running()
    if by_bagua:
        algorithm = bagua.resolve_algorithm(algorithm or "gradient_allreduce")
    else:
        _check_algorithm(algorithm)
        if not (dist.is_available() and dist.is_initialized()):
            warn_at_launch("with_bagua: the model is not data parallel", spec)
            return module
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RuntimeError("module: expected at least one parameter that requires a gradient, got none")
    name_layers(module)
    if not by_bagua:
        meet("with_bagua", module, spec, "before parameters are sent")
    group = bagua.to_bagua_group(spec.process_group) if by_bagua else torch_group_of(spec)
    for layer in layers:
        if layer.process_group is None:
            layer.process_group = spec
    if by_bagua:
        _train_with_bagua(module, layers, optimizers, algorithm, group)
    else:
        _replicate(module, optimizers, group)
    return module


def _check_algorithm(algorithm: Any) -> None:
    """Raises ValueError unless ``algorithm`` averages gradients in each step, which is all that torch supports."""
    cls = algorithm if isinstance(algorithm, type) else type(algorithm)
    name = repr(algorithm) if isinstance(algorithm, str) else cls.__name__
    is_allreduce = name == "GradientAllReduceAlgorithm"
    if algorithm in (None, "gradient_allreduce") or (is_allreduce and getattr(algorithm, "average", True)):
        return
    raise ValueError(
        'algorithm: expected None, "gradient_allreduce" or a GradientAllReduceAlgorithm with average=True, got '
        f"{name}{' with average=False' * is_allreduce}; other algorithms need Bagua: call "
        "bagua.torch_api.init_process_group() first"
    )


def _train_with_bagua(
    module: Any, layers: list[SyncBatchNorm], optimizers: list[Optimizer], algorithm: Any, group: Any
) -> None:
    for layer in layers:
        # Create the communicator now, while this device does not exchange gradients.
        spec_of(layer.process_group).communicator()
    ignored = {name for attribute in _IGNORED for name in getattr(module, attribute, ())}
    buffers = [buffer for name, buffer in module.named_buffers() if name not in ignored]
    _broadcast_buffers(buffers, partial(bagua.broadcast, group=group or bagua.default_group()))
    module.with_bagua(optimizers, algorithm, process_group=group)


def _replicate(module: nn.Module, optimizers: list[Optimizer], process_group: Any) -> None:
    """Makes ``module`` data parallel with torch; sends rank 0's buffers and optimizer states to all ranks."""
    replicate_in_place(module, process_group)
    _broadcast_buffers(module.buffers(), partial(_broadcast, process_group=process_group))
    states: Any = None
    if dist.get_rank(process_group) == 0:  # only rank 0 sends data
        states = [pytree.tree_map_only(Tensor, Tensor.cpu, optimizer.state_dict()) for optimizer in optimizers]
    message = [states]
    dist.broadcast_object_list(message, group_src=0, group=process_group)
    for optimizer, state in zip(optimizers, message[0], strict=True):
        if state["state"]:  # else, the state contains only hyperparameters, which the user has just set
            optimizer.load_state_dict(state)


def _broadcast_buffers(buffers: Iterable[Tensor], broadcast: Callable[[Tensor], Tensor]) -> None:
    """Sets all buffers to the source rank's values with ``broadcast``, which returns a uint8 tensor."""
    for buffer in buffers:
        if buffer.numel():
            # Sends bytes, because neither gloo nor Bagua supports every dtype.
            received = broadcast(buffer.detach().flatten().view(torch.uint8)).view(buffer.dtype)
            buffer.detach().copy_(received.view_as(buffer))


def _broadcast(tensor: Tensor, process_group: Any) -> Tensor:
    dist.broadcast(tensor, group_src=0, group=process_group)
    return tensor
