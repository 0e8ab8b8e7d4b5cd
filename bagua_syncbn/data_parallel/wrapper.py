"""torch.nn.DataParallel with callbacks for its replicas, which may share a device, and the callbacks of our layers."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..memory.checkpointing import refuse_to_recompute_replicas
from ..names import name_of
from ..sync_batchnorm import SyncBatchNorm, refuse_alone
from ..threads import this_thread
from ..torch_internals.modules import device_index, pytree
from .replicas import CallbackContext, Replicas
from .step import Replica

_Module = TypeVar("_Module", bound=nn.Module)


class DataParallelWithCallback(nn.DataParallel):  # type: ignore[type-arg]
    """:class:`torch.nn.DataParallel` in which synchronized layers synchronize over the replicas.

    Each forward splits the batch into chunks, runs a replica of ``module`` on each chunk in a thread, and concatenates
    the outputs. Layers of this package use the statistics of the whole batch, so gradients and running statistics equal
    those of ``module`` on the whole batch. Other layers can communicate too, see :func:`execute_replication_callbacks`.

    Replicas can share a device: list it more than once, or list ``"cpu"``. This simulates the ranks of a job in one
    process.

    Args:
        module: the model, on the first device.
        device_ids: the device of each replica: a number, a :class:`torch.device` or a name, such as
            ``["cpu", "cpu"]``; all CUDA devices by default. A batch with fewer samples than devices uses fewer
            replicas.
        output_device: where outputs are gathered; the first device by default.
        dim: the batch dimension of inputs and outputs.

    Raises:
        RuntimeError: in forward, the replicas call a layer a different number of times.
        ValueError: in forward, on a shared device, input tensors split into different numbers of chunks.

    If a replica raises in forward, the call raises that error, and waiting replicas stop.

    Example::

        >>> model = convert_model(model)
        >>> model = DataParallelWithCallback(model, device_ids=["cpu", "cpu", "cpu"])
        >>> model(images).sum().backward()
    """

    _shares_devices = False

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        if not are_shared(device_ids or ()):
            super().__init__(module, device_ids, output_device, dim)  # type: ignore[arg-type]
            return
        nn.Module.__init__(self)
        self._shares_devices = True
        self.dim = dim
        self.module = module
        self.device_ids: list[Any] = [torch.empty(0, device=device).device for device in device_ids or ()]
        self.output_device: Any = self.device_ids[0] if output_device is None else torch.device(output_device)
        self.src_device_obj = self.device_ids[0]

    def replicate(self, module: _Module, device_ids: Sequence[Any]) -> list[_Module]:
        if self._shares_devices:
            replicas = [_replica(module, device, rank) for rank, device in enumerate(device_ids)]
        else:
            replicas = super().replicate(module, device_ids)
        execute_replication_callbacks(replicas)
        return replicas

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]) -> Any:
        """Returns the arguments of each replica: tensors in chunks, anything else unchanged.

        Fewer chunks than devices use the first devices.
        """
        if not self._shares_devices:
            return super().scatter(inputs, kwargs, device_ids)
        if not inputs and not kwargs:
            return (), ()
        leaves, spec = pytree.tree_flatten((inputs, kwargs or {}))
        chunks = [leaf.chunk(len(device_ids), self.dim) if isinstance(leaf, Tensor) else None for leaf in leaves]
        counts = {len(parts) for parts in chunks if parts is not None} or {len(device_ids)}
        if len(counts) > 1:
            raise ValueError(
                f"inputs: expected tensors that split into the same number of chunks, got some that split into "
                f"{sorted(counts)}"
            )
        arguments = []
        for rank, device in enumerate(device_ids[: counts.pop()]):
            pairs = zip(leaves, chunks, strict=True)
            own = [leaf if parts is None else parts[rank].to(device) for leaf, parts in pairs]
            arguments.append(pytree.tree_unflatten(own, spec))
        return tuple(zip(*arguments, strict=True))

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Calls each replica in its own thread. When all have ended, raises the first error."""
        try:
            if not self._shares_devices:
                return super().parallel_apply(replicas, inputs, kwargs)
            modes = [_modes_on(device) for device in self.device_ids[: len(replicas)]]
            with ThreadPoolExecutor(len(replicas)) as pool:
                calls = zip(modes, replicas, inputs, kwargs, strict=True)
                futures = [pool.submit(_call_in, *call) for call in calls]
            return [future.result() for future in futures]
        except Exception as error:
            group: Replicas | None = vars(replicas[0]).get("_bagua_syncbn_replicas")
            # The error of a replica that waited follows from the first error.
            failure = error if group is None or group.error is None else group.error
        # Outside of the handler, where Python would set `error` as the context of `failure`.
        raise failure

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Returns the joined outputs of all replicas: tensors concatenated, or stacked if they have no dimensions."""
        if not self._shares_devices:
            return super().gather(outputs, output_device)

        def join(*leaves: Any) -> Tensor | None:
            first = leaves[0]
            if first is None:
                return None
            if not isinstance(first, Tensor):
                raise TypeError(
                    "module: expected outputs that are tensors or None, or dicts, lists or tuples of these, got "
                    f"{type(first).__name__}"
                )
            join = torch.cat if first.dim() else torch.stack
            return join([leaf.to(output_device) for leaf in leaves], self.dim)

        return pytree.tree_map(join, *outputs)


def are_shared(devices: Sequence[int | str | torch.device]) -> bool:
    """Returns True if two replicas share a device, or one is on the CPU: torch's class accepts neither."""
    # As torch numbers devices, 0 and "cuda:0" are equal, and the CPU is -1.
    numbers = [device_index(device, optional=True, allow_cpu=True) for device in devices]
    return len(set(numbers)) < len(numbers) or -1 in numbers


def _replica(network: _Module, device: torch.device, rank: int) -> _Module:
    """Returns a copy of ``network`` on ``device`` whose gradients reach the parameters of ``network``.

    Replica 0 shares the buffers of ``network`` and so updates them; the other replicas have copies.
    """
    # Replicas hold tensors instead of parameters, as in torch.
    tensors = {parameter: parameter.view_as(parameter).to(device) for parameter in network.parameters()}
    buffers = {buffer: buffer.to(device, copy=True) for buffer in network.buffers()} if rank > 0 else {}
    copies: dict[Any, Any] = {module: module._replicate_for_data_parallel() for module in network.modules()}
    for module, copy in copies.items():
        for name, child in module._modules.items():
            copy._modules[name] = copies.get(child)
        for name, parameter in module._parameters.items():
            if parameter is None:
                copy._parameters[name] = None
            else:  # setattr, because recurrent layers keep a list of their parameters
                setattr(copy, name, tensors[parameter])
        for name, buffer in module._buffers.items():
            copy._buffers[name] = buffers.get(buffer, buffer)
    return copies[network]  # type: ignore[no-any-return]


def _modes_on(device: torch.device) -> list[AbstractContextManager[Any]]:
    """Returns contexts that give another thread the modes and the CUDA stream of this thread on ``device``."""
    cache = torch.is_autocast_cache_enabled()
    modes: list[Any] = [
        torch.inference_mode(torch.is_inference_mode_enabled()),
        torch.set_grad_enabled(torch.is_grad_enabled()),
    ]
    for name in {"cpu", device.type}:
        modes.append(torch.autocast(name, torch.get_autocast_dtype(name), torch.is_autocast_enabled(name), cache))
    if device.type == "cuda":
        modes += [torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device))]
    return modes


def _call_in(modes: Sequence[AbstractContextManager[Any]], replica: Any, inputs: Any, kwargs: Any) -> Any:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        return replica(*inputs, **kwargs)


def patch_replication_callback(data_parallel: nn.DataParallel[Any]) -> None:
    """Makes ``data_parallel`` run the callbacks of its replicas, as :class:`DataParallelWithCallback` does, in place.

    Its class becomes :class:`DataParallelWithCallback`, or a class that inherits from that and from its old class.

    Args:
        data_parallel: a model wrapped in :class:`torch.nn.DataParallel` or a subclass.

    Raises:
        TypeError: ``data_parallel`` is of another class.
    """
    if not isinstance(data_parallel, nn.DataParallel):
        raise TypeError(f"data_parallel: expected a torch.nn.DataParallel, got {type(data_parallel).__name__}")
    cls: Any = type(data_parallel)
    if not issubclass(cls, DataParallelWithCallback):
        data_parallel.__class__ = DataParallelWithCallback if cls is nn.DataParallel else _with_callback(cls)


@cache
def _with_callback(cls: type[nn.Module]) -> Any:
    return type(cls.__name__, (DataParallelWithCallback, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def execute_replication_callbacks(modules: Sequence[nn.Module]) -> None:
    """Connects the submodules of the replicas of one model.

    Calls ``__data_parallel_replicate__(ctx, copy_id)`` on each submodule that has this method: ``copy_id`` is the index
    of the replica, and ``ctx`` is a :class:`CallbackContext` that all copies of the submodule share and on which they
    may set attributes. The submodules of replica 0 are called first. A submodule with several names in the model is
    called once per replica.

    Only code that makes its own replicas needs this function. Call it after each replication and before the replicas
    run, each in its own thread. The forward pass of a replica is one call of it.

    Args:
        modules: the replicas, in order. Replica 0 must hold the buffers of the model, as with
            :func:`torch.nn.parallel.replicate`: running statistics are updated only there.

    Raises:
        ValueError: ``modules`` is empty, or the submodules of two replicas differ.
        RuntimeError: activation checkpointing recomputes replicas that were or are in training.
    """
    structures = [dict(module.named_modules()) for module in modules]
    if not structures or any(structure.keys() != structures[0].keys() for structure in structures):
        raise ValueError(
            "modules: expected replicas of one model, at least one and all with the same submodules, got "
            f"{len(structures)} with {sorted({len(structure) for structure in structures})} submodules"
        )
    layers = [(name, child) for name, child in structures[0].items() if isinstance(child, SyncBatchNorm)]
    if layers and this_thread.prepare is not None:  # set within checkpoints
        name, layer = layers[0]
        refuse_to_recompute_replicas(name_of(layer, name), any(layer.training for _, layer in layers))
    replicas = Replicas(len(modules))
    contexts = {
        name: CallbackContext(replicas, name_of(child, name))
        for name, child in structures[0].items()
        if hasattr(child, "__data_parallel_replicate__")
    }
    for copy_id, structure in enumerate(structures):
        for name, context in contexts.items():
            structure[name].__data_parallel_replicate__(context, copy_id)
    if len(modules) > 1 and layers:
        for rank, module in enumerate(modules):
            replicas.watch(rank, module)


def _replicate(layer: SyncBatchNorm, ctx: CallbackContext, copy_id: int) -> None:
    """Connects this copy of a layer with the copies in the other replicas."""
    if not isinstance(ctx, CallbackContext):
        raise TypeError(
            "ctx: expected a bagua_syncbn.data_parallel.CallbackContext, as execute_replication_callbacks makes it, "
            f"got {type(ctx).__module__}.{type(ctx).__name__}"
        )
    others = (one for one in layer._sync_state.attachments if one is not refuse_alone and not isinstance(one, Replica))
    layer._sync_state.attachments = (Replica(ctx.replicas, copy_id, ctx.layer), *others)


SyncBatchNorm.__data_parallel_replicate__ = _replicate  # type: ignore[attr-defined]
