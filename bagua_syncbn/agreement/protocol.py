"""The protocol between ranks: no two of them ever send messages of different kinds or sizes without knowing it.

A rank sends only what its peers expect, as predicted from the ``history`` of the group, and a probe in place of another
message. Each message says who sends it (``signatures``); the ops that read it note where ranks differ (``faults``). See
"On the wire" in ``docs/design.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from .. import ops
from ..groups import Communicator
from ..step.exchange import Exchange, Received
from .errors import codes_of, leave, resume, texts_in
from .faults import FaultRecord, differ_text, found_text, is_checked_at_once
from .history import CallHistory, Probe, can_probe, first_message_hooks
from .signatures import ALL_BITS, CallSignature, checksum, describe


class Agreement(NamedTuple):
    """Facts that the calls of a layer over several ranks share, as long as nothing but values changes."""

    signature: CallSignature
    record: FaultRecord | None
    communicator: Communicator
    history: CallHistory
    exact_bits: int  # bits of a fingerprint that stay exact in a sum over these ranks


class RankExchange(Exchange):
    """The messages of one call over several ranks, with what the ops need to compare the ranks by.

    A call's number is the sequence number of its forward in the group; 0 if peers may run compiled code, which counts
    no calls.
    """

    is_traced = False
    __slots__ = ("_exact_bits", "_history", "_number", "_record", "_signature", "header", "uses_sums")

    def __init__(self, agreement: Agreement) -> None:
        signature, record, self.communicator, history, self._exact_bits = agreement
        self._signature, self._record, self._history = signature, record, history
        if signature.kind in history.compiled:
            self._number, caller = 0, signature.compiled_caller
        else:
            self._number, caller = history.number, signature.caller
        self.uses_sums = signature.message[0]
        # As batch_norm_stats takes them.
        self.header = (checksum(caller, self._number, 0) & ALL_BITS, 0) if self.uses_sums else (caller, self._number)

    def gather(self, row: Tensor, counter: Tensor | None = None) -> Received:
        """Returns the rows of all ranks, in a large group their sum, and what the op needs to compare the ranks.

        As :meth:`sum` does. :meth:`check` goes after the op.

        Raises:
            RuntimeError: the ranks make different calls, or the collective failed.
        """
        if counter is not None and self._number:  # must be equal on all ranks too; compared on the device
            ops.count_in(counter, row, self.uses_sums)
        if self.uses_sums:
            return self.sum(row, self._signature)
        rows, record = self._send(self.communicator.all_gather, row, self._signature), self._record
        return Received(rows, 1, None if record is None else record.tensor)

    def fingerprint(self, signature: CallSignature | None = None) -> int:
        """Returns the fingerprint that goes with the sums of the backward pass, or of another call that follows."""
        signature = signature or self._signature.backward
        if not self._number:
            return checksum(signature.compiled_caller, 0, 0) & self._exact_bits
        return checksum(signature.caller, self._history.number, self._number) & self._exact_bits

    def sum(self, sums: Tensor, signature: CallSignature | None = None) -> Received:
        """Returns the sums of all ranks, and of their words, and what an op needs to check these.

        Number of ranks, record of faults, and what to note there. :meth:`check` goes after the op.
        """
        signature, record, size = signature or self._signature.backward, self._record, self.communicator.size
        sums = self._send(self.communicator.all_reduce, sums, signature)
        if record is None:
            return Received(sums, size)
        # On CPU the record is read right after the op, and needs no number.
        number = 0 if record.is_on_cpu else record.number_of_sums(signature, self._history.calls)
        return Received(sums, size, record.tensor, number)

    def check(self, rows: Tensor | None = None, counter: Tensor | None = None) -> None:
        """Raises RuntimeError if an op on CPU has found that the ranks differ, in ``rows`` or else in sums."""
        record = self._record
        if record is not None and record.is_on_cpu and record.kind.value:
            self._raise_found(record.take(), rows, counter)
        self._history.sending = None

    def total(self, values: Tensor) -> Tensor:
        """Returns the sum over ranks of ``values`` (n): for derivatives of any order."""
        signature = self._signature.derivative
        words = ops.parts_of(self.fingerprint(signature))
        packed = torch.cat([values, values.new_tensor(words)])
        total = self._send(self.communicator.all_reduce, packed, signature)
        total, said = total.tensor_split([-ops.PARTS])
        expected = [self.communicator.size * word for word in words]
        if packed.device.type != "cpu" or type(packed) is not Tensor:
            total = total.where((said == packed.new_tensor(expected)).all(), torch.nan)
        elif said.tolist() != expected:
            self._disagree(self._say(signature, self._history.calls), packed.device)
        self._history.sending = None
        return total

    def _send(self, collective: Callable[[Tensor], Tensor], packed: Tensor, signature: CallSignature) -> Tensor:
        """Returns what ``collective`` makes of the message ``packed``, once all ranks are known to have the same.

        The call counts as unfinished from before its first collective until the ranks are known to agree. If an
        exception ends it in between, nobody knows which message the other ranks expect, so the group has failed.
        """
        history, record, number = self._history, self._record, self._number
        if history.failure is not None:
            resume(history)
        if record is not None and record.kind.value:
            record.raise_if_found()
        # Read and written without a call or a jump in between, where another thread could run.
        unfinished, history.sending = history.sending, signature
        if unfinished is not None:
            others = f"got one while the {unfinished.text} is not finished: another thread is in it, or an exception"
            self._fail(signature, RuntimeError(f"expected one call at a time in a group, {others} ended it"))
        try:
            if number and (history.next is None or history.next[0] is not signature):
                self._agree_on(signature, packed)
            result = collective(packed)
            if number:
                history.add(signature)
        except BaseException as error:
            if history.failure == self._say(signature, history.calls + 1):  # all ranks know that they differ
                raise
            self._fail(signature, error)
        return result

    def _agree_on(self, signature: CallSignature, packed: Tensor) -> None:
        """Sees to it that all ranks have the message ``packed``, where it is not known to be what they expect.

        On CPU that is a message of the same kind and size. Elsewhere ranks whose calls differ would go on, and expect
        different messages next, so it is the same call.
        """
        history, device = self._history, packed.device
        expected = history.expected()
        is_expected = expected is not None and expected.message == signature.message
        if expected is not None and is_expected and expected.key != signature.key:
            is_expected = is_checked_at_once(self._record, device)
        if is_expected or type(packed) is not Tensor or not can_probe(device):
            return
        if history.device is None:  # the first message in the group
            for see in first_message_hooks:
                see(history, self.communicator)
        history.probes += 1
        probe = Probe(expected, signature.caller, history.number, self.communicator, device)
        answer = probe.collective(probe.packed)
        if not probe.is_unanimous(answer):
            self._disagree(self._say(signature, history.calls + 1), device, probe.headers_in(answer))
        history.device = device

    def _fail(self, signature: CallSignature, error: BaseException) -> NoReturn:
        """Raises for a call that ``error`` ended before this rank knew what the others expect next."""
        history, communicator = self._history, self.communicator
        history.failure = self._say(signature, history.calls + 1)
        leave(communicator, history.failure, error)
        if not isinstance(error, RuntimeError):
            raise error
        raise RuntimeError(
            f"sync_batch_norm: collective failed in the {history.failure}, on rank {communicator.rank} of "
            f"{communicator.size}: {type(error).__name__}: {error}. Another rank has ended, raised an error, is in "
            "other code until the time-out, or was late; the group can no longer be used"
        ) from error

    def _raise_found(self, record: list[int], rows: Tensor | None, counter: Tensor | None) -> NoReturn:
        """Raises for what an op on CPU has found."""
        signature = self._signature if rows is not None else self._signature.backward
        own = self._say(signature, self._history.calls)
        if record[0] == 2:
            self._history.failure = own
            raise RuntimeError(found_text(record))
        also = "" if counter is None else f", num_batches_tracked={counter.item():.0f}"
        are_rows = rows is not None and not signature.message[0]
        headers = rows[:, -ops.WORDS :].tolist() if rows is not None and are_rows else ()
        self._disagree(own + also, torch.device("cpu"), headers)

    def _disagree(self, own: str, device: torch.device, headers: Sequence[Sequence[float]] = ()) -> NoReturn:
        """Raises for ranks that make different calls. This one is in ``own``.

        On CPU all ranks know and come here, but for those in compiled code; elsewhere some may not.
        """
        self._history.failure = own
        all_come = all(header[-1] for header in headers) if headers else not self._history.compiled
        said, other = [], "another call"
        if is_checked_at_once(self._record, device) and all_come:
            try:
                said = texts_in(self.communicator.all_gather(codes_of(own)))
            except BaseException as error:
                leave(self.communicator, own, error)
                if not isinstance(error, RuntimeError):
                    raise
                other = f"no text, since {error}"
        elif headers:
            said = [describe(header) for header in headers]
            said[self.communicator.rank] = own
        raise RuntimeError(differ_text(own, enumerate(said), other))

    def _say(self, signature: CallSignature, call: int) -> str:
        """Returns what this rank does in a call, for people."""
        if not self._number:
            return f"{signature.text}, of a model that was compiled"
        of_forward = f", of the forward in call {self._number}" if signature.is_backward else ""
        return f"{signature.text}, call {call}{of_forward}"
