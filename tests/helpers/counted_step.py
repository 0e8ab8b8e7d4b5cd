"""All counts of one step of a layer: forward, and backward with a given gradient of the output."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from allocations import record_allocations
from dispatched import DispatchCounter
from torch import Tensor, nn

from benchmarks.core.waiting import EXCHANGE, CollectiveClock


class Counts(NamedTuple):
    """Counts of a forward or a backward pass on this rank."""

    ops: list[str]  # dispatched from Python and autograd
    collectives: int
    payload: int  # bytes contributed to the collectives
    waits: int  # times that the host waited for a collective
    reads: int  # times that the host needs a value or a shape from the device
    large: int  # allocations of at least the size of the input


def count_step(layer: nn.Module, x: Tensor, grad_output: Tensor) -> tuple[Counts, Counts, int]:
    """Returns the counts of forward and backward, and the peak in bytes of what both allocate beyond their input."""
    inputs = [t for t in (x, *layer.parameters()) if t.requires_grad]

    def forward(*_: object) -> Tensor:
        result: Tensor = layer(x)
        return result

    def backward(y: Any) -> object:
        return torch.autograd.grad(y, inputs, grad_output)

    for _ in range(2):  # buffers that live on, such as thread pools and lazily made groups
        backward(forward())
    passes, argument = [], None
    for function in (forward, backward):
        argument, *counted = _count(function, argument)
        passes.append(counted)
    allocations = record_allocations(forward, backward, x.device)
    large = [sum(size >= x.nbytes for size in sizes) for sizes in allocations.sizes]
    first, second = (Counts(*counted, n) for counted, n in zip(passes, large, strict=True))
    return first, second, allocations.peak


def _count(function: Callable[[Any], Any], argument: Any) -> list[Any]:
    clock = CollectiveClock()
    with clock.installed(), DispatchCounter() as dispatched:
        result = function(argument)
    sent = dispatched.payloads
    messages = len(sent) + clock.collectives[EXCHANGE]
    return [result, dispatched.ops, messages, sum(sent) + clock.shared_bytes, clock.waits, dispatched.reads]
