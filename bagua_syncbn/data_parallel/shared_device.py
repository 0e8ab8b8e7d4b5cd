"""What torch.nn.parallel does with one device for each replica, for replicas that share a device."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_Module = TypeVar("_Module", bound=nn.Module)


def replica(network: _Module, device: torch.device, rank: int) -> _Module:
    """Returns a copy of ``network`` on ``device`` whose parameters pass their gradients on to those of ``network``.

    Replica 0 has the buffers of ``network`` and so updates them; replicas 1, 2, … have copies.
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


def each_tensor(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and dicts, which are what gets split."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from each_tensor(item)


def scatter(value: Any, devices: Sequence[torch.device], chunks: int, dim: int) -> list[Any]:
    """Returns ``value`` for each of ``devices``: tensors in their chunks, anything else as it is."""
    if isinstance(value, Tensor):
        return [chunk.to(device) for chunk, device in zip(value.chunk(chunks, dim), devices, strict=True)]
    if not isinstance(value, (tuple, list, dict)) or not value:
        return [value for _ in devices]
    items = value.values() if isinstance(value, dict) else value
    rows = zip(*(scatter(item, devices, chunks, dim) for item in items), strict=True)
    return [_like(value, row) for row in rows]


def gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
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
    return _like(first, [gather(items, device, dim) for items in zip(*outputs, strict=True)])


def _like(value: Any, items: Sequence[Any]) -> Any:
    """Returns a container of the type of ``value``, and with its keys if it has any, that holds ``items``."""
    if isinstance(value, dict):
        return type(value)(zip(value, items, strict=True))
    return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    devices: Sequence[torch.device],
) -> list[Any]:
    """Calls each replica in a thread of its own; when all have ended, raises the error of the first that raised."""

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
