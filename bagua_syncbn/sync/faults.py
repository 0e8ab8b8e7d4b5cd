"""Faults: records in which ops note that the headers of ranks differ, and the errors raised for them."""

import ctypes
import itertools
from collections import deque
from collections.abc import Sequence

import torch

from ..torch_internals import outside_of_modes
from .signatures import CallSignature, describe


class FaultRecord:
    """The memory of the host that ops of one kind of device write to, see ``docs/design.md``."""

    def __init__(self, pinned: bool) -> None:
        with outside_of_modes():
            self.tensor = torch.zeros(8, dtype=torch.int64, device="cpu", pin_memory=pinned)
        # Read without an op: every call looks at it.
        self.kind = ctypes.c_int64.from_address(self.tensor.data_ptr())

    def take(self) -> list[int]:
        """Returns what was written, and clears the record.

        Clears only the kind. An op writes it last and does not overwrite an earlier fault. A fault in between is not
        recorded, but its results are NaN too.
        """
        with outside_of_modes():
            record: list[int] = self.tensor.tolist()
        self.kind.value = 0
        return record


class _Records(dict[str, FaultRecord]):
    """Records by type of device. Devices that cannot write to the memory of the host have none: None."""

    def __missing__(self, device: str) -> FaultRecord | None:
        if device == "cuda":
            self[device] = FaultRecord(True)
        return self.get(device)


ON_CPU = FaultRecord(False)
RECORDS = _Records(cpu=ON_CPU)


# Sums that this rank has sent where no host waits, by their number in this process: for those found wrong later.
_sums: deque[tuple[int, CallSignature]] = deque(maxlen=1024)
_numbers = itertools.count()


def number_of_sums(signature: CallSignature) -> int:
    """Returns the number by which an op notes that the sums of a call are wrong."""
    number = next(_numbers)
    _sums.append((number, signature))
    return number


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


def raise_if_found() -> None:
    """Raises for what ops are known to have found wrong. Waits for no device."""
    for record in RECORDS.values():
        if record.kind.value:
            raise RuntimeError(found_text(record.take()))


def differ_text(calls: Sequence[str]) -> str:
    """Returns the message for ranks that made different ``calls``."""
    return (
        "sync_batch_norm: expected all ranks of a group to call the same layers in the same order with the same "
        f"options, got {'; '.join(calls)}"
    )


def found_text(record: Sequence[int]) -> str:
    """Returns the message for what an op wrote to a record."""
    kind, where, *headers = record
    if kind == 3:
        own = [signature.text for number, signature in _sums if number == where]
        return differ_text([f"this rank: {own[0] if own else 'backward, compiled'}", "another rank: another call"])
    if headers[-1] < 0:  # in statistics that were added up
        *caller, call = headers[3:]
        return differ_text([f"this rank: {describe((*caller, -1 - call))}", "another rank: another call"])
    said = [f"rank 0: {describe(headers[:3])}", f"rank {where}: {describe(headers[3:])}"]
    if kind == 1:
        return differ_text(said)
    return f"sync_batch_norm: expected from each rank a count of values, from 0 to 2**53, got none from {said[1]}"
