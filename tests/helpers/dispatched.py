"""Counts of a step at torch's dispatcher: ops, collectives, payload, memory and host reads."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.counted import EXCHANGE, CollectiveCounter

# Arguments of c10d's ops that hold the payload of this rank.
_PAYLOAD = ("input", "input_tensor", "input_tensors", "inputs", "tensor", "tensors")
_NO_COLLECTIVES = ("wait_tensor", "monitored_barrier_")

# Ops that block the host until a value, or a data-dependent shape, is available.
_READS = (
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique", "_unique2", "_to_cpu"
)  # fmt: skip


class Counts(NamedTuple):
    """Counts of a forward or backward pass on this rank."""

    ops: list[str]  # dispatched by Python and autograd
    collectives: int
    payload: int  # bytes sent to the collectives
    waits: int  # host waits for collectives
    reads: int  # host reads of values or shapes on the device
    large: int  # allocations at least as large as the input


def count_step(layer: nn.Module, x: Tensor, grad_output: Tensor) -> tuple[Counts, Counts, int]:
    """Returns the counts of forward and backward, and the peak bytes that they allocate."""
    inputs = [t for t in (x, *layer.parameters()) if t.requires_grad]
    for _ in range(2):  # creates lasting buffers, such as thread pools and lazily created groups
        torch.autograd.grad(layer(x), inputs, grad_output)
    counter = DispatchCounter()
    y, forward = counter.count(lambda: layer(x), x.nbytes)
    _, backward = counter.count(lambda: torch.autograd.grad(y, inputs, grad_output), x.nbytes)
    return forward, backward, counter.peak


class DispatchCounter(TorchDispatchMode):
    """Records dispatched ops, including autograd's. A native kernel counts as a single op with the memory of its
    results."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0  # peak bytes in memory
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._begin()

    def _begin(self) -> None:
        self.ops: list[str] = []
        self.payloads: list[int] = []  # bytes that this rank sends to each collective
        self.sizes: list[int] = []  # bytes of each allocation
        self.reads = 0

    def count(self, function: Callable[[], Any], large: int) -> tuple[Any, Counts]:
        """Returns the result of ``function`` and its counts; ``large`` is the size in bytes of a large allocation."""
        self._begin()
        with CollectiveCounter().installed() as counter, self:
            result = function()
        messages = len(self.payloads) + counter.collectives[EXCHANGE]
        payload = sum(self.payloads) + counter.shared_bytes
        allocations = sum(size >= large for size in self.sizes)
        return result, Counts(self.ops, messages, payload, counter.waits, self.reads, allocations)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = function._schema.name.split("::")
        self.ops.append(function._schema.name)
        if namespace in ("c10d", "_c10d_functional") and name not in _NO_COLLECTIVES:
            self.payloads.append(_payload(function, args, kwargs))
        self.reads += reads_on_host(function, args, kwargs)
        result = function(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in _tensors([args, [*kwargs.values()]])}
        for storage in (tensor.untyped_storage() for tensor in _tensors(result)):
            if storage._cdata not in given:
                self.sizes.append(storage.nbytes())
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for made, size in self._made.values() if not made.expired()))
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _payload(function: Any, args: Any, kwargs: Any) -> int:
    names = [argument.name for argument in function._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    return sum(t.nbytes for name in _PAYLOAD for t in _tensors(values.get(name)))


def reads_on_host(function: Any, args: Any, kwargs: Any) -> bool:
    """Returns True if the host waits for a value or a shape from the device after this op."""
    namespace, name = function._schema.name.split("::")
    if namespace != "aten":
        return False
    if name in ("index", "index_put_", "index_put"):  # the number of indices depends on the mask
        return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    if name == "_to_copy":
        device = (kwargs or {}).get("device")
        return device is not None and torch.device(device).type == "cpu" and args[0].device.type != "cpu"
    return name in _READS
