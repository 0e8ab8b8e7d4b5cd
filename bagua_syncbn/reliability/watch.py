"""Watches the groups: logs a rank that waits too long, and reports what this rank does in each group.

One thread looks at the histories of all groups. Calls do nothing for it.
"""

from __future__ import annotations

import logging
import threading
import time
from weakref import ref

from ..communicators import TorchCommunicator
from ..torch_internals.groups import timeout_of
from ..torch_internals.nccl import nccl_id, nccl_progress
from .history import CallHistory, first_message_hooks, histories

_log = logging.getLogger("bagua_syncbn")

_LOOKS = 8  # in a time-out
_LONGEST_PAUSE = 60.0


class _Watch:
    """State of the watch over one group."""

    def __init__(self, history: CallHistory, communicator: TorchCommunicator) -> None:
        self.history, self.name = ref(history), communicator.name
        self.seconds = timeout_of(communicator.group).total_seconds()
        self.nccl = nccl_id(communicator.group)
        self.seen: tuple[int, object] | None = None
        self.since = 0.0  # when the history was first seen as it is
        self.has_logged = False

    def look(self, history: CallHistory) -> None:
        """Logs the call in which this rank waits, once, if it has waited for half of the time-out."""
        now, state = time.monotonic(), (history.calls, history.sending)
        if state != self.seen:
            self.seen, self.since, self.has_logged = state, now, False
        if self.has_logged or history.failure is not None or now - self.since < self.seconds / 2:
            return
        call = self._unfinished(history)
        if call:
            self.has_logged = True
            _log.warning(
                "sync_batch_norm: rank %d of %d has waited for %.3g s, half of its group's time-out, in the %s. "
                "Another rank has ended, raised an error, is in other code, or is late (group %s)",
                history.rank, history.size, now - self.since, call, self.name,
            )  # fmt: skip

    def _unfinished(self, history: CallHistory) -> str:
        """Returns the call that this rank is in, or else the one that its device is in; "" without one."""
        if history.sending is not None:
            return f"{history.sending.text}, call {history.calls + 1}"
        enqueued, completed = nccl_progress(self.nccl)
        pending = enqueued - completed
        # Other collectives in the group, as from compiled code, make the numbers differ.
        if not 0 < pending <= len(history.recent) or enqueued != history.calls + history.probes:
            return ""
        call, signature = history.recent[-pending]
        return f"{signature.text}, call {call}, which is on the device"


_watches: list[_Watch] = []
_changed = threading.Event()
_thread: threading.Thread | None = None


@first_message_hooks.register
def watch(history: CallHistory, communicator: object) -> None:
    """Begins to watch the group of ``communicator``."""
    global _thread
    if not isinstance(communicator, TorchCommunicator):
        return  # has no time-out
    _watches.append(_Watch(history, communicator))
    _changed.set()
    if _thread is None or not _thread.is_alive():  # none yet, or none in a forked child
        _thread = threading.Thread(target=_look_on, name="bagua_syncbn watch", daemon=True)
        _thread.start()


def _look_on() -> None:
    while True:
        pause = _LONGEST_PAUSE
        for watched in _watches[:]:
            history = watched.history()
            if history is None:
                _watches.remove(watched)
            else:
                watched.look(history)
                pause = min(pause, watched.seconds / _LOOKS)
        history = None  # does not keep it alive during the pause
        _changed.wait(pause)
        _changed.clear()


def groups_report() -> str:
    """Returns a text that shows what this rank does in each group of synchronized layers.

    For each group: the number of calls so far, counting forward and backward passes separately; the last call; the
    current call, if one is unfinished; the call that all ranks expect next; and the call that failed. Compare the texts
    of two ranks to see in which layer one waits and where the other is. On CUDA the host does not wait, so its calls
    are ahead of the device.

    Sends no messages and never blocks, so it may be called in any thread. While a job runs, the facts are read one
    after another; in a job that hangs they are consistent. Compiled calls are not counted.

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
