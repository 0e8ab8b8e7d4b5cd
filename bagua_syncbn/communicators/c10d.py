"""Communicators over torch.distributed: NCCL, gloo and other c10d backends.

Ctrl-C, or a rank that leaves the group, interrupts the host's wait for a CPU collective.
"""

import os
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor

from .._groups import CAUSES, DESTROYED
from .._torch import process_groups

IS_AVAILABLE = dist.is_available()

# Groups of at least this size sum statistics, so that messages do not grow with the group; see docs/design.md.
FEWEST_SUMMED = 32

# On CPU, ranks gather messages up to this size in bytes, and add them locally. Latency dominates in such messages, and
# a ring all-gather has half as many steps as a ring all-reduce.
_MOST_GATHERED = 2**14

_SUM_IN_STREAM, _GATHER_IN_STREAM = (
    map(process_groups.in_stream, ("Allreduce", "Allgather")) if IS_AVAILABLE else (None, None)
)


def sums_statistics(ranks: int) -> bool:
    """Returns whether a group of this size sums statistics; smaller groups gather them."""
    return ranks >= FEWEST_SUMMED


def _is_gathered(packed: Tensor, ranks: int) -> bool:
    """Returns whether ranks gather ``packed`` and add it locally. All ranks agree, compiled or not."""
    return not sums_statistics(ranks) and packed.is_cpu and packed.numel() * packed.element_size() <= _MOST_GATHERED


class AsyncCollective:
    """A started collective. Neither starting it nor exiting the process waits for peers."""

    def __init__(self, group: Any, result: Tensor, work: Any, sums_rows: bool = False) -> None:
        self._group, self._result, self._work, self._sums_rows = ref(group), result, work, sums_rows
        self._kept = _keep_to_the_end(group, work) if result.is_cpu else None

    def wait(self) -> Tensor:
        """Waits for peers and returns the result, or the sum of its rows if ``sums_rows``."""
        wait_in_slices(self._work, self._group())
        if self._kept is not None:
            self._kept.set_result(None)
        return self._result.sum(0) if self._sums_rows else self._result


class TorchCommunicator:
    """Collectives of a :class:`torch.distributed.ProcessGroup` that this rank is a member of.

    A layer with this communicator as its ``process_group`` uses this group even if other code sends messages through
    it.

    The communicator does not keep the group alive: stored outputs reference the communicator, and if they kept the
    group alive after ``destroy_process_group``, the group's threads would abort the process at exit. Compiled code
    stores only the group's name.
    """

    __slots__ = ("__weakref__", "_group", "name", "rank", "size")

    def __init__(self, group: Any) -> None:
        if not hasattr(group, "group_name"):
            raise TypeError(f"group: expected a torch.distributed.ProcessGroup, got {type(group).__name__}")
        self._group = ref(group)
        _ended.setdefault(group, deque(maxlen=4))
        self.name: str = group.group_name
        self.size: int = group.size()
        self.rank: int = group.rank()

    @property
    def group(self) -> Any:
        """The group. Raises RuntimeError if the group was destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError(DESTROYED)
        return group

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group's members."""
        return tuple(dist.get_process_group_ranks(self.group))

    def all_gather(self, packed: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or type(packed) is not Tensor:
            return process_groups.traced_all_gather(packed, self.size, self.name)
        group = self.group
        rows, work = self._start_gather(group, packed, () if packed.is_cpu else (_GATHER_IN_STREAM,))
        _finish(work, group, packed)
        return rows

    def all_reduce(self, packed: Tensor) -> Tensor:
        if _is_gathered(packed, self.size):
            return self.all_gather(packed).sum(0)
        if torch.compiler.is_compiling() or type(packed) is not Tensor:
            return process_groups.traced_all_reduce(packed, self.name)
        group = self.group
        work = group.allreduce([packed]) if packed.is_cpu else group.allreduce([packed], _SUM_IN_STREAM)
        _finish(work, group, packed)
        return packed

    def begin(self, packed: Tensor, sums: bool) -> AsyncCollective:
        """Starts :meth:`all_reduce` if ``sums``, else :meth:`all_gather`, without waiting for peers."""
        group = self.group
        if sums and not _is_gathered(packed, self.size):
            return AsyncCollective(group, packed, group.allreduce([packed]))
        return AsyncCollective(group, *self._start_gather(group, packed), sums_rows=sums)

    # Calls the group's method, because torch.distributed's functions spend more time on checks than on the call.
    def _start_gather(self, group: Any, packed: Tensor, options: tuple[Any, ...] = ()) -> tuple[Tensor, Any]:
        gathered = packed.new_empty(self.size * packed.numel())  # gloo supports only the concatenated form
        return gathered.view(self.size, -1), getattr(group, process_groups.GATHER_METHOD)(gathered, packed, *options)

    def leave(self, why: str) -> None:
        """Makes peers stop waiting for this rank. The group cannot be used afterwards."""
        group = self._group()
        store = None if group is None else _stores.get(group)
        if store is not None:
            with suppress(RuntimeError):  # the store disappears with the rank that hosts it
                store.compare_set("left", "", why)

    def __repr__(self) -> str:
        return f"TorchCommunicator(ranks={self.ranks if self._group() else 'destroyed'})"

    def __deepcopy__(self, memo: Any) -> "TorchCommunicator":
        return self


def _finish(work: Any, group: Any, packed: Tensor) -> None:
    """Waits for a collective of ``packed``. On a device, the current stream waits instead of the host."""
    if work is None:  # already enqueued on the current stream
        return
    if packed.is_cpu:
        wait_in_slices(work, group)
    else:
        work.wait()  # with a timeout, the host would block


def wait_in_slices(work: Any, group: Any) -> None:
    """Waits for a collective in short slices, so that Python can run signal handlers (Ctrl-C) in between."""
    try:
        while True:
            try:
                work.wait(_SLICE)
                break
            except RuntimeError:  # either the slice timed out or the collective finished
                if work.is_completed():
                    work.wait()  # raises if the collective failed
                    break
            raise_if_left(group)
        _ended[group].append(work)
    except BaseException:
        _keep_to_the_end(work, None if work.is_completed() else group)
        raise


_SLICE = timedelta(seconds=0.5)

# The last collectives of each group. A gloo thread drops its reference to a collective some time after it reports the
# collective as done. If that were the last reference, the thread would free the tensors, which needs the GIL and aborts
# the process if the interpreter is shutting down. On destruction, a group joins its threads before it drops these
# collectives.
_ended: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()


def _keep_to_the_end(*kept: Any) -> "torch.futures.Future[None]":
    """Keeps objects alive until the returned future gets a result, even after the interpreter has shut down.

    Without it, ``destroy_process_group`` would wait in the group's destructor for a collective that peers never join.
    A global list would not help, because Python destroys its objects at exit. Instead, a future and its callback
    reference each other in C++, where the garbage collector does not find them.
    """
    future: torch.futures.Future[None] = torch.futures.Future()
    future.then(lambda _: (future, kept))
    return future


# The store in which a group's ranks record that they have left. A forked child must not use its parent's connections.
_stores: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stores.clear)


def leave_through(group: Any, store: Any) -> None:
    """Makes ranks that leave ``group`` record this in ``store``, which waiting ranks check."""
    _stores[group] = store


def raise_if_left(group: Any) -> None:
    """Raises RuntimeError if a rank of ``group`` has left."""
    store, why = _stores.get(group), ""
    if store is not None:
        with suppress(RuntimeError):
            why = store.get("left").decode() if store.check(["left"]) else ""
    if why:
        raise RuntimeError(why)


def failed(what: str, communicator: Any, error: BaseException) -> RuntimeError:
    """Returns the error of a collective that failed in ``what``, with the likely causes of ``error``."""
    text = f"collective failed in {what}, on rank {communicator.rank} of {communicator.size}: {type(error).__name__}"
    if str(error) == DESTROYED:
        return RuntimeError(f"sync_batch_norm: {text}: {error}")
    return RuntimeError(f"sync_batch_norm: {text}: {error}. {CAUSES}. This group can no longer be used")


def is_alive(group: Any) -> bool:
    """Returns whether ``group`` belongs to the running job and was not destroyed."""
    try:
        dist.get_rank(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def end_with(group: Any, part: Any) -> None:
    """Destroys the group ``part`` when ``group`` is destroyed; otherwise, torch would keep it alive."""
    finalize(group, _destroy, ref(part)).atexit = False  # the job ends all groups


def _destroy(held: "ref[Any]") -> None:
    group = held()
    if group is not None and is_alive(group):
        dist.destroy_process_group(group)
