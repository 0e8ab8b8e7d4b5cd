"""Errors of one rank: it tells its peers, in place of the message that they expect, and goes on if all have raised."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from ..communicators.c10d import AsyncCollective, TorchCommunicator
from ..groups import FORKED, Communicator, spec_of
from ..names import kind_of, name_of
from ..torch_internals.autograd import NO_ERRORS, unseen_by_selective_checkpointing
from .faults import differ_text, is_checked_at_once, record_of
from .history import CallHistory, Probe, can_probe, history_in
from .signatures import RAISED, describe, word_of

_TEXT = 480  # bytes in which a rank says what it does


class PendingError(NamedTuple):
    """A probe that this rank has sent in place of a call in which it raised an error."""

    probe: Probe
    answer: AsyncCollective
    texts: AsyncCollective | None  # on CPU, where all ranks send them as soon as they differ


def notify_peers(process_group: Any, layer: Any, error: Exception) -> None:
    """Tells the ranks of ``process_group`` that this one raises ``error``, in place of the message that they expect.

    Does not block. The next call continues if every rank raised, and raises otherwise. No-op before the first message
    and while tracing.
    """
    if torch.compiler.is_compiling() or is_tracing() or isinstance(error, NO_ERRORS):
        return
    # Nothing may take the place of the error.
    with suppress(Exception), torch.no_grad(), unseen_by_selective_checkpointing():
        communicator = spec_of(process_group).communicator_if_ready()
        if isinstance(communicator, TorchCommunicator):
            history = history_in(communicator)
            if isinstance(layer, str):  # a function that belongs to no layer
                _tell(communicator, history, layer, error)
                return
            layer = layer if isinstance(layer, nn.Module) else None
            if word_of(kind_of(layer)) not in history.compiled:
                _tell(communicator, history, name_of(layer), error)


def _tell(communicator: TorchCommunicator, history: CallHistory, name: str, error: BaseException) -> None:
    device = history.device
    if device is None or history.failure is not None or not can_probe(device):
        return
    record = record_of(history.name, device.type)
    at_once = is_checked_at_once(record, device)
    if record is not None and record.kind.value and not at_once:  # other ranks may send nothing any more
        return
    what = f"{type(error).__name__} in {name}, call {history.calls + 1}"
    history.failure = what  # first, because an interrupt may end what follows
    if history.sending is not None:  # so that it is not known what the others expect
        leave(communicator, what, error)
        return
    try:
        probe = Probe(history.expected(), RAISED, history.number, communicator, device)
        answer = probe.begin(communicator)
        said = f"{what}: {str(error).removeprefix(f'{name}: ')}"
        texts = communicator.begin_all_gather(codes_of(said)) if at_once else None
        history.pending = PendingError(probe, answer, texts)
    except BaseException as interrupt:
        leave(communicator, what, interrupt)
        raise


def leave(communicator: Communicator, what: str, error: BaseException) -> None:
    """Tells the ranks that wait for this one, now or later, that ``error`` ended its call and it sends no more."""
    if isinstance(communicator, TorchCommunicator):
        communicator.leave(f"rank {communicator.rank} has left the group: {type(error).__name__} in the {what}")


def resume(history: CallHistory) -> None:
    """Raises, unless this rank has raised an error in its last call and all others have done so too."""
    pending: PendingError | None = history.pending
    history.pending = None
    if history.failure == FORKED:
        raise RuntimeError(f"sync_batch_norm: {FORKED}")
    if pending is None:
        raise RuntimeError(
            f"process_group: expected one that works, got one that failed before, in the {history.failure}; "
            "its ranks do not agree on what comes next any more: end the job, or convert the model again on all ranks, "
            "with a group that torch.distributed.new_group() has made since"
        )
    try:
        answer = pending.answer.wait()
        if pending.texts is not None:
            said = texts_in(pending.texts.wait())
        else:
            said = [describe(header) for header in pending.probe.headers_in(answer)]
    except RuntimeError as error:
        raise RuntimeError(
            f"process_group: expected one that works, got one that failed before, in the {history.failure}; {error}"
        ) from error
    if not pending.probe.is_unanimous(answer):
        raise RuntimeError(differ_text(history.failure or "", enumerate(said)))
    history.failure = None


def codes_of(text: str) -> Tensor:
    """Returns ``text`` as a message."""
    said = text.encode("ascii", "replace").ljust(_TEXT)
    if len(said) > _TEXT:  # the end of a long text tells calls apart too
        said = said[: _TEXT // 2 - 5] + b" ... " + said[-_TEXT // 2 :]
    return torch.tensor(list(said), dtype=torch.float32, device="cpu")


def texts_in(gathered: Tensor) -> list[str]:
    """Returns the texts in the messages of all ranks."""
    codes = gathered.to(torch.uint8)
    said = ctypes.string_at(codes.data_ptr(), codes.numel()).decode()
    return [said[start : start + _TEXT].rstrip() for start in range(0, len(said), _TEXT)]
