"""Probes: headers that a rank sends instead of an unexpected message, or because a call raised an error."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import is_tracing

from .. import _errors
from .. import _ops as ops
from .._groups import FORKED, Communicator, spec_of
from .._names import kind_of, name_of
from .._ops.headers import headers_differ
from .._torch.autograd import is_capturing, unseen_by_selective_checkpointing
from ..communicators.c10d import TorchCommunicator
from . import faults
from .faults import describe, differ_text
from .history import History, history_in
from .signatures import RAISED, word_of

_TEXT_SIZE = 480  # size in bytes of a rank's description of its message


class Probe:
    """A message of the kind and size that all ranks expect, with only the header of this rank's message."""

    def __init__(self, history: History, identity: int, communicator: Communicator, device: torch.device) -> None:
        self._recent, self._communicator, expected = history.recent, communicator, history.expected()
        self._summed, numel, dtype = False, ops.HEADER_SIZE, torch.float32
        if expected is not None:
            self._summed, numel, dtype = expected.summed, expected.numel, expected.dtype
        fingerprint = hash((identity, history.number)) & history.exact_bits
        self._header = ops.header_sums_of(fingerprint) if self._summed else ops.header_of(identity, history.number)
        packed = torch.zeros(numel, dtype=dtype, device="cpu")
        packed[-len(self._header) :] = torch.tensor(self._header, dtype=dtype, device="cpu")
        self._packed = packed.to(device)

    def send(self) -> list[list[float]] | None:
        """Sends the probe and waits. Returns None if all ranks sent this header, else their headers (none for sums)."""
        collective = self._communicator.all_reduce if self._summed else self._communicator.all_gather
        return self._headers_in(collective(self._packed))

    def begin(self, communicator: TorchCommunicator, text: str | None) -> None:
        """Starts to send the probe, and ``text`` if it is given, without waiting for peers."""
        self._answer = communicator.begin(self._packed, self._summed)
        self._texts = None if text is None else communicator.begin(encode(text), False)

    def wait(self) -> list[str] | None:
        """Waits for peers. Returns None if all ranks raised at the same message, else each rank's description."""
        headers = self._headers_in(self._answer.wait())
        texts = None if self._texts is None else decode(self._texts.wait())
        if headers is None:
            return None
        return [describe(header, self._recent) for header in headers] if texts is None else texts

    def _headers_in(self, answer: Tensor) -> list[list[float]] | None:
        """Returns None if all ranks sent this header, else all ranks' headers (an empty list for sums)."""
        if self._summed:
            differ = headers_differ(answer[-ops.HEADER_SUMS_SIZE :], self._communicator.size)
            return [] if differ.tolist() else None
        headers: list[list[float]] = answer[:, -ops.HEADER_SIZE :].tolist()
        return None if all(header == self._header for header in headers) else headers


def report_error(process_group: Any, layer: Any, error: Exception) -> None:
    """Makes peers raise: sends a probe instead of this rank's next message, without waiting for the answers.

    This rank reads the answers before its next message. No-op before the first message and during tracing.
    """
    if is_tracing() or is_capturing():
        return
    # Must not raise, because that would replace the error.
    with suppress(Exception), torch.no_grad(), unseen_by_selective_checkpointing():
        communicator = spec_of(process_group).communicator_if_ready()
        module = layer if isinstance(layer, nn.Module) else None
        kind, name = (layer, layer) if isinstance(layer, str) else (kind_of(module), name_of(module))
        if not isinstance(communicator, TorchCommunicator):
            return
        history = history_in(communicator)
        device = history.device
        if device is None or history.failure is not None or word_of(kind) in history.compiled:
            return
        record, at_once = history.record_of(device.type), device.type in faults.CHECKED_AT_ONCE
        if record.kind.value and not at_once:  # peers may have stopped sending
            return
        what = f"{type(error).__name__} in {name}, message {history.messages + 1}"
        history.failure = what  # set first, because an interrupt may abort this function
        text = f"{what}: {str(error).removeprefix(f'{name}: ')}"
        if history.sending is not None:  # peers may expect this message or the next
            communicator.leave(f"rank {communicator.rank} has left the group: {text}")
            return
        probe = Probe(history, RAISED, communicator, device)
        probe.begin(communicator, text if at_once else None)
        history.pending = probe


_errors.notify_peers = report_error


def resume(history: History) -> None:
    """Clears a failure of the group if all ranks raised an error at the same message; raises RuntimeError otherwise."""
    if history.failure is None:
        return
    probe: Probe | None = history.pending
    failure, history.pending = history.failure, None
    if failure == FORKED:
        raise RuntimeError(f"sync_batch_norm: {FORKED}")
    if probe is None:
        raise RuntimeError(
            f"process_group: this group failed before, in the {failure}. End the job, or convert the model again on "
            "all ranks with a new group from torch.distributed.new_group()"
        )
    try:
        texts = probe.wait()
    except RuntimeError as error:
        raise RuntimeError(f"process_group: this group failed before, in the {failure}: {error}") from error
    if texts is not None:
        raise RuntimeError(differ_text(failure, enumerate(texts)))
    history.failure = None


def encode(text: str) -> Tensor:
    """Returns ``text`` as a float32 message of fixed size."""
    payload = text.encode("ascii", "replace").ljust(_TEXT_SIZE)
    if len(payload) > _TEXT_SIZE:  # keeps the end of the text, where descriptions are more likely to differ
        payload = payload[: _TEXT_SIZE // 2 - 5] + b" ... " + payload[-_TEXT_SIZE // 2 :]
    return torch.tensor(list(payload), dtype=torch.float32, device="cpu")


def decode(gathered: Tensor) -> list[str]:
    """Returns the text of each rank, from the gathered messages of :func:`encode`."""
    return [bytes(row).decode().rstrip() for row in gathered.to(torch.uint8).tolist()]
