"""Faults: records in which ops note that the headers of ranks differ, and the errors raised for them."""

import ctypes
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from threading import Thread

import torch

from .. import ops
from ..groups import ranks_by_text
from ..torch_internals.autograd import outside_of_modes
from .signatures import CallSignature, describe


class FaultRecord:
    """The memory of the host that ops of one group write to, on one type of device; see ``docs/design.md``."""

    def __init__(self, device_type: str) -> None:
        self.is_on_cpu = device_type == "cpu"
        made: list[torch.Tensor] = []

        def make() -> None:
            try:
                made.append(torch.zeros(8, dtype=torch.int64, device="cpu", pin_memory=not self.is_on_cpu))
            except RuntimeError:
                if device_type == "cuda":  # whose kernels take the address
                    raise
                made.append(torch.zeros(8, dtype=torch.int64, device="cpu"))  # this device cannot pin memory

        # In a thread of its own no mode, transform or default device is active: the tensor is real, and ops may write.
        thread = Thread(target=make)
        thread.start()
        thread.join()
        (self.tensor,) = made
        self.is_told = False  # whether an error has told what is in it
        # Read without an op: every call looks at it.
        self.kind = ctypes.c_int64.from_address(self.tensor.data_ptr())
        # Sums that this rank has sent where no host waits, by number: for those found wrong later.
        self._sums: deque[tuple[int, CallSignature, int]] = deque(maxlen=2048)
        self._numbers = itertools.count()

    def number_of_sums(self, signature: CallSignature, call: int) -> int:
        """Returns the number by which an op notes that the sums of a call are wrong."""
        number = next(self._numbers)
        self._sums.append((number, signature, call))
        return number

    def take(self) -> list[int]:
        """Returns what was written, and clears the record on CPU. Elsewhere it stays, so that each further call raises.

        Clears only the kind. An op writes it last and does not overwrite an earlier fault. A fault in between is not
        recorded, but its results are NaN too.
        """
        with outside_of_modes():
            record: list[int] = self.tensor.tolist()
        if self.is_on_cpu:
            self.kind.value = 0
        return record

    def raise_if_found(self) -> None:
        """Raises for what an op has written. Waits for no device."""
        if self.kind.value:
            written, self.is_told = self.take(), True
            own = [f"{signature.text}, call {call}" for number, signature, call in self._sums if number == written[1]]
            if written[1] < 0:  # compiled code has no numbers, and writes its caller, negated
                own = [describe((*divmod(-written[1], ops.WORD), 0))]
            raise RuntimeError(found_text(written, own[0] if own else "a call long ago"))


# Records by history and type of device, as long as the history lives: the calls of one group never see what another
# one's ops have found. Compiled code looks its record up here.
RECORDS: dict[tuple[str, str], FaultRecord] = {}


def record_of(history: str, device_type: str) -> FaultRecord | None:
    """Returns the record of a history for ops on ``device_type``; None for tensors without values."""
    key = history, device_type
    if key not in RECORDS and device_type != "meta":
        return RECORDS.setdefault(key, FaultRecord(device_type))
    return RECORDS.get(key)


def is_checked_at_once(record: FaultRecord | None, device: torch.device) -> bool:
    """Whether the host looks at ``record`` after each op, so that all ranks find out in one call that they differ."""
    return device.type == "cpu" if record is None else record.is_on_cpu


def forget_records(history: str) -> None:
    for key in list(RECORDS):
        if key[0] == history:
            RECORDS.pop(key, None)


def differ_text(own: str, calls: Iterable[tuple[int, str]] = (), other: str = "another call") -> str:
    """Returns the message for ranks that differ: their ``calls``, by rank; if none are known, this rank's ``own``."""
    said = ranks_by_text(calls) or [("this rank", own), ("another rank", other)]
    return (
        "sync_batch_norm: expected all ranks of a group to call the same layers in the same order with the same "
        f"options, got {'; '.join(f'{ranks}: {call}' for ranks, call in said)}"
    )


def found_text(record: Sequence[int], own_sums: str = "") -> str:
    """Returns the message for what an op wrote to a record; ``own_sums`` says which sums these are, if any."""
    kind, where, *headers = record
    if kind == 3:
        return differ_text(own_sums)
    first, other = describe(headers[:3]), describe(headers[3:])
    if kind == 1:
        return differ_text(first, [(0, first), (where, other)])
    expected = "expected from each rank a count of values, from 0 to 2**53"
    return f"sync_batch_norm: {expected}, got none from rank {where}: {other}"
