"""Protocol between ranks that detects mismatched collectives before they are sent.

A rank sends only the message that peers expect, predicted from the group's ``history``, and otherwise a probe. Messages
carry headers that identify them (``signatures``). Ops that read a message record mismatched headers (``faults``).
The page ``README.md`` in this folder explains all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import _ops as ops
from .. import functional
from .._groups import DESTROYED, Communicator
from .._names import kind_of, name_of, origin_of
from .._ops import Received
from .._ops.headers import headers_differ, record_sums
from .._ops.options import Options
from .._step.call import Call
from .._step.exchange import Exchange, Pass
from .._torch.autograd import is_capturing, is_recorded, untraced
from .._torch.process_groups import group_named
from ..communicators import TorchCommunicator
from ..communicators import shared as shared_memory
from ..communicators.c10d import failed
from . import faults
from .faults import FaultRecord, describe, differ_text
from .history import History, history_in
from .probes import Probe, decode, encode, leave, resume
from .signatures import Signature, exact_bits, is_summed, shared_options, signature_of
from .watch import watch


class RankExchange(Exchange):
    """Messages of a layer's calls, with headers that the ops compare."""

    __slots__ = ("_history", "_record", "_signature", "summed")

    def __init__(self, signature: Signature, record: FaultRecord, communicator: Communicator, history: History) -> None:
        super().__init__(communicator)
        self._signature, self._record, self._history = signature, record, history
        self.summed = signature.summed

    def open(self) -> tuple[int, int, int]:
        signature, history = self._signature, self._history
        # 0 if peers may run compiled code, which does not count messages; otherwise history.number, inlined.
        number = 0 if signature.kind in history.compiled else history.messages % (ops.WORD - 1) + 1
        if self.summed:  # the ops add up a fingerprint instead of comparing headers
            return number, self.fingerprint(number, "forward"), 0
        return number, signature.caller if number else signature.compiled_caller, number

    def fingerprint(self, number: int, which: Pass = "backward") -> int:
        signature, history = getattr(self._signature, which), self._history
        header = (signature.caller, history.messages, number) if number else (signature.compiled_caller, 0)
        return hash(header) & history.exact_bits

    def check(self, number: int, rows: Tensor | None = None) -> None:
        if self._record.is_checked_at_once and self._record.kind.value:
            history, record = self._history, self._record
            signature = self._signature if rows is not None else self._signature.backward
            own = self._describe(signature, history.messages, number)
            if record.kind.value == 2:  # an invalid count, which all ranks have read
                history.failure = own
                record.raise_if_found()
            record.kind.value = 0
            headers = () if rows is None or self.summed else rows[:, -ops.HEADER_SIZE :].tolist()
            self._disagree(own, torch.device("cpu"), headers)
        self._history.sending = None

    def total(self, values: Tensor, number: int) -> Tensor:
        signature, record, history = self._signature.derivative, self._record, self._history
        total, differ = sum_with_header(
            lambda packed: self.send(packed, "derivative", number).message,
            values,
            self.fingerprint(number, "derivative"),
            self.communicator.size,
        )
        if record.is_checked_at_once:
            if differ.tolist():
                self._disagree(self._describe(signature, history.messages, number), total.device)
        else:
            record_sums(record.tensor, differ, history.messages if number else 0)
            total = total.where(~differ, torch.nan)
        history.sending = None
        return total

    def send(self, packed: Tensor, which: Pass = "forward", number: int = 0) -> Received:
        """Sends a message after making sure that all ranks send the same kind of message.

        ``history.sending`` stays set until :meth:`check` has compared the headers. If an exception comes before that,
        it is unknown which message peers expect next, so the group has failed.
        """
        history, record, communicator = self._history, self._record, self.communicator
        signature: Signature = getattr(self._signature, which)
        if history.failure is not None or record.kind.value:
            resume(history)
            record.raise_if_found()
        # Threads cannot switch between this read and write, because Python runs no call or jump in between.
        unfinished, history.sending = history.sending, signature
        try:
            if unfinished is not None:
                raise RuntimeError(
                    f"sync_batch_norm: the {unfinished.text} has not finished in this group: another thread is "
                    "sending it, or an exception interrupted it. This group can no longer be used; give each thread a "
                    "separate group from torch.distributed.new_group()"
                )
            if number and history.place.next is not signature:
                self._agree_on(signature, packed, number)
            message = communicator.all_reduce(packed) if signature.summed else communicator.all_gather(packed)
            if number:
                history.add(signature)
        except BaseException as error:
            failure = self._describe(signature, history.messages + 1, number)
            if history.failure == failure:  # all ranks have detected the mismatch
                raise
            if str(error) == DESTROYED:  # nothing was sent, and later messages raise the same error
                history.sending = None
            else:
                history.failure = failure
                leave(communicator, failure, error)
            if unfinished is not None or not isinstance(error, RuntimeError):
                raise
            raise failed(f"the {failure}", communicator, error) from error
        return Received(
            message, communicator.size if signature.summed else 1, record.tensor, history.messages if number else 0
        )

    def _agree_on(self, signature: Signature, packed: Tensor, number: int) -> None:
        """Sends a probe unless all ranks expect this message. Raises RuntimeError on all ranks if probes differ."""
        history, device, expected = self._history, packed.device, self._history.expected()
        is_expected = expected is not None and expected.caller == signature.caller
        if is_expected or is_capturing():
            return
        if history.device is None:  # the first message in the group
            watch(history, self.communicator)
        history.probes += 1
        headers = Probe(history, signature.caller, self.communicator, device).send()
        if headers is not None:
            self._disagree(self._describe(signature, history.messages + 1, number), device, headers)
        history.device = device

    def _disagree(self, own: str, device: torch.device, headers: Sequence[Sequence[float]] = ()) -> NoReturn:
        """Raises RuntimeError for ranks that made different calls; ``own`` describes this rank's message.

        On CPU, all ranks in eager code call this function and exchange descriptions. On devices, peers may not call it.
        """
        history, communicator = self._history, self.communicator
        history.failure = own
        texts = [describe(header, history.recent) for header in headers]
        if texts:
            texts[communicator.rank] = own
        all_call_this = all(header[-1] for header in headers) if headers else not history.compiled
        if device.type in faults.CHECKED_AT_ONCE and all_call_this:
            with suppress(RuntimeError):  # a peer died
                texts = decode(communicator.all_gather(encode(own)))
        raise RuntimeError(differ_text(own, enumerate(texts)))

    def _describe(self, signature: Signature, message: int, number: int) -> str:
        """Describes the group's message ``message``; ``number`` is that of its forward, 0 in compiled code."""
        if not number:
            return f"{signature.text}, of a model that was compiled"
        of_forward = f", of the forward with message {number}" if signature.is_backward else ""
        return f"{signature.text}, message {message}{of_forward}"


class CompiledExchange(Exchange):
    """Exchange in a recorded graph, as of torch.compile, with constant headers. If messages differ, results are NaN,
    or :func:`check_compiled` raises.

    There is no fault record: the graph would save this tensor for backward, but each forward may write to it, so two
    forwards before a backward would raise an error.
    """

    def __init__(self, call: Call, options: Options, communicator: Communicator) -> None:
        super().__init__(communicator)
        self.summed = is_summed(call.input, communicator)
        name, kind, shared = getattr(communicator, "name", None), kind_of(call.layer), shared_options(call, options)
        self._caller, self._fingerprint = note_compilation(name, communicator.size, kind, self.summed, *shared)

    def open(self) -> tuple[int, int, int]:
        return 0, self._caller, 0

    def fingerprint(self, number: int) -> int:
        return self._fingerprint

    def total(self, values: Tensor, number: int) -> Tensor:
        communicator = self.communicator
        total, differ = sum_with_header(communicator.all_reduce, values, self._fingerprint, communicator.size)
        return total.where(~differ, torch.nan)


def check_compiled(message: Tensor, communicator: shared_memory.SharedCommunicator, sums: bool) -> None:
    """Raises RuntimeError if the headers in a ``message`` of compiled code differ. All ranks read the same headers."""
    if sums:
        headers, parts = [], message[-ops.HEADER_SUMS_SIZE :].view(-1, 2).tolist()
        differ = any(communicator.size * square != total**2 for total, square in parts)
    else:
        headers = message[:, -ops.HEADER_SIZE :].tolist()
        differ = headers.count(headers[0]) < len(headers)
    if differ:
        history = history_in(communicator)
        compiled = [(0, signature) for signatures in history.compiled.values() for signature in signatures]
        texts = [describe(header, [*history.recent, *compiled]) for header in headers]
        history.failure = texts[communicator.rank] if texts else "sum over ranks, in compiled code"
        raise RuntimeError(differ_text(history.failure, enumerate(texts)))


shared_memory.check_headers = check_compiled


def sum_with_header(
    all_reduce: Callable[[Tensor], Tensor], values: Tensor, fingerprint: int, ranks: int
) -> tuple[Tensor, Tensor]:
    """Returns the sum over ranks of ``values`` (n), and whether the ranks had different fingerprints."""
    packed = torch.cat([values, values.new_tensor(ops.header_sums_of(fingerprint))])
    total, header_sums = all_reduce(packed).tensor_split([-ops.HEADER_SUMS_SIZE])
    return total, headers_differ(header_sums, ranks)


@untraced  # compiled checkpoints do not allow traced side effects
def note_compilation(group_name: str | None, ranks: int, kind: str, summed: bool, *shared: Any) -> tuple[int, int]:
    """Records that layers of this kind are compiled in a group. Returns the header and the backward's fingerprint."""
    signature = signature_of(kind, kind, shared, summed)
    if group_name is not None:
        history = history_in(TorchCommunicator(group_named(group_name)))
        history.compiled.setdefault(signature.kind, set()).add(signature)
    caller, backward = signature.compiled_caller, signature.backward.compiled_caller
    header = hash((caller, 0)) & exact_bits(ranks) if summed else caller
    return header, hash((backward, 0)) & exact_bits(ranks)


def compared_exchange(call: Call, options: Options, communicator: Communicator) -> Exchange:
    """Returns the exchange of ``call`` and of later calls with the same cache key."""
    if is_recorded():
        return CompiledExchange(call, options, communicator)
    history, layer, kind, name = history_in(communicator), call.layer, kind_of(call.layer), name_of(call.layer)
    origin = origin_of(layer)
    if origin is not None:
        name = history.numbered(f"{name} of {kind}", origin.model, kind)
    elif layer is not None:
        name = history.numbered(name, layer, kind)
    signature = signature_of(name, kind, shared_options(call, options), is_summed(call.input, communicator))
    return RankExchange(signature, history.record_of(call.input.device.type), communicator, history)


functional.make_exchange = compared_exchange
