"""Data parallelism within one process, as :class:`torch.nn.DataParallel` offers it, with synchronized layers.

The names and what they do are those of the package Synchronized-BatchNorm-PyTorch, so that its users change an import.
Replicas may also share a device: ``device_ids=["cpu", "cpu"]`` runs two of them, in threads, on chunks of one batch.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from .communicators import CallbackContext, Replicas
from .convert import convert_sync_batchnorm
from .functional import check_eps_mode
from .sync_batchnorm import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d

__all__ = [
    "CallbackContext",
    "DataParallelWithCallback",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "convert_model",
    "execute_replication_callbacks",
    "patch_replication_callback",
    "patch_sync_batchnorm",
]

_Module = TypeVar("_Module", bound=nn.Module)


class _SynchronizedBatchNorm(SyncBatchNorm):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        eps_mode: str = "plus",
    ) -> None:
        check_eps_mode(eps_mode)
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype, bias=bias
        )
        self.eps_mode = eps_mode


class SynchronizedBatchNorm1d(_SynchronizedBatchNorm, SyncBatchNorm1d):
    r"""Batch normalization over (N, C) or (N, C, L) with the statistics of all replicas.

    A :class:`~bagua_syncbn.SyncBatchNorm1d` with the arguments of :class:`torch.nn.BatchNorm1d`. Parameters, buffers
    and state dict are those of that class, too.

    Args:
        num_features: C, the number of channels.
        eps: :math:`\epsilon`.
        momentum: weight of the new statistics in the running ones; None for the average over all batches.
        affine: whether there are parameters :math:`\gamma` and :math:`\beta`.
        track_running_stats: whether to keep running statistics.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: with ``affine``, whether there is a :math:`\beta`.
        eps_mode: ``"plus"`` to divide by :math:`\sqrt{\mathrm{Var}[x] + \epsilon}`, as torch does, or ``"clamp"`` to
            divide by :math:`\sqrt{\max(\mathrm{Var}[x], \epsilon)}`. Also an attribute, which can be set.

    Shape:
        - Input: (N, C) or (N, C, L), float16, bfloat16, float32 or float64
        - Output: as the input, in its memory format

    Raises:
        ValueError: ``eps_mode`` is neither of the two.
    """

    local_class = nn.BatchNorm1d


class SynchronizedBatchNorm2d(_SynchronizedBatchNorm, SyncBatchNorm2d):
    """:class:`SynchronizedBatchNorm1d` for input of 4 dimensions, (N, C, H, W)."""

    local_class = nn.BatchNorm2d


class SynchronizedBatchNorm3d(_SynchronizedBatchNorm, SyncBatchNorm3d):
    """:class:`SynchronizedBatchNorm1d` for input of 5 dimensions, (N, C, D, H, W)."""

    local_class = nn.BatchNorm3d


def execute_replication_callbacks(modules: Sequence[nn.Module]) -> None:
    """Tells the submodules of the replicas of one model about each other.

    Calls ``__data_parallel_replicate__(ctx, copy_id)`` on each submodule, of any class, that has such a method:
    ``copy_id`` is the index of the replica, and ``ctx`` a :class:`CallbackContext` that all copies of the submodule get
    and on which they may set attributes. All of replica 0 are called first. A submodule that has several names in the
    model is called once for each replica.

    Needed only by code that makes its own replicas. Call it after each replication, before the replicas run, each in
    a thread of its own; the call of a replica is then its forward pass.

    Args:
        modules: the replicas, in order. Replica 0 must hold the buffers of the model itself, as with
            :func:`torch.nn.parallel.replicate`: the running statistics are updated there and nowhere else.

    Raises:
        ValueError: ``modules`` is empty, or they do not all have the same submodules.
    """
    structures = [dict(module.named_modules()) for module in modules]
    if not structures or any(structure.keys() != structures[0].keys() for structure in structures):
        raise ValueError(
            "modules: expected replicas of one model, at least one and all with the same submodules, got "
            f"{len(structures)} with {sorted({len(structure) for structure in structures})} submodules"
        )
    replicas = Replicas(len(modules))
    contexts = {name: CallbackContext(replicas, _describe(name, child)) for name, child in structures[0].items()}
    for copy_id, structure in enumerate(structures):
        for name, child in structure.items():
            callback = getattr(child, "__data_parallel_replicate__", None)
            if callback is not None:
                callback(contexts[name], copy_id)
    if len(modules) > 1 and any(isinstance(child, SyncBatchNorm) for child in structures[0].values()):
        for rank, module in enumerate(modules):
            _watch(module, replicas, rank)


def _describe(name: str, module: nn.Module) -> str:
    return f"{type(module).__name__} at {name!r}" if name else type(module).__name__


def _watch(module: nn.Module, replicas: Replicas, rank: int) -> None:
    """Lets the others know when the call of ``module`` raises or ends, hooks included, so that they do not wait."""
    compiled = module._compiled_call_impl
    reference = ref(module)  # a cycle would keep the copies of the parameters until the next garbage collection

    def call(*args: Any, **kwargs: Any) -> Any:
        replica = reference()
        assert replica is not None
        with replicas.running(rank):
            return (compiled or replica._call_impl)(*args, **kwargs)

    # What torch calls in place of everything else, for Module.compile. The class, and forward, stay what they are.
    module._compiled_call_impl = call
    vars(module)["_bagua_syncbn_replicas"] = replicas


class DataParallelWithCallback(nn.DataParallel):  # type: ignore[type-arg]
    """:class:`torch.nn.DataParallel` whose replicas know of each other, so that synchronized layers synchronize.

    Each forward splits the batch into chunks, runs a replica of ``module`` on each, in a thread, and concatenates their
    outputs. Layers of this package normalize by the statistics of the whole batch; after backward, the gradients of
    ``module`` and of the input are those of ``module`` on the whole batch, and so are its running statistics. Other
    layers can have a part in it by the protocol of :func:`execute_replication_callbacks`.

    Replicas can share a device, which also simulates the ranks of a larger job in one process: with a device named
    more than once, or with ``"cpu"``, they are made, run and gathered by this class as ``torch.nn.DataParallel`` does
    it on devices of their own.

    Args:
        module: the model, on the first of the devices.
        device_ids: the device of each replica: a number, a :class:`torch.device` or a name, such as
            ``["cpu", "cpu"]``; all CUDA devices by default. A batch with fewer samples than there are devices has fewer
            replicas.
        output_device: where outputs are gathered; the first device by default.
        dim: the dimension of inputs and outputs that runs over samples.

    Raises:
        RuntimeError: in forward, a layer is called a different number of times by different replicas.
        ValueError: in forward, on a shared device, tensors among the inputs split into different numbers of chunks.

    In forward, what a replica raises is raised, the others being freed.

    Example::

        >>> model = convert_model(model)
        >>> model = DataParallelWithCallback(model, device_ids=["cpu", "cpu", "cpu"])
        >>> model(images).sum().backward()
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        # Numbers stay numbers: without a GPU, which torch's class takes for no replicas, they are no devices.
        devices = [device if isinstance(device, int) else torch.device(device) for device in device_ids or ()]
        if len(set(devices)) == len(devices) and torch.device("cpu") not in devices:
            super().__init__(module, device_ids, output_device, dim)  # type: ignore[arg-type]
            return
        nn.Module.__init__(self)
        self.dim = dim
        self.module = module
        # Of torch.device, by which _shares_devices tells them from the numbers that torch's own class holds.
        self.device_ids: list[Any] = [torch.empty(0, device=device).device for device in devices]
        self.output_device: Any = self.device_ids[0] if output_device is None else torch.device(output_device)
        self.src_device_obj = self.device_ids[0]

    @property
    def _shares_devices(self) -> bool:
        return any(isinstance(device, torch.device) for device in self.device_ids)

    def replicate(self, module: _Module, device_ids: Sequence[Any]) -> list[_Module]:
        if self._shares_devices:
            replicas = [_replica(module, device, rank) for rank, device in enumerate(device_ids)]
        else:
            replicas = super().replicate(module, device_ids)
        execute_replication_callbacks(replicas)
        return replicas

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]) -> Any:
        if not self._shares_devices:
            return super().scatter(inputs, kwargs, device_ids)
        if not inputs and not kwargs:
            return (), ()
        counts = {len(tensor.chunk(len(device_ids), self.dim)) for tensor in _tensors((inputs, kwargs))}
        if len(counts) > 1:
            raise ValueError(
                f"inputs: expected tensors that split into the same number of chunks, got some that split into "
                f"{sorted(counts)}"
            )
        used = device_ids[: min(counts, default=len(device_ids))]
        return tuple(zip(*_scatter((inputs, kwargs or {}), used, len(device_ids), self.dim), strict=True))

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        try:
            if self._shares_devices:
                return _parallel_apply(replicas, inputs, kwargs, self.device_ids)
            return super().parallel_apply(replicas, inputs, kwargs)
        except Exception as error:
            failure = _first_error(replicas, error)
        # Not in the handler, where it would be given another context.
        raise failure

    def gather(self, outputs: Any, output_device: Any) -> Any:
        if self._shares_devices:
            return _gather(outputs, output_device, self.dim)
        return super().gather(outputs, output_device)


def _first_error(replicas: Sequence[nn.Module], raised: Exception) -> BaseException:
    """Returns the error that freed the others; ``raised``, that of the first replica, may be one of theirs."""
    group: Replicas | None = vars(replicas[0]).get("_bagua_syncbn_replicas")
    if group is None or group.error is None:
        return raised
    # Taken: its traceback holds the group.
    error, group.error = group.error, None
    return error


def patch_replication_callback(data_parallel: nn.DataParallel[Any]) -> None:
    """Makes ``data_parallel`` run the callbacks of its replicas, as :class:`DataParallelWithCallback` does, in place.

    Its class becomes :class:`DataParallelWithCallback`, or a class that inherits from that and from its own.

    Args:
        data_parallel: a model wrapped in :class:`torch.nn.DataParallel` or a subclass.

    Raises:
        TypeError: it is of another class.
    """
    if not isinstance(data_parallel, nn.DataParallel):
        raise TypeError(f"data_parallel: expected a torch.nn.DataParallel, got {type(data_parallel).__name__}")
    cls = type(data_parallel)
    if not issubclass(cls, DataParallelWithCallback):
        data_parallel.__class__ = _with_callback(cls)


_classes_with_callback: dict[type[nn.Module], Any] = {nn.DataParallel: DataParallelWithCallback}


def _with_callback(cls: type[nn.Module]) -> Any:
    if cls not in _classes_with_callback:
        namespace = {
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": _reduce_ex,
            "_plain_class": cls,
        }
        _classes_with_callback[cls] = type(cls.__name__, (DataParallelWithCallback, cls), namespace)
    return _classes_with_callback[cls]


def _reduce_ex(data_parallel: Any, protocol: Any) -> tuple[Any, ...]:
    # A class made by _with_callback cannot be imported by name: a file holds the one that it was made from.
    reduced: Any = super(DataParallelWithCallback, data_parallel).__reduce_ex__(protocol)
    return _new_with_callback, (data_parallel._plain_class,), *reduced[2:]


def _new_with_callback(cls: type[nn.Module]) -> Any:
    derived = _with_callback(cls)
    return derived.__new__(derived)


_SYNCHRONIZED: dict[type[nn.Module], type[SyncBatchNorm]] = {
    SyncBatchNorm1d: SynchronizedBatchNorm1d,
    SyncBatchNorm2d: SynchronizedBatchNorm2d,
    SyncBatchNorm3d: SynchronizedBatchNorm3d,
}


def convert_model(module: _Module) -> _Module:
    """Makes every batch normalization layer of ``module`` a synchronized one, in place.

    As :func:`bagua_syncbn.convert_sync_batchnorm`, with all that it says, but :class:`torch.nn.BatchNorm2d` becomes
    :class:`SynchronizedBatchNorm2d`, and where ``module`` is or holds a :class:`torch.nn.DataParallel`, that gets
    :func:`patch_replication_callback`.

    Args:
        module: the model, wrapped or not. If it is itself a batch normalization layer, a converted copy that shares its
            parameters and buffers is returned.

    Returns:
        ``module``, or its converted copy.

    Raises:
        TypeError, RuntimeError: as :func:`bagua_syncbn.convert_sync_batchnorm`.

    If it raises, ``module`` is unchanged.
    """
    module = convert_sync_batchnorm(module)
    for child in module.modules():
        if type(child) in _SYNCHRONIZED:
            child.__class__ = _SYNCHRONIZED[type(child)]
        elif isinstance(child, nn.DataParallel):
            patch_replication_callback(child)
    return module


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Makes ``torch.nn.BatchNorm1d``, ``2d`` and ``3d`` stand for the synchronized classes while it is entered.

    So code that builds its layers as ``nn.BatchNorm2d(...)`` builds synchronized ones. Only these three attributes of
    the module ``torch.nn`` change, for all threads: ``from torch.nn import BatchNorm2d`` before still gives torch's.

    Example::

        >>> with patch_sync_batchnorm():
        ...     model = torchvision.models.resnet18()
    """
    patched = {cls.local_class.__name__: cls for cls in _SYNCHRONIZED.values()}
    saved = {name: getattr(nn, name) for name in patched}
    try:
        for name, cls in patched.items():
            setattr(nn, name, cls)
        yield
    finally:
        for name, cls in saved.items():
            setattr(nn, name, cls)


# What torch.nn.parallel does with one device for each replica, for replicas that share a device.


def _replica(network: _Module, device: torch.device, rank: int) -> _Module:
    """Returns a copy of ``network`` on ``device`` whose parameters pass their gradients on to those of ``network``.

    Replica 0 has the buffers of ``network`` and so updates them; the others have copies.
    """

    def copied(tensor: Tensor) -> Tensor:
        if tensor not in tensors:
            # Not the parameter itself: as with torch, replicas hold no parameters.
            tensors[tensor] = tensor.to(device) if tensor.device != device else tensor.view_as(tensor)
        return tensors[tensor]

    tensors: dict[Tensor, Tensor] = {}
    copies: dict[nn.Module, Any] = {module: module._replicate_for_data_parallel() for module in network.modules()}
    for module, copy in copies.items():
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                copy._parameters[name] = None
            else:  # by attribute, since recurrent layers keep a list of theirs
                setattr(copy, name, copied(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and rank > 0:
                copy._buffers[name] = tensors.setdefault(buffer, buffer.to(device, copy=True))
    return copies[network]  # type: ignore[no-any-return]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and dicts, which are what gets split."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _scatter(value: Any, devices: Sequence[torch.device], chunks: int, dim: int) -> list[Any]:
    """Returns ``value`` for each of ``devices``: tensors in their chunks, anything else as it is."""
    if isinstance(value, Tensor):
        return [chunk.to(device) for chunk, device in zip(value.chunk(chunks, dim), devices, strict=True)]
    if not isinstance(value, (tuple, list, dict)) or not value:
        return [value for _ in devices]
    items = value.values() if isinstance(value, dict) else value
    rows = zip(*(_scatter(item, devices, chunks, dim) for item in items), strict=True)
    return [_like(value, row) for row in rows]


def _gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Returns the outputs of all replicas as one: tensors concatenated, or stacked if they have no dimensions."""
    first = outputs[0]
    if isinstance(first, Tensor):
        join = torch.cat if first.dim() else torch.stack
        return join([output.to(device) for output in outputs], dim)
    if first is None:
        return None
    if not isinstance(first, (tuple, list, dict)):
        raise TypeError(
            "module: expected outputs that are tensors or None, or dicts, lists or tuples of these, got "
            f"{type(first).__name__}"
        )
    if isinstance(first, dict):
        outputs = [[output[key] for key in first] for output in outputs]
    return _like(first, [_gather(items, device, dim) for items in zip(*outputs, strict=True)])


def _like(value: Any, items: Sequence[Any]) -> Any:
    """Returns a container of the type of ``value``, and with its keys if it has any, that holds ``items``."""
    if isinstance(value, dict):
        return type(value)(zip(value, items, strict=True))
    return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)


def _parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    devices: Sequence[torch.device],
) -> list[Any]:
    """Calls each replica in a thread of its own; raises what the first that raises does, when all have ended."""

    def call(rank: int) -> Any:
        with modes[rank]():
            return replicas[rank](*inputs[rank], **kwargs[rank])

    modes = [_thread_modes(device) for device in devices[: len(replicas)]]
    with ThreadPoolExecutor(len(replicas)) as pool:
        futures = [pool.submit(call, rank) for rank in range(len(replicas))]
    return [future.result() for future in futures]


def _thread_modes(device: torch.device) -> Callable[[], ExitStack]:
    """Returns what another thread enters to compute on ``device`` in the modes and the CUDA stream of this one."""
    types = dict.fromkeys(("cpu", device.type))
    inference, grad, cache = (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_cache_enabled(),
    )
    autocasts = [(name, torch.get_autocast_dtype(name), torch.is_autocast_enabled(name)) for name in types]
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for name, dtype, enabled in autocasts:
            stack.enter_context(torch.autocast(name, dtype, enabled, cache))
        if stream is not None:
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return enter
