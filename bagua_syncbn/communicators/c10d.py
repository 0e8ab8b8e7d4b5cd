"""Ranks of a torch.distributed job: NCCL, gloo and any other c10d backend.

Ctrl-C can end a wait of the host for a collective, and so can a rank that leaves.
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
    """A collective that this rank has started; neither the start nor the end of the process waits for other ranks."""

    def __init__(self, group: Any, result: Tensor, work: Any, adds_up: bool = False) -> None:
        self._group, self._result, self._work, self._adds_up = ref(group), result, work, adds_up
        self._kept = _keep_to_the_end(group, work) if result.is_cpu else None

    def wait(self) -> Tensor:
        """Waits for the other ranks and returns the result; the sum of its rows with ``adds_up``."""
        group = self._group()
        wait_in_slices(self._work, group)
        if self._kept is not None:
            self._kept.set_result(None)
        return self._result.sum(0) if self._adds_up else self._result


class TorchCommunicator:
    """Collectives of one :class:`torch.distributed.ProcessGroup`, of which this rank is a member.

    A layer with this communicator as its ``process_group`` uses that group itself, even if the group carries other
    messages too.

    The communicator does not keep the group alive, because graphs hold communicators and outputs hold graphs: a group
    that outlives ``destroy_process_group`` has threads that abort the process when the interpreter ends. Compiled code
    holds the name of the group instead.
    """

    __slots__ = ("__weakref__", "_gathers_lists", "_group", "name", "rank", "size")

    def __init__(self, group: Any) -> None:
        self._group = ref(group)
        keep_last_works_of(group)
        self._gathers_lists = False  # True once the backend refused, before any message, to gather into one tensor
        self.name: str = group.group_name
        self.size: int = group.size()
        self.rank: int = group.rank()

    @property
    def group(self) -> Any:
        """The group; raises RuntimeError where it was destroyed."""
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
        """Has the other ranks not wait for this one any more. The group cannot be used after it."""
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
            return AsyncCollective(group, *self._all_gather(group, packed, True), adds_up=True)
        return AsyncCollective(self.group, packed, self.group.allreduce([packed]))

    # The methods of groups, since torch.distributed's functions check arguments for longer than the call itself takes.
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
            f"process_group: expected what can leave this process, got {self!r}, which is one group of it; "
            "give the layer the group itself, whose ranks can be saved, or a description"
        )


_SUM_IN_STREAM, _GATHER_IN_STREAM = (
    map(torch_groups.in_stream, ("Allreduce", "Allgather")) if IS_AVAILABLE else (None, None)
)


def _end(work: Any, group: Any, packed: Tensor) -> None:
    """Waits for a collective of ``packed``: the host on CPU; elsewhere the stream at most, or not even that."""
    if work is None:  # has run on the current stream
        return
    if packed.is_cpu:
        wait_in_slices(work, group)
    else:
        work.wait()  # a wait with a time limit would be the host's


transports: Registry[Callable[[Any], TorchCommunicator | None]] = Registry()
"""Each returns a communicator for a group, or None if it does not serve the group. All ranks call them together."""

# For each group a lock, and the communicator once it is made.
_made: WeakKeyDictionary[Any, tuple[Lock, list[TorchCommunicator]]] = WeakKeyDictionary()
_finding = Lock()


def communicator_of(group: Any) -> TorchCommunicator:
    """Returns the communicator of a c10d group, which its ranks make together at their first call."""
    with _finding:
        lock, made = _made.setdefault(group, (Lock(), []))
    with lock:
        if not made:
            made.append(
                next(filter(None, (transport(group) for transport in transports)), None) or TorchCommunicator(group)
            )
    return made[0]


# From this number of ranks on, no message grows with the number of ranks; docs/design.md has the model.
FEWEST_ADDED = 32


def is_large(ranks: int) -> bool:
    """Whether a group of this number of ranks adds statistics up; smaller groups gather them."""
    return ranks >= FEWEST_ADDED


# On CPU, sums of messages up to this size in bytes are gathered, and added up by each rank. Waiting for other processes
# takes much longer there than sending, and a gather over a ring has half the steps of an all-reduce.
_MOST_GATHERED = 2**14


def _is_gathered(packed: Tensor, ranks: int) -> bool:
    """Whether each rank gathers ``packed`` and adds it up itself. All ranks agree on it, compiled or not."""
    return ranks < FEWEST_ADDED and packed.is_cpu and packed.numel() * packed.element_size() <= _MOST_GATHERED


def is_alive(group: Any) -> bool:
    """Whether ``group`` belongs to the running job and was not destroyed."""
    try:
        dist.get_rank(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def wait_in_slices(work: Any, group: Any) -> None:
    """Waits for a collective. Between slices Python looks for signals, so that Ctrl-C ends the wait."""
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

# Last collectives that have ended, by their group. A gloo thread drops its reference to a collective some
# time after the collective is reported done: if it then freed the tensors while the interpreter ends, the thread would
# ask for the GIL, which aborts the process. The end of the group drops these collectives, after it joined its threads.
_ended: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()


def keep_last_works_of(group: Any) -> None:
    """Keeps the last collectives of ``group`` that :func:`wait_in_slices` waited for alive as long as ``group``."""
    _ended.setdefault(group, deque(maxlen=4))


# Stores by which the ranks of a group learn that one of them has left, by the group, each with the process that may use
# it: a forked child has the same connection.
_stores: WeakKeyDictionary[Any, tuple[Any, int]] = WeakKeyDictionary()


def leave_through(group: Any, store: Any) -> None:
    """Has the ranks of ``group`` say in ``store`` that they have left, and look there while they wait."""
    _stores[group] = store, os.getpid()


def leave(group: Any, why: str) -> None:
    """Tells the ranks that wait in a collective of ``group`` that this rank does not come."""
    store, process = _stores.get(group, (None, 0))
    if store is not None and process == os.getpid():
        with suppress(RuntimeError):  # the store ends with the rank that keeps it
            store.compare_set("left", "", why)


def raise_if_left(group: Any) -> None:
    """Raises RuntimeError if a rank of ``group`` has left."""
    store, _ = _stores.get(group, (None, None))
    why = ""
    if store is not None:
        with suppress(RuntimeError):
            why = store.get("left").decode() if store.check(["left"]) else ""
    if why:
        raise RuntimeError(why)


def _keep_to_the_end(*kept: Any) -> "torch.futures.Future[None]":
    """Keeps objects alive, also beyond the end of the interpreter, until the future that it returns gets a result.

    The destructor of a group would wait for a collective that the other ranks never join. For collectives, see the
    comment at ``_ended``. Objects that Python holds, as in a list, are destroyed at its end; here a future and its
    callback hold each other, in C++, where no garbage collector sees it.
    """
    future: torch.futures.Future[None] = torch.futures.Future()
    future.then(lambda _: (future, kept))
    return future
