"""torch.nn.DataParallel with callbacks for its replicas, as a class and as a patch of an existing object."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..torch_internals.modules import device_index
from . import shared_device
from .callbacks import execute_replication_callbacks, first_error

_Module = TypeVar("_Module", bound=nn.Module)


class DataParallelWithCallback(nn.DataParallel):  # type: ignore[type-arg]
    """:class:`torch.nn.DataParallel` in which synchronized layers synchronize over the replicas.

    Each forward splits the batch into chunks, runs a replica of ``module`` on each, in a thread, and concatenates their
    outputs. Layers of this package normalize by the statistics of the whole batch; after backward, the gradients of
    ``module`` and of the input are those of ``module`` on the whole batch, and so are its running statistics. Other
    layers can communicate too, see :func:`execute_replication_callbacks`.

    Replicas can share a device: name it more than once, or ``"cpu"``. That simulates the ranks of a job in one process.

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

    If a replica raises in forward, the call raises that error, and replicas that wait for it are freed.

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
        devices = device_ids or ()
        if not _are_shared(devices):
            super().__init__(module, device_ids, output_device, dim)  # type: ignore[arg-type]
            return
        nn.Module.__init__(self)
        self.dim = dim
        self.module = module
        # torch.device objects, where torch's own class holds numbers: _shares_devices distinguishes the two.
        self.device_ids: list[Any] = [torch.empty(0, device=device).device for device in devices]
        self.output_device: Any = self.device_ids[0] if output_device is None else torch.device(output_device)
        self.src_device_obj = self.device_ids[0]

    @property
    def _shares_devices(self) -> bool:
        return any(isinstance(device, torch.device) for device in self.device_ids)

    def replicate(self, module: _Module, device_ids: Sequence[Any]) -> list[_Module]:
        if self._shares_devices:
            replicas = [shared_device.replica(module, device, rank) for rank, device in enumerate(device_ids)]
        else:
            replicas = super().replicate(module, device_ids)
        execute_replication_callbacks(replicas)
        return replicas

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]) -> Any:
        if not self._shares_devices:
            return super().scatter(inputs, kwargs, device_ids)
        if not inputs and not kwargs:
            return (), ()
        chunks = shared_device.scatter((inputs, kwargs or {}), device_ids, self.dim)
        return tuple(zip(*chunks, strict=True))

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        try:
            if self._shares_devices:
                return shared_device.parallel_apply(replicas, inputs, kwargs, self.device_ids)
            return super().parallel_apply(replicas, inputs, kwargs)
        except Exception as error:
            failure = first_error(replicas, error)
        # Raised after the handler, in which Python would set `error` as the context of `failure`.
        raise failure

    def gather(self, outputs: Any, output_device: Any) -> Any:
        if self._shares_devices:
            return shared_device.gather(outputs, output_device, self.dim)
        return super().gather(outputs, output_device)


def _are_shared(devices: Sequence[int | str | torch.device]) -> bool:
    """Whether two replicas share a device, or one is on the CPU: torch's own class accepts neither."""
    # Devices as torch numbers them, so that 0 and "cuda:0" are one device; the CPU is -1.
    numbers = [device_index(device, optional=True, allow_cpu=True) for device in devices]
    return len(set(numbers)) < len(numbers) or -1 in numbers


def patch_replication_callback(data_parallel: nn.DataParallel[Any]) -> None:
    """Makes ``data_parallel`` run the callbacks of its replicas, as :class:`DataParallelWithCallback` does, in place.

    Its class becomes :class:`DataParallelWithCallback`, or a class that inherits from that and from its own.

    Args:
        data_parallel: a model wrapped in :class:`torch.nn.DataParallel` or a subclass.

    Raises:
        TypeError: ``data_parallel`` is of another class.
    """
    if not isinstance(data_parallel, nn.DataParallel):
        raise TypeError(f"data_parallel: expected a torch.nn.DataParallel, got {type(data_parallel).__name__}")
    cls = type(data_parallel)
    if not issubclass(cls, DataParallelWithCallback):
        data_parallel.__class__ = _with_callback(cls)


_classes_with_callback: dict[type[nn.Module], Any] = {nn.DataParallel: DataParallelWithCallback}


def _with_callback(cls: type[nn.Module]) -> Any:
    if cls not in _classes_with_callback:
        namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        _classes_with_callback[cls] = type(cls.__name__, (DataParallelWithCallback, cls), namespace)
    return _classes_with_callback[cls]
