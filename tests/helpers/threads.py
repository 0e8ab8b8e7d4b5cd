"""Ranks as threads of this process, for groups of any size."""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bagua_syncbn.communicators import TorchCommunicator
from bagua_syncbn.communicators.c10d import AsyncCollective

SECONDS = 300  # maximum wait of a rank


class _Message:
    """The n-th message of all ranks, and its result."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}
        self.kinds: set[Any] = set()
        self.result: Tensor | None = None
        self.ended = threading.Event()


class Room:
    """The meeting point of a group of threads. If their messages differ in kind or size, all threads raise.

    Only one thread computes at a time, because hundreds of threads that compete for the GIL slow each other down.
    """

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()
        self.size, self.why = size, f"not all ranks came within {SECONDS} s"
        self._lock, self._messages = threading.Lock(), defaultdict[int, _Message](_Message)
        self._last: int | None = None  # the last message of a rank that has left

    def publish(self, number: int, rank: int, packed: Tensor, sums: bool) -> _Message:
        with self._lock:
            message = self._messages[number]
            message.rows[rank] = packed.clone()
            message.kinds.add((sums, packed.numel(), packed.dtype))
            is_last = len(message.rows) == self.size
            if is_last:
                del self._messages[number]
            elif self._last is not None and number > self._last:
                message.ended.set()
        if is_last and len(message.kinds) == 1:
            rows = torch.stack([message.rows[rank] for rank in range(self.size)])
            message.result = rows.sum(0) if sums else rows
        elif is_last:
            self.why = f"the ranks send {message.kinds}"
        if is_last:
            message.ended.set()
        return message

    def leave(self, why: str, last: int = 0) -> None:
        """Fails all waits for messages after ``last``, the last message of a leaving rank."""
        self.why = why
        with self._lock:
            self._last = last if self._last is None else min(last, self._last)
            for number, message in self._messages.items():
                if number > self._last:
                    message.ended.set()


class _Sent(AsyncCollective):
    def __init__(self, room: Room, message: _Message, packed: Tensor | None) -> None:
        self._room, self._message, self._packed = room, message, packed

    def wait(self) -> Tensor:
        if not self._message.ended.is_set():
            self._room.turn.release()
            self._message.ended.wait(SECONDS)
            self._room.turn.acquire()
        if self._message.result is None:
            raise RuntimeError(self._room.why)
        return self._message.result if self._packed is None else self._packed.copy_(self._message.result)


class ThreadCommunicator(TorchCommunicator):
    """One rank of a room; records its messages."""

    def __init__(self, room: Room, rank: int) -> None:
        self._room, self.rank, self.size, self.name = room, rank, room.size, f"rank {rank}"
        self.sent: list[tuple[str, int]] = []  # kind and bytes of each message
        self.group_name = self.name  # without a unique name, it would share other tests' compiled code

    @property
    def group(self) -> Any:
        return self

    def _begin(self, packed: Tensor, sums: bool) -> _Sent:
        self.sent.append(("sum" if sums else "gather", packed.nbytes))
        message = self._room.publish(len(self.sent), self.rank, packed, sums)
        return _Sent(self._room, message, packed if sums else None)

    def begin_all_gather(self, packed: Tensor) -> AsyncCollective:
        return self._begin(packed, False)

    def begin_all_reduce(self, packed: Tensor) -> AsyncCollective:
        return self._begin(packed, True)

    def all_gather(self, packed: Tensor) -> Tensor:
        return self._begin(packed, False).wait()

    def all_reduce(self, packed: Tensor) -> Tensor:
        return self._begin(packed, True).wait()

    def leave(self, why: str) -> None:
        self._room.leave(why, len(self.sent))

    def __repr__(self) -> str:
        return f"ThreadCommunicator(rank {self.rank} of {self.size})"


def run_threads(size: int, function: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """Runs ``function`` with the communicator of each rank; returns the results."""
    room, results, errors = Room(size), [None] * size, []  # type: ignore[var-annotated]

    def run(rank: int) -> None:
        try:
            with room.turn:
                results[rank] = function(ThreadCommunicator(room, rank))
        except BaseException as error:
            errors.append(error)
            room.leave(f"rank {rank} raised {error!r}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    # The watch needs torch's timeout, which these groups don't have.
    with patch("bagua_syncbn._reliability.protocol.watch"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results
