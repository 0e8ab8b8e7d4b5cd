"""torch.nn.DataParallel with callbacks for its replicas, as a class and as a patch of an existing object."""

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from torch import nn

from .callbacks import execute_replication_callbacks, first_error
from .shared_device import DataParallel

_Module = TypeVar("_Module", bound=nn.Module)


class DataParallelWithCallback(DataParallel):
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

    def replicate(self, module: _Module, device_ids: Sequence[Any]) -> list[_Module]:
        replicas = super().replicate(module, device_ids)
        execute_replication_callbacks(replicas)
        return replicas

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        try:
            return super().parallel_apply(replicas, inputs, kwargs)
        except Exception as error:
            failure = first_error(replicas[0], error)
        # Raised after the handler, in which Python would set `error` as the context of `failure`.
        raise failure


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
    cls: Any = type(data_parallel)
    if not issubclass(cls, DataParallelWithCallback):
        data_parallel.__class__ = DataParallelWithCallback if cls is nn.DataParallel else _with_callback(cls)


@cache
def _with_callback(cls: type[nn.Module]) -> Any:
    return type(cls.__name__, (DataParallelWithCallback, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
