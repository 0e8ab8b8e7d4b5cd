"""Communicators over torch.distributed: NCCL, gloo and any other c10d backend.

Ctrl-C ends the host's wait for a collective, and so does a rank that leaves the group.
"""

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ..groups import DESTROYED
from ..registry import Registry
from ..torch_internals import groups as torch_groups

IS_AVAILABLE = dist.is_available()


class AsyncCollective:
    """A started collective. Neither the start nor the end of the process waits for other ranks."""

    def __init__(self, group: Any, result: Tensor, work: Any, sums_rows: bool = False) -> None:
        self._group, self._result, self._work, self._sums_rows = ref(group), result, work, sums_rows
        self._kept = _keep_to_the_end(group, work) if result.is_cpu else None

    def wait(self) -> Tensor:
        """Waits for the other ranks and returns the result, or the sum of its rows with ``sums_rows``."""
        group = self._group()
        wait_in_slices(self._work, group)
        if self._kept is not None:
            self._kept.set_result(None)
        return self._result.sum(0) if self._sums_rows else self._result


class TorchCommunicator:
    """Collectives of a :class:`torch.distributed.ProcessGroup` that this rank is a member of.

    A layer with this communicator as its ``process_group`` uses exactly this group, even if the group carries other
    messages.

    The communicator does not keep the group alive. Outputs hold graphs, which hold communicators, and the threads of a
    group that outlives ``destroy_process_group`` abort the process at the end. Compiled code holds the group's name.
    """

    __slots__ = ("__weakref__", "_gathers_lists", "_group", "name", "rank", "size")

    def __init__(self, group: Any) -> None:
        self._group = ref(group)
        keep_last_works_of(group)
        self._gathers_lists = False  # True once the backend has refused to gather into one tensor
        self.name: str = group.group_name
        self.size: int = group.size()
        self.rank: int = group.rank()

    @property
    def group(self) -> Any:
        """The group. Raises RuntimeError if it was destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError(DESTROYED)
        return group

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group's members."""
        return tuple(dist.get_process_group_ranks(self.group))

    def all_gather(self, packed: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch_groups.traced_all_gather(packed, self.size, self.name)
        group = self._group() or self.group  # the property raises
        gathered, work = self._all_gather(group, packed, packed.is_cpu)
        _end(work, group, packed)
        return gathered

    def all_reduce(self, packed: Tensor) -> Tensor:
        if _is_gathered(packed, self.size):
            return self.all_gather(packed).sum(0)
        if torch.compiler.is_compiling():
            return torch_groups.traced_all_reduce(packed, self.name)
        group = self.group
        work = group.allreduce([packed]) if packed.is_cpu else group.allreduce([packed], _SUM_IN_STREAM)
        _end(work, group, packed)
        return packed

    def leave(self, why: str) -> None:
        """Ends the other ranks' waits for this one. The group cannot be used afterwards."""
        group = self._group()
        if group is not None:
            leave(group, why)

    def begin_all_gather(self, packed: Tensor) -> AsyncCollective:
        """Starts :meth:`all_gather` without waiting for the other ranks."""
        group = self.group
        return AsyncCollective(group, *self._all_gather(group, packed, True))

    def begin_all_reduce(self, packed: Tensor) -> AsyncCollective:
        """Starts :meth:`all_reduce` without waiting for the other ranks."""
        if _is_gathered(packed, self.size):
            group = self.group
            return AsyncCollective(group, *self._all_gather(group, packed, True), sums_rows=True)
        return AsyncCollective(self.group, packed, self.group.allreduce([packed]))

    # Calls the group's method, because torch.distributed's functions spend more time on checks than on the call.
    def _all_gather(self, group: Any, packed: Tensor, async_op: bool) -> tuple[Tensor, Any]:
        gathered = packed.new_empty(self.size * packed.numel())  # gloo takes the concatenated form only
        rows = gathered.view(self.size, -1)
        if not self._gathers_lists:
            try:
                options = () if async_op else (_GATHER_IN_STREAM,)
                return rows, getattr(group, torch_groups.GATHER_METHOD)(gathered, packed, *options)
            except RuntimeError as error:
                if not isinstance(error, NotImplementedError) and "does not support" not in str(error):
                    raise
                self._gathers_lists = True
        return rows, dist.all_gather(list(rows.unbind()), packed, group=group, async_op=async_op)

    def __repr__(self) -> str:
        return f"TorchCommunicator(ranks={self.ranks if self._group() else 'destroyed'})"

    def __deepcopy__(self, memo: Any) -> "TorchCommunicator":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"process_group: expected a group that can be saved, got {self!r}, which belongs to this process; "
            "give the layer the group itself, whose ranks can be saved, or a description"
        )


_SUM_IN_STREAM, _GATHER_IN_STREAM = (
    map(torch_groups.in_stream, ("Allreduce", "Allgather")) if IS_AVAILABLE else (None, None)
)


def _end(work: Any, group: Any, packed: Tensor) -> None:
    """Waits for a collective of ``packed``. On a device, the current stream waits instead of the host."""
    if work is None:  # was enqueued on the current stream
        return
    if packed.is_cpu:
        wait_in_slices(work, group)
    else:
        work.wait()  # with a time limit, the host would wait


transports: Registry[Callable[[Any], TorchCommunicator | None]] = Registry()
"""Each returns a communicator for a group, or None if it does not serve the group. All ranks call them together."""

# A lock for each group, and its communicator once it is made.
_made: WeakKeyDictionary[Any, tuple[Lock, list[TorchCommunicator]]] = WeakKeyDictionary()
_finding = Lock()


def communicator_of(group: Any) -> TorchCommunicator:
    """Returns the communicator of a c10d group. Its ranks make it together at the first call."""
    with _finding:
        lock, made = _made.setdefault(group, (Lock(), []))
    with lock:
        if not made:
            served = filter(None, (transport(group) for transport in transports))
            made.append(next(served, None) or TorchCommunicator(group))
    return made[0]


# Groups of at least this size sum statistics, so that messages do not grow with the group; see docs/design.md.
FEWEST_ADDED = 32


def is_large(ranks: int) -> bool:
    """Returns whether a group of this size sums statistics; smaller groups gather them."""
    return ranks >= FEWEST_ADDED


# On CPU, each rank gathers messages up to this size in bytes and adds them up. Waiting for other processes takes much
# longer than sending, and a ring's all-gather has half the steps of its all-reduce.
_MOST_GATHERED = 2**14


def _is_gathered(packed: Tensor, ranks: int) -> bool:
    """Returns whether each rank gathers ``packed`` and adds it up. All ranks agree, compiled or not."""
    return ranks < FEWEST_ADDED and packed.is_cpu and packed.numel() * packed.element_size() <= _MOST_GATHERED


def is_alive(group: Any) -> bool:
    """Returns whether ``group`` belongs to the running job and was not destroyed."""
    try:
        dist.get_rank(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def wait_in_slices(work: Any, group: Any) -> None:
    """Waits for a collective in slices, between which Python runs signal handlers, so that Ctrl-C ends the wait."""
    try:
        while True:
            try:
                work.wait(_SLICE)
                _ended[group].append(work)
                return
            except RuntimeError:
                if work.is_completed():  # the collective failed, or ended just after the slice
                    break
            raise_if_left(group)
        work.wait()
        _ended[group].append(work)
    except BaseException:
        _keep_to_the_end(work, None if work.is_completed() else group)
        raise


_SLICE = timedelta(seconds=0.5)

# The last collectives of each group. A gloo thread drops its reference to a collective some time after it reports the
# collective as done. If it were the last reference, it would free the tensors: that needs the GIL and aborts a process
# whose interpreter is ending. A group joins its threads at its end, and then drops these collectives.
_ended: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()


def keep_last_works_of(group: Any) -> None:
    """Keeps the last collectives of ``group`` alive until its end."""
    _ended.setdefault(group, deque(maxlen=4))


# Stores in which ranks say that they have left, by group, with the process that may use the store: a forked child has
# the same connection.
_stores: WeakKeyDictionary[Any, tuple[Any, int]] = WeakKeyDictionary()


def leave_through(group: Any, store: Any) -> None:
    """Makes ranks that leave ``group`` say so in ``store``, where waiting ranks look."""
    _stores[group] = store, os.getpid()


def leave(group: Any, why: str) -> None:
    """Ends the waits of other ranks in collectives of ``group``."""
    store, process = _stores.get(group, (None, 0))
    if store is not None and process == os.getpid():
        with suppress(RuntimeError):  # the store ends with the rank that hosts it
            store.compare_set("left", "", why)


def raise_if_left(group: Any) -> None:
    """Raises RuntimeError if a rank of ``group`` has left."""
    store, process = _stores.get(group, (None, 0))
    why = ""
    if store is not None and process == os.getpid():
        with suppress(RuntimeError):
            why = store.get("left").decode() if store.check(["left"]) else ""
    if why:
        raise RuntimeError(why)


def _keep_to_the_end(*kept: Any) -> "torch.futures.Future[None]":
    """Keeps objects alive until the returned future gets a result, also beyond the end of the interpreter.

    The destructor of a group would wait for a collective that other ranks never join; for collectives, see ``_ended``.
    Python destroys the objects that it holds, for example in a list. Here a future and its callback hold each other in
    C++, invisible to the garbage collector.
    """
    future: torch.futures.Future[None] = torch.futures.Future()
    future.then(lambda _: (future, kept))
    return future
