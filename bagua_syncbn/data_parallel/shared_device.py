"""Replication, scatter, gather and parallel calls as in torch.nn.parallel, for replicas that share a device."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..torch_internals.modules import pytree

_Module = TypeVar("_Module", bound=nn.Module)


def replica(network: _Module, device: torch.device, rank: int) -> _Module:
    """Returns a copy of ``network`` on ``device`` that passes the gradients of its parameters on to the network's.

    Replica 0 has the buffers of ``network`` and so updates them; replicas 1, 2, … have copies.
    """

    def copied(tensor: Tensor) -> Tensor:
        if tensor not in tensors:
            # Replicas hold tensors in place of parameters, as in torch.
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
            else:  # setattr, because recurrent layers keep a list of their parameters
                setattr(copy, name, copied(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and rank > 0:
                copy._buffers[name] = tensors.setdefault(buffer, buffer.to(device, copy=True))
    return copies[network]  # type: ignore[no-any-return]


def scatter(value: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    """Returns ``value`` once for each device: its tensors in chunks, anything else unchanged.

    Fewer chunks than ``devices`` use the first devices.

    Raises:
        ValueError: tensors in ``value`` split into different numbers of chunks.
    """
    leaves, spec = pytree.tree_flatten(value)
    chunks = [leaf.chunk(len(devices), dim) if isinstance(leaf, Tensor) else None for leaf in leaves]
    counts = {len(parts) for parts in chunks if parts is not None} or {len(devices)}
    if len(counts) > 1:
        raise ValueError(
            f"inputs: expected tensors that split into the same number of chunks, got some that split into "
            f"{sorted(counts)}"
        )
    rows = (
        [leaf if parts is None else parts[rank].to(devices[rank]) for leaf, parts in zip(leaves, chunks, strict=True)]
        for rank in range(counts.pop())
    )
    return [pytree.tree_unflatten(row, spec) for row in rows]


def gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Returns the outputs of all replicas joined: tensors concatenated, or stacked if they have no dimensions."""
    flat = [pytree.tree_flatten(output) for output in outputs]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_joined(leaves, device, dim) for leaves in columns], flat[0][1])


def _joined(leaves: Sequence[Any], device: torch.device, dim: int) -> Tensor | None:
    first = leaves[0]
    if first is None:
        return None
    if not isinstance(first, Tensor):
        raise TypeError(
            "module: expected outputs that are tensors or None, or dicts, lists or tuples of these, got "
            f"{type(first).__name__}"
        )
    join = torch.cat if first.dim() else torch.stack
    return join([leaf.to(device) for leaf in leaves], dim)


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    devices: Sequence[torch.device],
) -> list[Any]:
    """Calls each replica in a thread of its own. After all have ended, raises the error of the first that failed."""

    def call(rank: int) -> Any:
        with ExitStack() as stack:
            for mode in modes[rank]:
                stack.enter_context(mode())
            return replicas[rank](*inputs[rank], **kwargs[rank])

    modes = [_modes_on(device) for device in devices[: len(replicas)]]
    with ThreadPoolExecutor(len(replicas)) as pool:
        futures = [pool.submit(call, rank) for rank in range(len(replicas))]
    return [future.result() for future in futures]


def _modes_on(device: torch.device) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Returns contexts in which another thread computes on ``device`` in this thread's modes and CUDA stream."""
    modes: list[Callable[[], AbstractContextManager[Any]]] = [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    cache = torch.is_autocast_cache_enabled()
    for name in {"cpu", device.type}:
        modes.append(
            partial(torch.autocast, name, torch.get_autocast_dtype(name), torch.is_autocast_enabled(name), cache)
        )
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        modes += [partial(torch.cuda.device, device), partial(torch.cuda.stream, stream)]
    return modes
