"""Counts of a step: dispatched ops, collectives, payload, allocations and host reads of device values."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bagua_syncbn.communicators import shared
from benchmarks.sections.stored import Storages

EXCHANGE = "exchange"  # function of the native library for shared memory
# The message of a forward or backward pass with few channels: an exchange through shared memory, or a method of c10d,
# whose name depends on the version of torch.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "_allgather_base"
MESSAGE = GATHER if shared.problem() else EXCHANGE
MESSAGE_IN_GRAPH = "all_gather_into_tensor" if shared.problem() else "exchange"

# Methods of process groups that communicate, in all versions of torch.
_COLLECTIVES = ("all", "broadcast", "reduce", "gather", "scatter")
# Ops that block the host until a value, or a data-dependent shape, is available.
_READS = (
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique", "_unique2", "_to_cpu"
)  # fmt: skip


@contextmanager
def collectives(payloads: list[int] | None = None) -> Iterator[Counter[str]]:
    """Counts the collectives of this process, in all threads, by method.

    Appends the bytes that this rank sends with each collective to ``payloads``.
    """
    called: Counter[str] = Counter()
    inside = False  # a collective that calls another counts once

    def counted(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return method(*args, **kwargs)
            inside = True
            try:
                result = method(*args, **kwargs)
            finally:
                inside = False
            called[name] += 1
            if payloads is not None and name == EXCHANGE:
                payloads.append(args[3] * args[4])
            elif payloads is not None:  # the input is not larger than the output
                payloads.append(min(tensor.nbytes for tensor in _tensors([args, kwargs])))
            return result

        return call

    methods = [name for name in vars(dist.ProcessGroup) if name.lstrip("_").startswith(_COLLECTIVES)]
    places: list[tuple[Any, str]] = [(dist.ProcessGroup, name) for name in methods]
    if not shared.problem():
        places += [(shared.native_library(), EXCHANGE), (shared.native_library(), "publish")]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            patch.setattr(owner, name, counted(getattr(owner, name), name))
        yield called


class Counts(NamedTuple):
    """Counts of a forward or backward pass on this rank."""

    ops: list[str]  # dispatched by Python and autograd; a native kernel is a single op
    payloads: list[int]  # bytes sent to each collective
    reads: int  # host reads of values or shapes on the device
    large: int  # allocations at least as large as the input


def kept(model: nn.Module, batch: Tensor) -> int:
    """Returns the number of tensors as large as ``batch`` that forward keeps for backward."""
    with Storages() as storages:
        loss = model(batch).sum()
        count = storages.sizes_alive([batch]).count(batch.nbytes)
    loss.backward()
    return count


def count_step(layer: nn.Module, x: Tensor, grad_output: Tensor) -> tuple[Counts, Counts]:
    """Returns the counts of forward and backward."""
    inputs = [t for t in (x, *layer.parameters()) if t.requires_grad]
    for _ in range(2):  # creates lasting buffers, such as thread pools and lazily created groups
        torch.autograd.grad(layer(x), inputs, grad_output)
    y, forward = _count(lambda: layer(x), x.nbytes)
    return forward, _count(lambda: torch.autograd.grad(y, inputs, grad_output), x.nbytes)[1]


def _count(function: Callable[[], Any], large: int) -> tuple[Any, Counts]:
    payloads: list[int] = []
    with collectives(payloads), _DispatchCounter() as counter:
        result = function()
    return result, Counts(counter.ops, payloads, counter.reads, sum(size >= large for size in counter.sizes))


class _DispatchCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.sizes: list[int] = []  # bytes of each allocation
        self.reads = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.ops.append(function._schema.name)
        self.reads += _reads_on_host(function, args, kwargs)
        result = function(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in _tensors([args, kwargs])}
        storages = [tensor.untyped_storage() for tensor in _tensors(result)]
        self.sizes += [storage.nbytes() for storage in storages if storage._cdata not in given]
        return result


class ForbidHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not _reads_on_host(func, args, kwargs or {}), f"{func} reads a device value on the host"
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _reads_on_host(function: Any, args: Any, kwargs: Any) -> bool:
    """Returns True if the host waits for a value or a shape from the device after this op."""
    namespace, name = function._schema.name.split("::")
    if namespace != "aten":
        return False
    if name in ("index", "index_put_", "index_put"):  # the number of indices depends on the mask
        return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    if name == "_to_copy":
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu" and args[0].device.type != "cpu"
    return name in _READS
