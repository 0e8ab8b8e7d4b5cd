"""Ops, collectives and reads of the host that Python code hands to torch's dispatcher."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# The arguments of c10d's ops that hold what this rank contributes.
_PAYLOAD = ("input", "input_tensor", "input_tensors", "inputs", "tensor", "tensors")
_NO_COLLECTIVES = ("wait_tensor", "monitored_barrier_")

# Ops whose result the host must have before it goes on: values, and shapes that depend on values.
_READS = (
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique", "_unique2", "_to_cpu"
)  # fmt: skip


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class DispatchCounter(TorchDispatchMode):
    """Lists what is dispatched while it is entered, autograd's backward included.

    What ops dispatch inside themselves is not seen: a kernel counts as one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.payloads: list[int] = []  # bytes that this rank contributes to each collective
        self.reads = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = function._schema.name.split("::")
        self.ops.append(function._schema.name)
        if namespace in ("c10d", "_c10d_functional") and name not in _NO_COLLECTIVES:
            self.payloads.append(_payload(function, args, kwargs))
        self.reads += reads_on_host(function, args, kwargs)
        return function(*args, **kwargs)


def _payload(function: Any, args: Any, kwargs: Any) -> int:
    names = [argument.name for argument in function._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    return sum(t.nbytes for name in _PAYLOAD for t in _tensors(values.get(name)))


def reads_on_host(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host needs a value or a shape from the device to go on after this op."""
    namespace, name = function._schema.name.split("::")
    if namespace != "aten":
        return False
    if name in ("index", "index_put_", "index_put"):  # a mask is turned into indices, whose number is data
        return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    if name == "_to_copy":
        device = (kwargs or {}).get("device")
        return device is not None and torch.device(device).type == "cpu" and args[0].device.type != "cpu"
    return name in _READS
