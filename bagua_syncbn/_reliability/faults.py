"""Fault records, where ops record mismatched headers, and the errors raised for them."""

import ctypes
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import torch

from .. import _ops as ops
from .._groups import ranks_by_text
from .signatures import RAISED, Signature

# Types of devices whose fault record the host checks after each op, so that all ranks raise at the same message.
CHECKED_AT_ONCE = ("cpu",)


class FaultRecord:
    """Host memory where a group's ops on one type of device record faults; see ``README.md``."""

    def __init__(self, device_type: str, recent: Collection[tuple[int, Signature]]) -> None:
        self.is_checked_at_once, self._recent = device_type in CHECKED_AT_ONCE, recent

        def make() -> torch.Tensor:
            try:
                return torch.zeros(8, dtype=torch.int64, device="cpu", pin_memory=device_type != "cpu")
            except RuntimeError:
                if device_type == "cuda":  # kernels write to this memory, which must be pinned
                    raise
                return torch.zeros(8, dtype=torch.int64, device="cpu")  # this device cannot pin memory

        # A new thread has no active mode, transform or default device: ops can write to the tensor.
        with ThreadPoolExecutor(1) as thread:
            self.tensor = thread.submit(make).result()
        if not self.is_checked_at_once:
            _memory.append(self.tensor)
        address = self.tensor.data_ptr()  # read directly: faster than ops, and modes do not interfere
        self.kind, self._values = ctypes.c_int64.from_address(address), (ctypes.c_int64 * 8).from_address(address)
        _records.add(self)

    def raise_if_found(self) -> None:
        """Raises RuntimeError if an op has recorded a fault. Does not wait for a device.

        On device types that are checked after each op, the record is cleared; on other device types, later calls raise
        too. Ops write the kind last and never overwrite a fault. A second fault is not recorded, but the op's results
        are NaN.
        """
        kind, first, *headers = self._values
        if not kind:
            return
        if self.is_checked_at_once:
            self.kind.value = 0
        if kind == 3:
            texts = {number: f"{signature.text}, message {number}" for number, signature in tuple(self._recent)}
            raise RuntimeError(differ_text(texts.get(first, "an earlier message")))
        one, other = describe(headers[:3], self._recent), describe(headers[3:], self._recent)
        if kind == 2:
            raise RuntimeError(
                f"sync_batch_norm: rank {first} sent a count outside 0 to 2**53 in the {other}; end the job, and check "
                "that all ranks run the same version of bagua_syncbn and that the communicator does not change messages"
            )
        raise RuntimeError(differ_text(one, [(0, one), (first, other)]))


_records: WeakSet[FaultRecord] = WeakSet()  # records of all live histories
_memory: list[torch.Tensor] = []  # never freed, because a captured graph may write to it: 64 bytes for each record


def check_ranks() -> None:
    """Waits for the devices, and raises if ranks have made different calls.

    On CPU such calls raise immediately. On devices the host does not wait: the output or gradient is NaN, running
    statistics do not change, and a later call raises. Call this function, for example after each epoch, to find all
    such calls. Mismatched compiled calls whose messages do not go through shared memory are not detected, but their
    results are NaN.

    Raises:
        RuntimeError: ranks made different calls, which the error names; or torch cannot wait for this device.

    Example::

        >>> bagua_syncbn.check_ranks()
    """
    records = list(_records)
    if torch.accelerator.is_available() and not all(record.is_checked_at_once for record in records):
        try:
            torch.accelerator.synchronize()
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # an error of the device itself
                raise
            raise RuntimeError(
                f"check_ranks: cannot wait for the device {torch.accelerator.current_accelerator()}, so its last calls "
                f"were not checked: {error}. A later call of a layer raises if ranks have made different calls"
            ) from error
    for record in records:
        record.raise_if_found()


def describe(header: Sequence[float], recent: Collection[tuple[int, Signature]]) -> str:
    """Describes the message with this header, including its layer if this rank has sent the same message."""
    layer, options, number = map(int, header)
    identity = layer * ops.WORD + options
    text = "an error that this rank raised" if identity == RAISED else "a message unknown to this rank"
    for _, signature in tuple(recent):
        if identity in (signature.identity, signature.compiled_identity):
            text = signature.text
    return f"{text}, message {number}" if number else f"{text}, in compiled code"


def differ_text(own: str, messages: Iterable[tuple[int, str]] = ()) -> str:
    """Returns the error for different ``messages``: (rank, description) pairs.

    Without ``messages``, the error names only this rank's message, ``own``.
    """
    by_text = ranks_by_text(messages) or [("this rank", own), ("another rank", "another message")]
    differences = "; ".join(f"{ranks}: {message}" for ranks, message in by_text)
    return (
        f"sync_batch_norm: ranks made different calls: {differences}; "
        "all ranks of a group must make the same calls, in the same order and with the same options"
    )
