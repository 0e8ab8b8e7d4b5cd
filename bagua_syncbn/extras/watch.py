"""Watch over groups: a rank that waits in one for half of the group's time-out says in its log what it waits in.

One thread of the process looks at the histories of its groups. Calls do nothing for it.
"""

from __future__ import annotations

import logging
import threading
import time
from weakref import ref

from ..agreement.history import CallHistory, first_message_hooks
from ..communicators import TorchCommunicator
from ..torch_internals.groups import timeout_of
from ..torch_internals.nccl import nccl_id, nccl_progress

_log = logging.getLogger("bagua_syncbn")

_LOOKS = 8  # in a time-out
_LONGEST_PAUSE = 60.0


class _Watch:
    """State of the watch over one group."""

    def __init__(self, communicator: TorchCommunicator) -> None:
        group = communicator.group
        self.rank, self.size, self.name = communicator.rank, communicator.size, communicator.name
        self.seconds = timeout_of(group).total_seconds()
        self.nccl = nccl_id(group)
        self.seen: tuple[int, object] | None = None
        self.since = 0.0  # when the history was first seen as it is
        self.has_told = False

    def look(self, history: CallHistory) -> None:
        """Logs what this rank waits in, once, if it has waited there for half of the time-out."""
        now, state = time.monotonic(), (history.calls, history.sending)
        if state != self.seen:
            self.seen, self.since, self.has_told = state, now, False
        if self.has_told or history.failure is not None or now - self.since < self.seconds / 2:
            return
        what = self._unfinished(history)
        if what:
            self.has_told = True
            _log.warning(
                "sync_batch_norm: rank %d of %d has waited for %.3g s, half of its group's time-out, in the %s. "
                "Another rank has ended, raised an error, is in other code, or is late (group %s)",
                self.rank, self.size, now - self.since, what, self.name,
            )  # fmt: skip

    def _unfinished(self, history: CallHistory) -> str:
        """Returns the call that this rank is in, or else that its device is in; "" where it is in none."""
        if history.sending is not None:
            return f"{history.sending.text}, call {history.calls + 1}"
        enqueued, completed = nccl_progress(self.nccl)
        pending = enqueued - completed
        # Collectives of the group that are not of its calls, as those of compiled code, would make the numbers others.
        if not 0 < pending <= len(history.recent) or enqueued != history.calls + history.probes:
            return ""
        return f"{history.recent[-pending].text}, call {history.calls - pending + 1}, which is on the device"


_watches: list[tuple[ref[CallHistory], _Watch]] = []
_changed = threading.Event()
_thread: threading.Thread | None = None


@first_message_hooks.register
def watch(history: CallHistory, communicator: object) -> None:
    """Begins to watch the group of ``communicator``."""
    global _thread
    if not isinstance(communicator, TorchCommunicator):
        return  # has no time-out
    _watches.append((ref(history), _Watch(communicator)))
    _changed.set()
    if _thread is None or not _thread.is_alive():  # none yet, or none in a forked child
        _thread = threading.Thread(target=_look_on, name="bagua_syncbn watch", daemon=True)
        _thread.start()


def _look_on() -> None:
    while True:
        _changed.wait(_look_at_all())
        _changed.clear()


def _look_at_all() -> float:
    """Looks at all groups, and returns for how many seconds to pause."""
    pause = _LONGEST_PAUSE
    for entry in list(_watches):
        history, watched = entry[0](), entry[1]
        if history is None:
            _watches.remove(entry)
        else:
            watched.look(history)
            pause = min(pause, watched.seconds / _LOOKS)
    return pause
