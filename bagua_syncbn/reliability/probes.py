"""Probes: headers that a rank sends instead of an unexpected message, or instead of a call that raised an error."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from .. import ops
from ..communicators.c10d import TorchCommunicator
from ..errors import error_handlers
from ..groups import FORKED, Communicator, spec_of
from ..names import kind_of, name_of
from ..torch_internals.autograd import NO_ERRORS, is_capturing, unseen_by_selective_checkpointing
from .faults import differ_text, is_checked_at_once, record_of
from .history import CallHistory, history_in
from .signatures import RAISED, checksum, describe, word_of

_TEXT_SIZE = 480  # bytes in which a rank describes its call


def can_probe(device: torch.device) -> bool:
    return not (device.type == "cuda" and is_capturing())


class Probe:
    """A message of the kind and size that all ranks expect, which holds only the header of this rank's call."""

    def __init__(self, history: CallHistory, caller: int, communicator: Communicator, device: torch.device) -> None:
        expected, self._size = history.expected(), communicator.size
        self._is_sum, numel, dtype = (False, ops.HEADER_SIZE, torch.float32) if expected is None else expected.message
        fingerprint = checksum(caller, history.number, 0) & history.exact_bits
        self._header = ops.header_sums_of(fingerprint) if self._is_sum else ops.header_of(caller, history.number)
        packed = torch.zeros(numel, dtype=dtype, device="cpu")
        packed[-len(self._header) :] = torch.tensor(self._header, dtype=dtype, device="cpu")
        self._packed, self._communicator = packed.to(device), communicator

    def send(self) -> list[list[float]] | None:
        """Sends the probe, and returns what :meth:`headers_in` does."""
        collective = self._communicator.all_reduce if self._is_sum else self._communicator.all_gather
        return self.headers_in(collective(self._packed))

    def begin(self, communicator: TorchCommunicator, text: str | None) -> None:
        """Sends the probe, and a ``text`` if there is one, without waiting for the other ranks."""
        begin = communicator.begin_all_reduce if self._is_sum else communicator.begin_all_gather
        self._answer = begin(self._packed)
        self._texts = None if text is None else communicator.begin_all_gather(encode(text))

    def wait(self) -> list[str] | None:
        """Waits for the other ranks. Returns None if all raised an error in the same call; else their descriptions."""
        headers = self.headers_in(self._answer.wait())
        if self._texts is not None:
            texts = decode(self._texts.wait())
            return None if headers is None else texts
        return None if headers is None else [describe(header) for header in headers]

    def headers_in(self, answer: Tensor) -> list[list[float]] | None:
        """Returns None if all ranks sent the same header; else the header of each, or an empty list for a sum."""
        if self._is_sum:
            expected = [self._size * value for value in self._header]
            return None if answer[-ops.HEADER_SUMS_SIZE :].tolist() == expected else []
        headers: list[list[float]] = answer[:, -ops.HEADER_SIZE :].tolist()
        return None if all(header == self._header for header in headers) else headers


@error_handlers.register
def report_error(process_group: Any, layer: Any, error: Exception) -> None:
    """Makes the other ranks raise, by a probe that takes the place of this rank's next message.

    Does not block. The next call continues if every rank raised, and raises otherwise. No-op before the first message
    and while tracing.
    """
    if torch.compiler.is_compiling() or is_tracing() or isinstance(error, NO_ERRORS):
        return
    # Nothing may replace the error.
    with suppress(Exception), torch.no_grad(), unseen_by_selective_checkpointing():
        communicator = spec_of(process_group).communicator_if_ready()
        if isinstance(communicator, TorchCommunicator):
            if isinstance(layer, str):  # the name of a function
                kind = name = layer
            else:
                module = layer if isinstance(layer, nn.Module) else None
                kind, name = kind_of(module), name_of(module)
            _notify(communicator, kind, name, error)


def _notify(communicator: TorchCommunicator, kind: str, name: str, error: Exception) -> None:
    history = history_in(communicator)
    device = history.device
    if device is None or history.failure is not None or word_of(kind) in history.compiled or not can_probe(device):
        return
    record = record_of(history.name, device.type)
    at_once = is_checked_at_once(record, device)
    if record is not None and record.kind.value and not at_once:  # other ranks may send nothing any more
        return
    what = f"{type(error).__name__} in {name}, call {history.calls + 1}"
    history.failure = what  # first, because an interrupt may end what follows
    if history.sending is not None:  # the other ranks may expect this message or the next one
        leave(communicator, what, error)
        return
    try:
        probe = Probe(history, RAISED, communicator, device)
        probe.begin(communicator, f"{what}: {str(error).removeprefix(f'{name}: ')}" if at_once else None)
        history.pending = probe
    except BaseException as interrupt:
        leave(communicator, what, interrupt)
        raise


def leave(communicator: Communicator, what: str, error: BaseException) -> None:
    """Makes ranks that wait for this one, now or later, raise: ``error`` ended its call, and it sends no more."""
    if isinstance(communicator, TorchCommunicator):
        communicator.leave(f"rank {communicator.rank} has left the group: {type(error).__name__} in the {what}")


def resume(history: CallHistory) -> None:
    """Clears the failure of the group if all ranks raised an error in the same call. Raises RuntimeError otherwise."""
    probe: Probe | None = history.pending
    failure, history.pending = history.failure or "", None
    if failure == FORKED:
        raise RuntimeError(f"sync_batch_norm: {FORKED}")
    if probe is None:
        raise RuntimeError(
            f"process_group: this group failed before, in the {failure}, and its ranks no longer agree on the next "
            "call; end the job, or convert the model again on all ranks with a new group from "
            "torch.distributed.new_group()"
        )
    try:
        texts = probe.wait()
    except RuntimeError as error:
        raise RuntimeError(f"process_group: this group failed before, in the {failure}: {error}") from error
    if texts is not None:
        raise RuntimeError(differ_text(failure, enumerate(texts)))
    history.failure = None


def encode(text: str) -> Tensor:
    """Returns ``text`` as a message."""
    said = text.encode("ascii", "replace").ljust(_TEXT_SIZE)
    if len(said) > _TEXT_SIZE:  # keeps the end, which may be the only difference between two texts
        said = said[: _TEXT_SIZE // 2 - 5] + b" ... " + said[-_TEXT_SIZE // 2 :]
    return torch.tensor(list(said), dtype=torch.float32, device="cpu")


def decode(gathered: Tensor) -> list[str]:
    """Returns the texts of all ranks."""
    codes = gathered.to(torch.uint8)
    said = ctypes.string_at(codes.data_ptr(), codes.numel()).decode()
    return [said[start : start + _TEXT_SIZE].rstrip() for start in range(0, len(said), _TEXT_SIZE)]
