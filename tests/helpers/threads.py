"""Ranks as threads of this process, for groups of any size."""

import math
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


class Room(threading.Condition):
    """The meeting point of a group of threads. If their messages differ in kind or size, all threads raise.

    Only the thread that holds the condition computes, because hundreds of threads that compete for the GIL slow each
    other down.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.why = size, f"not all ranks came within {SECONDS} s"
        self.last = math.inf  # the last message of a rank that has left
        self._messages = defaultdict[int, _Message](_Message)

    def publish(self, number: int, rank: int, packed: Tensor, sums: bool) -> _Message:
        message = self._messages[number]
        message.rows[rank] = packed.clone()
        message.kinds.add((sums, packed.numel(), packed.dtype))
        if len(message.rows) == self.size:
            del self._messages[number]
            if len(message.kinds) > 1:
                self.leave(f"the ranks send {message.kinds}", number - 1)
            else:
                rows = torch.stack([message.rows[rank] for rank in range(self.size)])
                message.result = rows.sum(0) if sums else rows
            self.notify_all()
        return message

    def leave(self, why: str, last: int = 0) -> None:
        """Fails all waits for messages after ``last``, the last message of a leaving rank."""
        self.why, self.last = why, min(last, self.last)
        self.notify_all()


class _Sent(AsyncCollective):
    def __init__(self, room: Room, number: int, message: _Message, packed: Tensor | None) -> None:
        self._room, self._number, self._message, self._packed = room, number, message, packed

    def wait(self) -> Tensor:
        room, message = self._room, self._message
        room.wait_for(lambda: message.result is not None or self._number > room.last, SECONDS)
        if message.result is None:
            raise RuntimeError(room.why)
        return message.result if self._packed is None else self._packed.copy_(message.result)


class ThreadCommunicator(TorchCommunicator):
    """One rank of a room; records its messages."""

    def __init__(self, room: Room, rank: int) -> None:
        self._room, self.rank, self.size, self.name = room, rank, room.size, f"rank {rank}"
        self.sent: list[tuple[str, int]] = []  # kind and bytes of each message
        self.group_name = self.name  # without a unique name, it would share other tests' compiled code

    @property
    def group(self) -> Any:
        return self

    def begin(self, packed: Tensor, sums: bool) -> AsyncCollective:
        self.sent.append(("sum" if sums else "gather", packed.nbytes))
        message = self._room.publish(len(self.sent), self.rank, packed, sums)
        return _Sent(self._room, len(self.sent), message, packed if sums else None)

    def all_gather(self, packed: Tensor) -> Tensor:
        return self.begin(packed, False).wait()

    def all_reduce(self, packed: Tensor) -> Tensor:
        return self.begin(packed, True).wait()

    def leave(self, why: str) -> None:
        self._room.leave(why, len(self.sent))


def run_threads(size: int, function: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """Runs ``function`` with the communicator of each rank; returns the results."""
    room, results, errors = Room(size), [None] * size, []  # type: ignore[var-annotated]

    def run(rank: int) -> None:
        with room:
            try:
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
