"""torch.nn.DataParallel for replicas that share a device."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..torch_internals.modules import device_index, pytree

_Module = TypeVar("_Module", bound=nn.Module)


class DataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """:class:`torch.nn.DataParallel` whose devices may be named more than once, or be ``"cpu"``."""

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
        if not self._shares_devices:
            return super().replicate(module, device_ids)
        return [replica(module, device, rank) for rank, device in enumerate(device_ids)]

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
        """Calls each replica in a thread of its own. When all have ended, raises the error of the first that failed."""
        if not self._shares_devices:
            return super().parallel_apply(replicas, inputs, kwargs)

        def call(rank: int) -> Any:
            with ExitStack() as stack:
                for mode in modes[rank]:
                    stack.enter_context(mode)
                return replicas[rank](*inputs[rank], **kwargs[rank])

        modes = [_modes_on(device) for device in self.device_ids[: len(replicas)]]
        with ThreadPoolExecutor(len(replicas)) as pool:
            futures = [pool.submit(call, rank) for rank in range(len(replicas))]
        return [future.result() for future in futures]

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Returns the outputs of all replicas joined: tensors concatenated, or stacked if they have no dimensions."""
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
    """Whether two replicas share a device, or one is on the CPU: torch's own class accepts neither."""
    # Devices as torch numbers them, so that 0 and "cuda:0" are one device; the CPU is -1.
    numbers = [device_index(device, optional=True, allow_cpu=True) for device in devices]
    return len(set(numbers)) < len(numbers) or -1 in numbers


def replica(network: _Module, device: torch.device, rank: int) -> _Module:
    """Returns a copy of ``network`` on ``device`` that passes the gradients of its parameters on to the network's.

    Replica 0 has the buffers of ``network`` and so updates them; replicas 1, 2, … have copies.
    """
    # Replicas hold tensors in place of parameters, as in torch.
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
    """Returns contexts in which another thread computes on ``device`` in this thread's modes and CUDA stream."""
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
