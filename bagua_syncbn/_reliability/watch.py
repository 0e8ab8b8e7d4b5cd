"""Logs long waits. Adds no work to messages."""

from __future__ import annotations

import logging
import time
from threading import Lock, Thread
from weakref import ref

from .._groups import CAUSES, Communicator
from .._torch.process_groups import nccl_id, nccl_progress, timeout_of
from ..communicators import TorchCommunicator
from .history import History

_log = logging.getLogger("bagua_syncbn")


def watch(history: History, communicator: Communicator) -> None:
    """Starts a thread that watches the group of ``communicator`` until it ends; no-op for groups without a timeout."""
    if isinstance(communicator, TorchCommunicator):
        seconds, nccl = timeout_of(communicator.group).total_seconds(), nccl_id(communicator.group)
        place = f"rank {communicator.rank} of {communicator.size}"
        ended = Lock()
        ended.acquire()
        arguments = ref(history, lambda _: ended.release()), ended, seconds, place, communicator.name, nccl
        Thread(target=_watch, args=arguments, name="bagua_syncbn watch", daemon=True).start()


def _watch(history_of: ref[History], ended: Lock, seconds: float, place: str, group: str, nccl: str) -> None:
    """Logs messages for which this rank has waited for half of the timeout, until ``ended`` is released."""
    seen: object = None
    since = time.monotonic()
    has_logged = False
    while (history := history_of()) is not None:
        now, state = time.monotonic(), (history.messages, history.sending)
        if state != seen:
            seen, since, has_logged = state, now, False
        message = unfinished_message(history, nccl) if not has_logged and now - since >= seconds / 2 else ""
        if message and history.failure is None:
            has_logged = True
            _log.warning(
                "sync_batch_norm: %s has waited for %.3g s, half of its group's timeout, in the %s. %s (group %s)",
                place, now - since, message, CAUSES, group,
            )  # fmt: skip
        del history  # the group may end during the wait
        ended.acquire(timeout=seconds / 8)


def unfinished_message(history: History, nccl: str) -> str:
    """Returns a description of the unfinished message of this rank, or else of its device; "" if there is none."""
    if history.sending is not None:
        return f"{history.sending.text}, message {history.messages + 1}"
    enqueued, completed = nccl_progress(nccl)
    pending = enqueued - completed
    # The numbers differ if compiled or user code sends collectives through the group.
    if not 0 < pending <= len(history.recent) or enqueued != history.messages + history.probes:
        return ""
    number, signature = history.recent[-pending]
    return f"{signature.text}, message {number}, which is on the device"
