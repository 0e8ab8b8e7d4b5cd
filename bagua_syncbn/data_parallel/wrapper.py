"""torch.nn.DataParallel with synchronized layers and replication callbacks; replicas may share devices."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._groups import text_of_argument
from .._names import name_of
from .._step.hooks import hooks
from .._torch.modules import device_index, is_compiled_wrapper, pytree
from ..conversion import convert_sync_batchnorm
from ..conversion.models import check_module
from ..sync_batchnorm import SyncBatchNorm, refuse_alone
from .replica_step import Replica
from .replicas import CallbackContext, Replicas

_Module = TypeVar("_Module", bound=nn.Module)


class DataParallelWithCallback(nn.DataParallel):  # pyrefly: ignore[implicit-any-type-argument]
    """:class:`torch.nn.DataParallel` in which synchronized layers synchronize over the replicas.

    Gradients and running statistics equal those of ``module`` on the whole batch. Other modules can communicate with
    :func:`execute_replication_callbacks`. Replicas can share a device: list it several times, or list ``"cpu"``, to
    simulate ranks.

    Args:
        module: the model, on the first device.
        device_ids: the device of each replica: a number, a :class:`torch.device` or a name, such as
            ``["cpu", "cpu"]``; all CUDA devices by default. Small batches use only the first devices.
        output_device: where outputs are gathered; the first device by default.
        dim: the batch dimension of inputs and outputs.

    If replicas share devices, outputs must be tensors or None, in any nesting.

    Forward raises RuntimeError if replicas call different layers, if a model calls itself, or if a layer gets a mask or
    synchronizes over several ranks, and TypeError for models from ``torch.compile(model)``. If replicas share devices,
    it raises ValueError if inputs split into different numbers of chunks, and TypeError for other outputs. If a replica
    raises, forward raises the same error, and waiting replicas stop.

    Example::

        >>> model = convert_model(model)
        >>> model = DataParallelWithCallback(model, device_ids=["cpu", "cpu", "cpu"])
        >>> model(images).sum().backward()
    """

    __module__ = "bagua_syncbn.data_parallel"  # for pickle

    _shares_devices = False

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        check_module(module)
        if device_ids is not None and not isinstance(device_ids, (list, tuple, range)):
            raise TypeError(f"device_ids: expected a list of devices, or None, got {type(device_ids).__name__}")
        # Uses torch's device numbers: "cuda:0" is 0, and the CPU is -1. torch's class wants distinct GPUs.
        numbers = [device_index(device, optional=True, allow_cpu=True) for device in device_ids or ()]
        if len(set(numbers)) == len(numbers) and -1 not in numbers:
            super().__init__(module, device_ids, output_device, dim)  # pyrefly: ignore[bad-argument-type]
            return
        nn.Module.__init__(self)
        self._shares_devices, self.module, self.dim = True, module, dim
        self.device_ids: list[Any] = [torch.empty(0, device=device).device for device in device_ids or ()]
        self.src_device_obj = self.device_ids[0]
        self.output_device: Any = self.src_device_obj if output_device is None else torch.device(output_device)

    def replicate(self, module: _Module, device_ids: Sequence[Any]) -> list[_Module]:
        for name, part in module.named_modules():
            if is_compiled_wrapper(part):  # a replica would overwrite the attributes of the original module
                raise TypeError(
                    f"module: cannot replicate {name_of(part, name)}, which torch.compile returned; call "
                    "model.compile() instead of torch.compile(model)"
                )
        if self._shares_devices:
            replicas = [_replica(module, device, rank) for rank, device in enumerate(device_ids)]
        else:
            replicas = super().replicate(module, device_ids)
        execute_replication_callbacks(replicas)
        return replicas

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]) -> Any:
        """Returns each replica's arguments: chunks of tensors, and all other values unchanged."""
        if not self._shares_devices:
            return super().scatter(inputs, kwargs, device_ids)
        size, arguments = len(device_ids), (inputs, kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        counts = {len(tensor.chunk(size, self.dim)) for tensor in tensors} or {1}
        if len(counts) > 1:
            got = ", ".join(map(str, sorted(counts)))
            raise ValueError(f"inputs: expected tensors that split into equally many chunks, got {got} chunks")

        def part(rank: int, tensor: Tensor) -> Tensor:
            return tensor.chunk(size, self.dim)[rank].to(device_ids[rank])

        parts = [pytree.tree_map_only(Tensor, partial(part, rank), arguments) for rank in range(counts.pop())]
        return tuple(zip(*parts, strict=True))

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Calls each replica in a thread. Raises the first error after all threads have finished."""
        try:
            if not self._shares_devices:
                return super().parallel_apply(replicas, inputs, kwargs)
            devices, grad_enabled = self.device_ids[: len(replicas)], torch.is_grad_enabled()
            autocasts = [torch.autocast(each.type, enabled=torch.is_autocast_enabled(each.type)) for each in devices]
            streams = [torch.cuda.current_stream(each) if each.type == "cuda" else None for each in devices]

            def call(autocast: Any, stream: Any, replica: Any, input: Any, kwargs: Any) -> Any:
                with torch.set_grad_enabled(grad_enabled), autocast, torch.cuda.stream(stream):
                    return replica(*input, **kwargs)

            calls = zip(autocasts, streams, replicas, inputs, kwargs, strict=True)
            with ThreadPoolExecutor(len(replicas)) as pool:
                futures = [pool.submit(call, *arguments) for arguments in calls]
            return [future.result() for future in futures]
        except Exception as error:
            group: Replicas | None = vars(replicas[0]).get("_bagua_syncbn_replicas")
            # `error` may come from a replica that waited for the failed one.
            failure = error if group is None or group.error is None else group.error
        # Raised outside the handler, so that Python does not set `error` as the context of `failure`.
        raise failure

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Returns the outputs of all replicas: tensors concatenated, or stacked if they are scalars."""
        if not self._shares_devices:
            return super().gather(outputs, output_device)

        def join(first: Any, *others: Any) -> Tensor | None:
            if first is None:
                return None
            if not isinstance(first, Tensor):
                raise TypeError(f"outputs: expected tensors or None, got {type(first).__name__}")
            combine = torch.cat if first.dim() else torch.stack
            return combine([leaf.to(output_device) for leaf in (first, *others)], self.dim)

        return pytree.tree_map(join, *outputs)


def _replica(network: _Module, device: torch.device, rank: int) -> _Module:
    """Returns a copy of ``network`` on ``device`` that passes gradients on to the parameters of ``network``.

    Like torch's replicas, the copy has tensors instead of parameters; only replica 0 shares the buffers of ``network``.
    """
    tensors: dict[Any, Any] = {parameter: parameter.view_as(parameter).to(device) for parameter in network.parameters()}
    buffers = {buffer: buffer.to(device, copy=True) for buffer in network.buffers()} if rank > 0 else {}
    copies: dict[Any, Any] = {module: module._replicate_for_data_parallel() for module in network.modules()}
    for module, copy in copies.items():
        copy._modules = {name: copies.get(child) for name, child in module._modules.items()}
        copy._buffers = {name: buffers.get(buffer, buffer) for name, buffer in module._buffers.items()}
        for name, parameter in module._parameters.items():
            setattr(copy, name, tensors.get(parameter))  # recurrent layers also store the parameter in a list
    return copies[network]


def patch_replication_callback(data_parallel: nn.DataParallel[Any]) -> None:
    """Turns ``data_parallel`` into a :class:`DataParallelWithCallback`, in place.

    ``data_parallel`` is a :class:`torch.nn.DataParallel`. The new class of an instance of a subclass inherits from this
    subclass and from :class:`DataParallelWithCallback`. Raises TypeError for other objects.
    """
    if not isinstance(data_parallel, nn.DataParallel):
        raise TypeError(f"data_parallel: expected a torch.nn.DataParallel, got {type(data_parallel).__name__}")
    cls: Any = type(data_parallel)
    if cls is nn.DataParallel:
        data_parallel.__class__ = DataParallelWithCallback
    elif not issubclass(cls, DataParallelWithCallback):
        data_parallel.__class__ = type(cls.__name__, (DataParallelWithCallback, cls), {"__module__": cls.__module__})


def execute_replication_callbacks(modules: Sequence[nn.Module]) -> None:
    """Connects the submodules of a model's replicas.

    Calls ``__data_parallel_replicate__(ctx, copy_id)`` on each submodule with this method: ``copy_id`` is the index of
    the replica, and ``ctx`` is a :class:`CallbackContext` that all copies of the submodule share. Replica 0 comes
    first. A submodule with several names is called once per replica.

    Only code with custom replication needs this function. Call it after each replication, then call each replica once,
    in a thread.

    Args:
        modules: the replicas, in order. Replica 0 must have the buffers of the model, as with
            :func:`torch.nn.parallel.replicate`: only these running statistics are updated.

    Raises:
        TypeError: ``modules`` is not a list of modules.
        ValueError: replicas have different numbers of submodules.
        RuntimeError: replicas train inside activation checkpointing.
    """
    is_list = isinstance(modules, (list, tuple)) and all(isinstance(each, nn.Module) for each in modules)
    if not is_list or not modules:
        raise TypeError(f"modules: expected a list of replicas, at least one, got {text_of_argument(modules)}")
    layers = [(name, child) for name, child in modules[0].named_modules() if isinstance(child, SyncBatchNorm)]
    for name, layer in layers:
        if layer.training and hooks.in_checkpoint:
            raise RuntimeError(
                f"{name_of(layer, name)}: activation checkpointing cannot recompute replicas, which would update the "
                "running statistics twice; checkpoint parts of the model that have no synchronized layers, or use "
                "one process per device"
            )
    replicas = Replicas(len(modules))
    contexts = [CallbackContext(replicas, name_of(child, name)) for name, child in modules[0].named_modules()]
    for copy_id, module in enumerate(modules):
        children = list(module.modules())
        if len(children) != len(contexts):
            got = f"{len(contexts)} and {len(children)} submodules"
            raise ValueError(f"modules: expected replicas of the same model, got {got}")
        for context, child in zip(contexts, children, strict=True):
            if hasattr(child, "__data_parallel_replicate__"):
                child.__data_parallel_replicate__(context, copy_id)  # pyrefly: ignore[not-callable]
        if len(modules) > 1 and layers:
            replicas.watch(copy_id, module)


def _replicate(layer: SyncBatchNorm, ctx: CallbackContext, copy_id: int) -> None:
    """Connects this copy of a layer to its peers."""
    state = layer._sync_state
    others = (each for each in state.attachments if each is not refuse_alone and not isinstance(each, Replica))
    state.attachments = (Replica(ctx.replicas, copy_id, ctx.layer), *others)


SyncBatchNorm.__data_parallel_replicate__ = _replicate


def convert_model(module: _Module) -> _Module:
    """Converts all batch normalization layers of ``module`` in place, and returns ``module``.

    Calls :func:`bagua_syncbn.convert_sync_batchnorm` for ``module``, wrapped or not, and
    :func:`patch_replication_callback` for each :class:`torch.nn.DataParallel` in it.
    """
    for child in convert_sync_batchnorm(module).modules():
        if isinstance(child, nn.DataParallel):
            patch_replication_callback(child)
    return module
