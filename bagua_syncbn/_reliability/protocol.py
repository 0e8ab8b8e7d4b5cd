"""Protocol between ranks that detects mismatched collectives before they are sent.

A rank sends only the message that peers expect, predicted from the group's ``history``, and otherwise a probe. Messages
carry headers that identify them (``signatures``). Ops that read a message record mismatched headers (``faults``).
The page ``README.md`` in this folder explains all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

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
from .probes import Probe, decode, encode, resume
from .signatures import Signature, exact_bits, is_summed, shared_options, signature_of
from .watch import watch

_Result = TypeVar("_Result")


class RankExchange(Exchange):
    """Messages of a layer's calls, with headers that the ops compare."""

    __slots__ = ("_history", "_record", "_signature", "summed")

    def __init__(self, signature: Signature, record: FaultRecord, communicator: Communicator, history: History) -> None:
        super().__init__(communicator)
        self._signature, self._record, self._history = signature, record, history
        self.summed = signature.summed

    def open(self) -> tuple[int, int]:
        signature, history = self._signature, self._history
        # 0 if peers may run compiled code, which does not count messages; otherwise history.number, inlined.
        number = 0 if signature.kind in history.compiled else history.messages % (ops.WORD - 1) + 1
        if self.summed:  # the ops add up a fingerprint instead of comparing headers
            return self.fingerprint(number, "forward"), number
        return signature.identity if number else signature.compiled_identity, number

    def fingerprint(self, number: int, which: Pass = "backward") -> int:
        signature, history = getattr(self._signature, which), self._history
        header = (signature.identity, history.messages, number) if number else (signature.compiled_identity, 0)
        return hash(header) & history.exact_bits

    def share(self, packed: Tensor, which: Pass, number: int, read: Callable[..., _Result], *args: Any) -> _Result:
        """Sends a message after making sure that all ranks send the same kind of message.

        ``history.sending`` is set from the message until ``read`` has compared the headers. After an exception in
        between, no rank knows which message its peers expect next: the group has failed.
        """
        history, record, communicator = self._history, self._record, self.communicator
        signature: Signature = getattr(self._signature, which)
        # Threads cannot switch between this question and the assignment: Python runs no call or loop in between.
        if (
            history.sending is not None
            or history.failure is not None
            or record.kind.value
            or (history.place.predicted is not signature and number)
        ):
            self._begin(signature, packed, number)
        history.sending = signature
        try:
            message = communicator.all_reduce(packed) if signature.summed else communicator.all_gather(packed)
            if number:
                history.place = history.place.places[signature.identity]
                history.messages += 1
                history.recent.append((history.messages, signature))
        except BaseException as error:
            self._fail(signature, number, error)
            raise
        ranks = communicator.size if signature.summed else 1
        result = read(Received(message, ranks, record.tensor, history.messages if number else 0), *args)
        if record.kind.value and record.is_checked_at_once:
            self._raise_fault(signature, number, message)
        history.sending = None
        return result

    def _begin(self, signature: Signature, packed: Tensor, number: int) -> None:
        """Begins a message that ranks may not expect. Raises RuntimeError if it must not be sent."""
        history = self._history
        if history.failure is not None or self._record.kind.value:
            resume(history)
            self._record.raise_if_found()
        unfinished, history.sending = history.sending, signature
        if unfinished is not None:
            error = RuntimeError(
                f"sync_batch_norm: the {unfinished.text} has not finished in this group: another thread is sending it, "
                "or an exception interrupted it. This group can no longer be used; give each thread a separate group "
                "from torch.distributed.new_group()"
            )
            self._end_group(self._describe(signature, history.messages + 1, number), error)
            raise error
        try:
            if number and history.place.predicted is not signature:
                self._agree_on(signature, packed, number)
                history.learn(signature)
        except BaseException as error:
            self._fail(signature, number, error)
            raise

    def total(self, values: Tensor, number: int) -> Tensor:
        packed = with_header(values, self.fingerprint(number, "derivative"))
        return self.share(packed, "derivative", number, total_in)

    def _fail(self, signature: Signature, number: int, error: BaseException) -> None:
        """Ends the group, because ``error`` ended this message. Raises RuntimeErrors again, with the message's name."""
        history = self._history
        failure = self._describe(signature, history.messages + 1, number)
        if history.failure == failure:  # all ranks have detected the mismatch
            return
        if str(error) == DESTROYED:  # nothing was sent, and later messages raise the same error
            history.sending = None
        else:
            self._end_group(failure, error)
        if isinstance(error, RuntimeError):
            raise failed(f"the {failure}", self.communicator, error) from error

    def _end_group(self, failure: str, error: BaseException) -> None:
        self._history.failure = failure
        if isinstance(self.communicator, TorchCommunicator):  # waiting ranks raise
            why = f"{type(error).__name__} in the {failure}"
            self.communicator.leave(f"rank {self.communicator.rank} has left the group: {why}")

    def _raise_fault(self, signature: Signature, number: int, message: Tensor) -> NoReturn:
        """Raises RuntimeError for the fault that an op has recorded in reading ``message``."""
        history, record = self._history, self._record
        own = self._describe(signature, history.messages, number)
        if record.kind.value == 2:  # an invalid count, which all ranks have read
            history.failure = own
            record.raise_if_found()
        record.kind.value = 0
        headers = () if signature.summed else message[:, -ops.HEADER_SIZE :].tolist()
        self._disagree(own, message.device, headers)

    def _agree_on(self, signature: Signature, packed: Tensor, number: int) -> None:
        """Sends a probe unless all ranks expect this message. Raises RuntimeError on all ranks if probes differ."""
        history, device, expected = self._history, packed.device, self._history.expected()
        is_expected = expected is not None and expected.identity == signature.identity
        if is_expected or is_capturing():
            return
        if history.device is None:  # the first message in the group
            watch(history, self.communicator)
        history.probes += 1
        headers = Probe(history, signature.identity, self.communicator, device).send()
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
        self._identity, self._fingerprint = note_compilation(name, communicator.size, kind, self.summed, *shared)

    def open(self) -> tuple[int, int]:
        return self._identity, 0

    def fingerprint(self, number: int) -> int:
        return self._fingerprint

    def total(self, values: Tensor, number: int) -> Tensor:
        return self.share(with_header(values, self._fingerprint), "derivative", number, total_in)


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


def with_header(values: Tensor, fingerprint: int) -> Tensor:
    """Returns a message of ``values`` (n) that ranks sum."""
    return torch.cat([values, values.new_tensor(ops.header_sums_of(fingerprint))])


def total_in(received: Received) -> Tensor:
    """Returns the sum of values in a sum of messages :func:`with_header`; NaN if ranks have different fingerprints."""
    total, header_sums = received.message.tensor_split([-ops.HEADER_SUMS_SIZE])
    differ = headers_differ(header_sums, received.summed_over)
    record_sums(received.fault, differ, received.number)
    return total.where(~differ, torch.nan)


@untraced  # compiled checkpoints do not allow traced side effects
def note_compilation(group_name: str | None, ranks: int, kind: str, summed: bool, *shared: Any) -> tuple[int, int]:
    """Records that layers of this kind are compiled in a group. Returns the header and the backward's fingerprint."""
    signature = signature_of(kind, kind, shared, summed)
    if group_name is not None:
        history = history_in(TorchCommunicator(group_named(group_name)))
        history.compiled.setdefault(signature.kind, set()).add(signature)
    identity, backward = signature.compiled_identity, signature.backward.compiled_identity
    header = hash((identity, 0)) & exact_bits(ranks) if summed else identity
    return header, hash((backward, 0)) & exact_bits(ranks)


def compared_exchange(call: Call, options: Options, communicator: Communicator) -> Exchange:
    """Returns the exchange of ``call`` and of later calls with the same step."""
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
