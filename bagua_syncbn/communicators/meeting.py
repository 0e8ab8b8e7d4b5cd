"""Meetings of ranks in a store, to create groups or agree on descriptions."""

import json
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .._groups import CAUSES, text_of_ranks

_log = logging.getLogger("bagua_syncbn")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_CAUSES = f"{CAUSES}. If it has no such layers, call sync_group on all ranks first"


class Meeting:
    """An attempt of ``ranks`` to create a group or to agree: they exchange values through a store.

    An exchange succeeds on all ranks or on none, because the first outcome in the store is final. If an exception ends
    a rank's ``with`` block, its peers' next exchange raises, and so do collectives of groups that use the ``store`` in
    :func:`leave_through`. RuntimeErrors in the block are re-raised with a description of the first use. Sends no
    tensors, because torch.compile may be tracing.

    Args:
        store: None if there are no peers (torch's backend "fake").
    """

    def __init__(self, store: Any, name: str, rank: int, ranks: Sequence[int], timeout: timedelta, what: str) -> None:
        self._rank, self._ranks, self._seconds, self._what = rank, ranks, timeout.total_seconds(), what
        self._step, self.store, self.attempt = 0, store, 1
        if store is not None:  # separates attempts: the store may hold keys of an earlier job
            prefixed: Any = dist.distributed_c10d.PrefixStore
            store = prefixed(f"bagua_syncbn/{name}", store)
            self.attempt = store.add(f"attempts of {rank}", 1)
            self.store = prefixed(str(self.attempt), store)

    def exchange(self, value: Any = None) -> list[Any]:
        """Returns all ranks' JSON-serializable values in rank order.

        Raises:
            RuntimeError: some ranks did not arrive in time, or left, or the store did not answer.
        """
        store, keys = self.store, list(map(self._key, self._ranks))
        if store is None:
            return [value] * len(self._ranks)
        begin, pause, outcome, has_logged = time.monotonic(), 0.0005, None, False
        store.set(self._key(self._rank), json.dumps(value))
        while outcome is None:
            waited = time.monotonic() - begin
            if store.check([self._key("outcome")]):
                outcome = json.loads(store.get(self._key("outcome")))
            elif store.check(["left"]):
                outcome = self._settle(store.get("left").decode())
            elif self._rank == self._ranks[0] and store.check(keys):
                outcome = self._settle([json.loads(store.get(key)) for key in keys])
            elif waited > self._seconds:
                waits = f"waited for {self._absent()} for {self._seconds:g} s, the timeout"
                outcome = self._settle(f"rank {self._rank} {waits}. {_CAUSES}")
            else:
                if waited > self._seconds / 2 and not has_logged:
                    has_logged = True
                    _log.warning(
                        "first use of %s: rank %d has waited for %s for %.3g s, half of the timeout. %s",
                        self._what, self._rank, self._absent(), self._seconds / 2, _CAUSES,
                    )  # fmt: skip
                # Polls, because a blocking wait would lock the store for all threads and ignore Ctrl-C.
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        self._step += 1
        return outcome

    def _key(self, name: object) -> str:
        return f"{self._step}/{name}"

    def _absent(self) -> str:
        absent = [rank for rank in self._ranks if not self.store.check([self._key(rank)])]
        return text_of_ranks(absent or self._ranks[:1])  # the first rank settles the exchange

    def _settle(self, outcome: Any) -> Any:
        """Sets the outcome of the exchange unless a rank has already set it. Returns the final outcome."""
        return json.loads(self.store.compare_set(self._key("outcome"), "", json.dumps(outcome)))

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if kind is not None and self.store is not None:
            with suppress(RuntimeError):  # the store disappears with the rank that hosts it
                self.store.compare_set("left", "", f"rank {self._rank} left with {kind.__name__}")
        if isinstance(error, RuntimeError):
            raise RuntimeError(f"first use of {self._what} failed: {error}") from error


def host_name() -> tuple[str, str]:
    """Returns host name and boot ID; machines started from the same image may share a name."""
    return socket.gethostname(), _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
