"""What the ops found wrong, where no host waits for them."""

import ctypes
import itertools
import warnings
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ..torch_internals import outside_of_modes
from .identity import Identity, describe


class Fault:
    """The memory of the host that ops of one kind of device write to, see :mod:`bagua_syncbn.ops.schemas`."""

    def __init__(self, pinned: bool) -> None:
        with outside_of_modes():
            self.tensor = torch.zeros(8, dtype=torch.int64, device="cpu", pin_memory=pinned)
        # Read without an op: it is looked at in every call.
        self.kind = ctypes.c_int64.from_address(self.tensor.data_ptr())

    def take(self) -> list[int]:
        with outside_of_modes():
            record: list[int] = self.tensor.tolist()
            self.tensor.zero_()
        return record


ON_CPU = Fault(False)
FAULTS = {"cpu": ON_CPU}

# Sums of this rank by their number in this process, for those that turn out to be wrong some time later.
_sums: deque[tuple[int, Identity]] = deque(maxlen=1024)
_numbers = itertools.count()


def fault_for(tensor: Tensor) -> Fault | None:
    """Returns where an op on ``tensor`` is to note what it finds wrong.

    None where its device cannot write to the memory of the host, and for a tensor without values.
    """
    if type(tensor) is not Tensor:
        return None
    return ON_CPU if tensor.is_cpu else fault_on(tensor.device)


def fault_on(device: torch.device) -> Fault | None:
    """Returns where the ops on a device of the kind of ``device`` note it; None where they cannot."""
    fault = FAULTS.get(device.type)
    if fault is None:
        if device.type != "cuda" or torch.compiler.is_compiling():
            return None
        fault = FAULTS["cuda"] = Fault(True)
    return fault


def number_of_sum(identity: Identity) -> int:
    """Returns what to give to the op that takes a sum apart as ``call``."""
    number = next(_numbers)
    _sums.append((number, identity))
    return number


def raise_if_found() -> None:
    """Raises for what ops are known to have found wrong. Waits for no device."""
    for fault in FAULTS.values():
        if fault.kind.value:
            raise RuntimeError(found(fault.take()))


def check_ranks() -> None:
    """Waits for the devices, and raises if ranks made different calls without an error so far.

    In eager mode on CPU they raise at once. On CUDA no host waits: where ranks differ the output or gradient is NaN,
    running statistics stay as they are, and the first call that finds out raises. This one finds out for certain, for
    example at the end of an epoch. So it does for compiled calls on CPU; those on CUDA give NaN and are not named.

    Raises:
        RuntimeError: ranks made different calls. It names them.

    Example::

        >>> bagua_syncbn.check_ranks()
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    raise_if_found()


def check() -> None:
    """:func:`check_ranks` by its former name, which goes with the next release."""
    warnings.warn("bagua_syncbn.check: renamed; call bagua_syncbn.check_ranks", DeprecationWarning, stacklevel=2)
    check_ranks()


def found(record: Sequence[int]) -> str:
    """Returns the message for what an op wrote to ``fault``."""
    kind, where, *words = record
    if kind == 3:
        own = [identity.text for number, identity in _sums if number == where]
        return differ([f"this rank: {own[0] if own else 'backward, compiled'}", "another rank: another call"])
    said = [f"rank 0: {describe(words[:3])}", f"rank {where}: {describe(words[3:])}"]
    if kind == 1:
        return differ(said)
    return f"sync_batch_norm: expected from each rank a count of values, from 0 to 2**53, got no such from {said[1]}"


def differ(calls: Sequence[str]) -> str:
    """Returns the message for ranks that made different ``calls``."""
    return (
        "sync_batch_norm: expected all ranks of a group to call the same layers in the same order with the same "
        f"options, got {'; '.join(calls)}"
    )
