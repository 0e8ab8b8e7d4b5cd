"""Logs long waits, and reports this rank's calls in each group. Adds no work to calls."""

from __future__ import annotations

import logging
import time
from threading import Lock, Thread
from weakref import finalize, ref

from ..communicators import TorchCommunicator
from ..groups import Communicator
from ..torch_internals.groups import timeout_of
from ..torch_internals.nccl import nccl_id, nccl_progress
from .history import CallHistory, histories

_log = logging.getLogger("bagua_syncbn")


def watch(history: CallHistory, communicator: Communicator) -> None:
    """Starts a thread that watches the group of ``communicator`` until it ends; no-op for groups without a timeout."""
    if isinstance(communicator, TorchCommunicator):
        living = Lock()  # held while the history lives; finalizers can always release a Lock, but not set an Event
        living.acquire()
        finalize(history, living.release)
        seconds, nccl = timeout_of(communicator.group).total_seconds(), nccl_id(communicator.group)
        arguments = ref(history), living, seconds, communicator.name, nccl
        Thread(target=_watch, args=arguments, name="bagua_syncbn watch", daemon=True).start()


def _watch(history_of: ref[CallHistory], living: Lock, seconds: float, group: str, nccl: str) -> None:
    """Logs calls in which this rank has waited for half of the timeout."""
    seen: object = None
    since = time.monotonic()
    has_logged = False
    while not living.acquire(timeout=seconds / 8):
        history = history_of()
        if history is None:
            return
        now, state = time.monotonic(), (history.calls, history.sending)
        if state != seen:
            seen, since, has_logged = state, now, False
        call = unfinished_call(history, nccl) if not has_logged and now - since >= seconds / 2 else ""
        if call and history.failure is None:
            has_logged = True
            _log.warning(
                "sync_batch_norm: rank %d of %d has waited for %.3g s, half of its group's timeout, in the %s. "
                "A peer died, raised an error, runs different code, or is late (group %s)",
                history.rank, history.size, now - since, call, group,
            )  # fmt: skip
        del history  # the group may end during the wait


def unfinished_call(history: CallHistory, nccl: str) -> str:
    """Returns the call that this rank, or else its device, is running; "" if there is none."""
    if history.sending is not None:
        return f"{history.sending.text}, call {history.calls + 1}"
    enqueued, completed = nccl_progress(nccl)
    pending = enqueued - completed
    # The numbers differ if compiled or user code sends collectives through the group.
    if not 0 < pending <= len(history.recent) or enqueued != history.calls + history.probes:
        return ""
    call, signature = history.recent[-pending]
    return f"{signature.text}, call {call}, which is on the device"


def groups_report() -> str:
    """Returns a report of this rank's calls in all groups of synchronized layers.

    It shows the number of calls so far (forward and backward separately), the last call, the unfinished call, the call
    that all ranks expect next, and the failed call. Compare the reports of two ranks to find the layer where they
    differ. On CUDA the host does not wait, so its calls are ahead of the device.

    Sends no messages and never blocks, so any thread may call it. Values may be inconsistent while a job runs, but not
    while it hangs. Compiled calls are not counted.

    Example::

        >>> print(bagua_syncbn.groups_report())
        rank 0 of 2: 8 calls
            last: backward of SyncBatchNorm1d 'a' of Model (8 channels, float32, eps=1e-05, momentum=0.1)
            begun: forward of SyncBatchNorm1d 'a' of Model (8 channels, float32, eps=1e-05, momentum=0.1)
            expected next: forward of SyncBatchNorm1d 'a' of Model (8 channels, float32, eps=1e-05, momentum=0.1)
    """
    return "\n".join(map(_report, histories())) or "no calls of synchronized layers over several ranks"


def _report(history: CallHistory) -> str:
    calls = {"last": history.last, "begun": history.sending, "expected next": history.expected()}
    facts = [f"{name}: {call.text}" for name, call in calls.items() if call is not None]
    failure = history.failure
    facts += [] if failure is None else [f"failed in: {failure}"]
    return "\n    ".join([f"rank {history.rank} of {history.size}: {history.calls} calls", *facts])
