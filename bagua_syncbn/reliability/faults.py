"""Fault records, in which ops note that the headers of ranks differ, and the errors raised for them."""

import ctypes
from collections.abc import Collection, Iterable, Sequence
from threading import Thread

import torch

from .. import ops
from ..groups import ranks_by_text
from ..torch_internals.autograd import outside_of_modes
from .signatures import CallSignature, describe


class FaultRecord:
    """Host memory that the ops of one group write to, on one type of device; see ``docs/design.md``."""

    def __init__(self, device_type: str, recent: Collection[tuple[int, CallSignature]] = ()) -> None:
        self.is_on_cpu, self._recent = device_type == "cpu", recent
        made: list[torch.Tensor] = []

        def make() -> None:
            try:
                made.append(torch.zeros(8, dtype=torch.int64, device="cpu", pin_memory=not self.is_on_cpu))
            except RuntimeError:
                if device_type == "cuda":  # whose kernels take the address
                    raise
                made.append(torch.zeros(8, dtype=torch.int64, device="cpu"))  # this device cannot pin memory

        # A new thread has no active mode, transform or default device: the tensor is real, and ops may write to it.
        thread = Thread(target=make)
        thread.start()
        thread.join()
        (self.tensor,) = made
        self.is_reported = False
        self.kind = ctypes.c_int64.from_address(self.tensor.data_ptr())  # each call reads it, without an op

    def take(self) -> list[int]:
        """Returns the recorded fault. On CPU it also clears the record; elsewhere each further call raises too.

        Clears only the kind. An op writes it last and does not overwrite an earlier fault. A fault in between is not
        recorded, but its results are NaN too.
        """
        with outside_of_modes():
            record: list[int] = self.tensor.tolist()
        if self.is_on_cpu:
            self.kind.value = 0
        return record

    def raise_if_found(self) -> None:
        """Raises RuntimeError if an op has recorded a fault. Does not wait for a device."""
        if self.kind.value:
            record, self.is_reported = self.take(), True
            own = [f"{signature.text}, call {call}" for call, signature in self._recent if call == record[1]]
            if record[1] < 0:  # calls without a number pass their caller, negated
                own = [describe((*divmod(-record[1], ops.WORD), 0))]
            raise RuntimeError(fault_text(record, own[0] if own else "an earlier call"))


# By history and type of device, as long as the history lives, so that a fault in one group raises in no other. Compiled
# code looks its record up here.
RECORDS: dict[tuple[str, str], FaultRecord] = {}


def record_of(history: str, device_type: str, recent: Collection[tuple[int, CallSignature]] = ()) -> FaultRecord | None:
    """Returns the record of a history for ops on ``device_type``; None for tensors without values.

    ``recent`` calls are those that errors can name.
    """
    key = history, device_type
    if key not in RECORDS and device_type != "meta":
        return RECORDS.setdefault(key, FaultRecord(device_type, recent))
    return RECORDS.get(key)


def is_checked_at_once(record: FaultRecord | None, device: torch.device) -> bool:
    """Whether the host checks ``record`` after each op, so that all ranks notice a difference in the same call."""
    return device.type == "cpu" if record is None else record.is_on_cpu


def forget_records(history: str) -> None:
    for key in list(RECORDS):
        if key[0] == history:
            RECORDS.pop(key, None)


def check_ranks() -> None:
    """Waits for the devices, and raises if ranks made different calls without an error so far.

    In eager mode on CPU such calls raise at once. On other devices no host waits: where ranks differ the output or
    gradient is NaN, running statistics stay as they are, and a later call raises. This function finds every difference,
    for example at the end of an epoch. It also finds those of compiled calls on CPU; compiled calls on other devices
    give NaN and are not named.

    Raises:
        RuntimeError: ranks made different calls. It names them.

    Example::

        >>> bagua_syncbn.check_ranks()
    """
    for device_type in {device_type for _, device_type in list(RECORDS)} - {"cpu"}:
        synchronize = getattr(getattr(torch, device_type, None), "synchronize", None)
        if synchronize is not None:
            synchronize()
    for record in list(RECORDS.values()):
        if record.is_on_cpu or not record.is_reported:
            record.raise_if_found()


def differ_text(own: str, calls: Iterable[tuple[int, str]] = (), other: str = "another call") -> str:
    """Returns the message for ranks that made different ``calls``, by rank; without them, for this rank's ``own``."""
    by_text = ranks_by_text(calls) or [("this rank", own), ("another rank", other)]
    return (
        "sync_batch_norm: expected all ranks of a group to call the same layers in the same order with the same "
        f"options, got {'; '.join(f'{ranks}: {call}' for ranks, call in by_text)}"
    )


def fault_text(record: Sequence[int], own_sums: str = "") -> str:
    """Returns the message for a recorded fault. ``own_sums`` describes the call of this rank, for sums."""
    kind, rank, *headers = record
    if kind == 3:
        return differ_text(own_sums)
    first, other = describe(headers[:3]), describe(headers[3:])
    if kind == 1:
        return differ_text(first, [(0, first), (rank, other)])
    return f"sync_batch_norm: rank {rank} sent an invalid count of values, in the {other}; expected 0 to 2**53"
