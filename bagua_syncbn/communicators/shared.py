"""Exchange through shared memory for small CPU messages between ranks on one host; all others use c10d collectives.

When ranks make their communicator, they decide together whether all of them use shared memory or none does. After that,
only the size of a message decides.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from ..groups import DESTROYED, text_of_ranks
from ..torch_internals.groups import backend_and_store, is_gloo_on_cpu, prefix_store, timeout_of
from .c10d import AsyncCollective, TorchCommunicator, leave, leave_through, raise_if_left, transports
from .jobs import MeetingError, leave_meeting, meet

_log = logging.getLogger("bagua_syncbn")

_WANTED = os.environ.get("BAGUA_SYNCBN_EXCHANGE", "shared")
if _WANTED not in ("shared", "collectives"):
    raise ImportError(f'BAGUA_SYNCBN_EXCHANGE: expected "shared" or "collectives", got {_WANTED!r}')

# Must match csrc/exchange/segment.h.
MOST_BYTES = 2**16
GATHER, SUM = 0, 1
_ITEMSIZES = {torch.float32: 4, torch.float64: 8}


class SharedCommunicator(TorchCommunicator):
    """A :class:`TorchCommunicator` whose ranks exchange small messages on CPU through shared memory.

    Sums are bitwise equal on all ranks, because each rank adds in rank order. The memory lives as long as the group.
    """

    __slots__ = ("_begun", "_native", "_segment")

    def __init__(self, group: Any, segment: Any) -> None:
        super().__init__(group)
        self._native, self._segment = native_library(), segment
        self._begun: list[Published] = []
        _by_name[self.name] = self
        finalize(group, self._close).atexit = False  # type: ignore[misc]  # the system frees the memory at exit

    # Written out, because a call of a further function takes 2 % of an exchange.
    def all_gather(self, packed: Tensor) -> Tensor:
        if not self._fits(GATHER, packed):
            return super().all_gather(packed)
        if torch.compiler.is_compiling() or type(packed) is not Tensor:
            return torch.ops.bagua_syncbn.exchange(packed, self.name, self.size, False)  # type: ignore[no-any-return]
        return self._exchange(GATHER, packed.contiguous(), packed.new_empty((self.size, packed.numel())))

    def all_reduce(self, packed: Tensor) -> Tensor:
        if not self._fits(SUM, packed):
            return super().all_reduce(packed)
        if torch.compiler.is_compiling() or type(packed) is not Tensor:
            return torch.ops.bagua_syncbn.exchange(packed, self.name, self.size, True)  # type: ignore[no-any-return]
        packed = packed.contiguous()
        return self._exchange(SUM, packed, packed)

    def begin_all_gather(self, packed: Tensor) -> AsyncCollective:
        return self._begin(GATHER, packed) if self._fits(GATHER, packed) else super().begin_all_gather(packed)

    def begin_all_reduce(self, packed: Tensor) -> AsyncCollective:
        return self._begin(SUM, packed) if self._fits(SUM, packed) else super().begin_all_reduce(packed)

    def _fits(self, kind: int, packed: Tensor) -> bool:
        """True if a message goes through shared memory. All ranks agree on it, compiled or not."""
        itemsize = _ITEMSIZES.get(packed.dtype)
        return itemsize is not None and packed.is_cpu and packed.numel() * itemsize <= MOST_BYTES

    def _exchange(self, kind: int, packed: Tensor, target: Tensor) -> Tensor:
        numel, itemsize = packed.numel(), packed.element_size()
        try:
            self._native.exchange(self._segment, kind, packed.data_ptr(), numel, itemsize, target.data_ptr())
        except RuntimeError as error:
            self._raise_reason(error)
            raise
        return target

    def _raise_reason(self, error: RuntimeError) -> None:
        """Raises why a rank has left, which the library does not know, or that the group was destroyed."""
        if self._segment is None or "has left" in str(error):
            raise_if_left(self.group)

    def _begin(self, kind: int, packed: Tensor) -> AsyncCollective:
        packed = packed.contiguous()
        numel, itemsize = packed.numel(), packed.element_size()
        self._native.publish(self._segment, kind, packed.data_ptr(), numel, itemsize)
        self._begun.append(Published(self, packed.new_empty((self.size, numel) if kind == GATHER else numel)))
        return self._begun[-1]

    def leave(self, why: str) -> None:
        super().leave(why)  # before leave_segment(), after which the other ranks look for `why`
        with suppress(RuntimeError):  # closed already, or in use by another thread
            self._native.leave_segment(self._segment)
        self._close()

    def _close(self) -> None:
        self._segment = None


class Published(AsyncCollective):
    """A message that this rank has published without waiting for the other ranks.

    ``wait`` first waits for the messages in ``begun``, and returns the result of the last one; without any, ``target``.
    """

    def __init__(self, communicator: SharedCommunicator, target: Tensor, *begun: AsyncCollective) -> None:
        self._communicator, self._target, self._all = communicator, target, begun
        self._result = target

    def wait(self) -> Tensor:
        communicator = self._communicator
        if self in communicator._begun:
            communicator._begun.remove(self)
            for message in self._all:
                self._result = message.wait()
            try:
                communicator._native.collect(communicator._segment, self._target.data_ptr())
            except RuntimeError as error:
                communicator._raise_reason(error)
                raise
        return self._result


def _target(kind: int, packed: Tensor, ranks: int) -> Tensor:
    return torch.empty_like(packed) if kind == SUM else packed.new_empty((ranks, packed.numel()))


# An opaque op for compiled code, so that a compiled rank sends the same messages as one that runs eagerly. It takes the
# name of the group, like torch's collectives, because a graph keeps its constants alive.
_by_name: WeakValueDictionary[str, SharedCommunicator] = WeakValueDictionary()
_library = torch.library.Library("bagua_syncbn", "FRAGMENT")
_library.define(
    "exchange(Tensor packed, str group, int ranks, bool sums) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


@torch.library.register_fake("bagua_syncbn::exchange", lib=_library)
def _(packed: Tensor, group: str, ranks: int, sums: bool) -> Tensor:
    return _target(SUM if sums else GATHER, packed, ranks)


def _exchange_by_name(packed: Tensor, group: str, ranks: int, sums: bool) -> Tensor:
    communicator, kind = _by_name.get(group), SUM if sums else GATHER
    if communicator is None:
        raise RuntimeError(DESTROYED)
    packed = packed.contiguous()
    try:
        for begun in communicator._begun[:]:  # messages that a refused eager call left uncollected
            begun.wait()
        return communicator._exchange(kind, packed, _target(kind, packed, ranks))
    except RuntimeError as error:  # the layer, which names itself in errors of eager calls, is unknown here
        members = text_of_ranks(sorted(dist.get_process_group_ranks(communicator.group)))
        what = "sum" if sums else "gather"
        raise RuntimeError(
            f"sync_batch_norm: expected {members} to meet in compiled code, to {what} {packed.numel()} values "
            f"each, got on rank {communicator.rank} of them {type(error).__name__}: {error}. Another rank has ended, "
            "raised an error, is in other code until the time-out, or was late; the group cannot be used any more"
        ) from error


_library.impl("exchange", _exchange_by_name, "CPU")


def problem() -> str:
    """Returns why this process cannot use shared memory with any group, or ""."""
    if _WANTED == "collectives":
        return "BAGUA_SYNCBN_EXCHANGE=collectives"
    if os.environ.get("BAGUA_SYNCBN_KERNELS") == "reference":
        return "BAGUA_SYNCBN_KERNELS=reference, which loads no native library"
    return "" if hasattr(native_library(), "create_segment") else "no native library, or not on Linux"


@transports.register
def _communicator_of(group: Any) -> SharedCommunicator | None:
    """Returns a communicator of ``group`` if all its ranks share memory. All ranks call it together.

    Raises:
        RuntimeError: rank 0 of the group did not answer within the time-out of the group.
    """
    if is_gloo_on_cpu(group):
        with first_use(group, "shared") as (_, together):
            reason, segment = share(together, range(group.size()), group.rank(), timeout_of(group).total_seconds())
    else:  # the store of another backend may be local to this process
        reason, segment = "its messages on CPU do not go over gloo", None
    log_way(group, f"collectives: {reason}" if reason else "shared memory")
    return None if segment is None else SharedCommunicator(group, segment)


def log_way(group: Any, way: str) -> None:
    _log.debug("group %s, rank %d of %d: through %s", group.group_name, group.rank(), group.size(), way)


@contextmanager
def first_use(group: Any, what: str) -> Iterator[tuple[Any, Callable[[Any], list[Any]]]]:
    """Context for the first use of ``group`` by all its ranks.

    Yields a store, and a function that takes a value from each rank and returns those of all ranks. If a rank raises,
    so does this function on the others.
    """
    rank, size, seconds = group.rank(), group.size(), timeout_of(group).total_seconds()
    store = prefix_store(f"bagua_syncbn/{what}", backend_and_store(group)[1])
    # Numbered, because a store may outlive a job, and the next job may use the same names for its groups.
    store = prefix_store(str(store.add(f"times/{rank}", 1)), store)
    leave_through(group, store)
    meetings = (prefix_store(str(number), store) for number in count())

    def together(value: Any) -> list[Any]:
        try:
            return meet(next(meetings), rank, range(size), value, seconds)  # type: ignore[no-any-return]
        except MeetingError as error:
            raise RuntimeError(f"first use of a group of {size} ranks failed: {error}") from None

    try:
        yield store, together
    except BaseException as error:
        leave_meeting(next(meetings), rank, error)
        leave(group, f"rank {rank} has left the group: {type(error).__name__} in its first use")
        raise


def share(together: Callable[[Any], list[Any]], here: Sequence[int], rank: int, seconds: float) -> tuple[str, Any]:
    """Maps memory for the ranks ``here`` of a group. All ranks of the group call this together.

    Returns:
        "" and this rank's segment; or the first reason why a rank of the group cannot share memory, and None.
    """
    name, place, own, segment = f"bagua_syncbn:{secrets.token_hex(16)}", "", problem(), None
    native, members = native_library(), array("i", here).tobytes()
    cores = [] if own else sorted(os.sched_getaffinity(0))
    try:
        if rank == here[0] and not own:
            segment, place = native.create_segment(name, members)
    except RuntimeError as error:
        own = str(error)
    brought = together([own, name, place, cores])
    reason, (_, name, place, _) = _first_problem(row[0] for row in brought), brought[here[0]]
    if reason:
        return reason, None
    try:
        if rank != here[0]:
            segment = native.open_segment(name, members, here.index(rank), place)
    except RuntimeError as error:
        own = str(error)
    reason = _first_problem(together(own))
    if reason:
        return reason, None
    spins = len({core for other in here for core in brought[other][3]}) >= len(here)
    native.start_segment(segment, seconds, spins)
    return "", segment


def _first_problem(problems: Iterable[str]) -> str:
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), "")


def native_library() -> Any:
    """Returns the native library, or None if the ops did not load it when the package was imported."""
    return sys.modules.get(f"{__package__.partition('.')[0]}._C")
