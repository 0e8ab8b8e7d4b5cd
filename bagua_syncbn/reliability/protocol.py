"""The protocol between ranks, which detect a mismatched collective before they send it.

A rank sends only the message that its peers expect, as predicted from the ``history`` of the group, and a probe instead
of any other. Each message carries a header for its call (``signatures``). The ops that read it record differences
between ranks (``faults``). See "On the wire" in ``docs/design.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from .. import ops
from ..groups import Communicator
from ..step.exchange import Exchange, Received
from .faults import FaultRecord, differ_text, fault_text, is_checked_at_once
from .history import CallHistory, first_message_hooks
from .probes import Probe, can_probe, decode, encode, leave, resume
from .signatures import ALL_BITS, CallSignature, checksum, describe


class RankExchange(Exchange):
    """The messages of one call over several ranks, and the arguments with which the ops compare the headers.

    A call's number is the sequence number of its forward in the group; 0 if peers may run compiled code, which counts
    no calls.
    """

    is_traced = False
    __slots__ = ("_history", "_number", "_record", "_signature", "header", "uses_sums")

    def __init__(
        self, signature: CallSignature, record: FaultRecord | None, communicator: Communicator, history: CallHistory
    ) -> None:
        self.communicator = communicator
        self._signature, self._record, self._history = signature, record, history
        if signature.kind in history.compiled:
            self._number, caller = 0, signature.compiled_caller
        else:
            self._number, caller = history.number, signature.caller
        self.uses_sums = signature.message[0]
        self.header = (checksum(caller, self._number, 0) & ALL_BITS, 0) if self.uses_sums else (caller, self._number)

    def gather(self, row: Tensor, counter: Tensor | None = None) -> Received:
        if counter is not None and self._number:  # must be equal on all ranks too; compared on the device
            ops.add_to_header(counter, row, self.uses_sums)
        if self.uses_sums:
            return self.sum(row, self._signature)
        rows, record = self._send(self.communicator.all_gather, row, self._signature), self._record
        return Received(rows, 1, None if record is None else record.tensor)

    def fingerprint(self, signature: CallSignature | None = None) -> int:
        """Returns the fingerprint for the sums of the backward pass, or of the call with this ``signature``."""
        signature, bits = signature or self._signature.backward, self._history.exact_bits
        if not self._number:
            return checksum(signature.compiled_caller, 0, 0) & bits
        return checksum(signature.caller, self._history.number, self._number) & bits

    def sum(self, sums: Tensor, signature: CallSignature | None = None) -> Received:
        signature, record, size = signature or self._signature.backward, self._record, self.communicator.size
        sums = self._send(self.communicator.all_reduce, sums, signature)
        if record is None:
            return Received(sums, size)
        return Received(sums, size, record.tensor, self._history.calls if self._number else -signature.compiled_caller)

    def check(self, rows: Tensor | None = None, counter: Tensor | None = None) -> None:
        record = self._record
        if record is not None and record.is_on_cpu and record.kind.value:
            self._raise_found(record.take(), rows, counter)
        self._history.sending = None

    def total(self, values: Tensor) -> Tensor:
        signature = self._signature.derivative
        header = ops.header_sums_of(self.fingerprint(signature))
        packed = torch.cat([values, values.new_tensor(header)])
        total = self._send(self.communicator.all_reduce, packed, signature)
        total, header_sums = total.tensor_split([-ops.HEADER_SUMS_SIZE])
        expected = [self.communicator.size * value for value in header]
        if packed.device.type != "cpu" or type(packed) is not Tensor:
            total = total.where((header_sums == packed.new_tensor(expected)).all(), torch.nan)
        elif header_sums.tolist() != expected:
            self._disagree(self._describe(signature, self._history.calls), packed.device)
        self._history.sending = None
        return total

    def _send(self, collective: Callable[[Tensor], Tensor], packed: Tensor, signature: CallSignature) -> Tensor:
        """Runs ``collective`` on the message ``packed``, once all ranks are known to send the same kind of message.

        The call counts as unfinished from before its first collective until the ranks are known to agree. If an
        exception ends it in between, the message that other ranks expect is unknown, so the group has failed.
        """
        history, record, number = self._history, self._record, self._number
        if history.failure is not None:
            resume(history)
        if record is not None and record.kind.value:
            record.raise_if_found()
        # Read and written without a call or a jump in between, where another thread could run.
        unfinished, history.sending = history.sending, signature
        try:
            if unfinished is not None:
                raise RuntimeError(
                    f"{unfinished.text} has not finished in this group: another thread is using it, or an "
                    "exception interrupted it"
                )
            if number and (history.next is None or history.next[0] is not signature):
                self._agree_on(signature, packed)
            result = collective(packed)
            if number:
                history.add(signature)
            return result
        except BaseException as error:
            failure = self._describe(signature, history.calls + 1)
            if history.failure == failure:  # all ranks know that they differ
                raise
            history.failure, communicator = failure, self.communicator
            leave(communicator, failure, error)
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(
                f"sync_batch_norm: collective failed in the {failure}, on rank {communicator.rank} of "
                f"{communicator.size}: {type(error).__name__}: {error}. Another rank has ended, raised an error, is in "
                "other code until the time-out, or was late; the group can no longer be used"
            ) from error

    def _agree_on(self, signature: CallSignature, packed: Tensor) -> None:
        """Sends a probe unless all ranks expect the message ``packed``.

        On CPU a message of the expected kind and size is enough. On other devices the call must be the expected one,
        because ranks with different calls would go on and then expect different messages.
        """
        history, device, expected = self._history, packed.device, self._history.expected()
        is_expected = expected is not None and expected.message == signature.message
        if expected is not None and is_expected and expected.caller != signature.caller:
            is_expected = is_checked_at_once(self._record, device)
        if is_expected or type(packed) is not Tensor or not can_probe(device):
            return
        if history.device is None:  # the first message in the group
            for hook in first_message_hooks:
                hook(history, self.communicator)
        history.probes += 1
        headers = Probe(history, signature.caller, self.communicator, device).send()
        if headers is not None:
            self._disagree(self._describe(signature, history.calls + 1), device, headers)
        history.device = device

    def _raise_found(self, record: list[int], rows: Tensor | None, counter: Tensor | None) -> NoReturn:
        """Raises RuntimeError for a fault that an op on CPU recorded."""
        signature = self._signature if rows is not None else self._signature.backward
        own = self._describe(signature, self._history.calls)
        if record[0] == 2:
            self._history.failure = own
            raise RuntimeError(fault_text(record))
        if counter is not None:
            own = f"{own}, num_batches_tracked={counter.item():.0f}"
        headers = () if rows is None or self.uses_sums else rows[:, -ops.HEADER_SIZE :].tolist()
        self._disagree(own, torch.device("cpu"), headers)

    def _disagree(self, own: str, device: torch.device, headers: Sequence[Sequence[float]] = ()) -> NoReturn:
        """Raises RuntimeError because ranks made different calls; ``own`` describes this rank's.

        On CPU all ranks come here and exchange descriptions, except those in compiled code. On other devices some may
        not come.
        """
        self._history.failure = own
        all_come = all(header[-1] for header in headers) if headers else not self._history.compiled
        texts, other = [], "another call"
        if is_checked_at_once(self._record, device) and all_come:
            try:
                texts = decode(self.communicator.all_gather(encode(own)))
            except BaseException as error:
                leave(self.communicator, own, error)
                if not isinstance(error, RuntimeError):
                    raise
                other = f"unknown: {error}"
        elif headers:
            texts = [describe(header) for header in headers]
            texts[self.communicator.rank] = own
        raise RuntimeError(differ_text(own, enumerate(texts), other))

    def _describe(self, signature: CallSignature, call: int) -> str:
        """Returns a description of a call of this rank."""
        if not self._number:
            return f"{signature.text}, of a model that was compiled"
        of_forward = f", of the forward in call {self._number}" if signature.is_backward else ""
        return f"{signature.text}, call {call}{of_forward}"
