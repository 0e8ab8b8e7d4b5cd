"""Ranks on one host: small messages on CPU go through shared memory, all others through collectives of the c10d group.

The ranks of a group decide together, when they make their communicator, whether all of them use shared memory or none
does. From then on the size of a message alone decides which way it goes.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from ..groups import DESTROYED, text_of_ranks
from ..torch_internals.groups import backend_and_store, is_gloo_on_cpu, prefix_store, timeout_of
from .c10d import AsyncCollective, TorchCommunicator, leave, leave_through, transports
from .jobs import MeetingError, leave_meeting, meet

_log = logging.getLogger("bagua_syncbn")

_WANTED = os.environ.get("BAGUA_SYNCBN_EXCHANGE", "shared")
if _WANTED not in ("shared", "collectives"):
    raise ImportError(f'BAGUA_SYNCBN_EXCHANGE: expected "shared" or "collectives", got {_WANTED!r}')

# Constants of csrc/exchange/segment.h, which must agree with it.
MOST_BYTES = 2**16
GATHER, SUM = 0, 1
_ITEMSIZES = {torch.float32: 4, torch.float64: 8}


class SharedCommunicator(TorchCommunicator):
    """A :class:`TorchCommunicator` whose ranks exchange small messages on CPU through shared memory.

    Sums are added up in rank order, so that all ranks have the same bits. The memory lives as long as the group.
    """

    __slots__ = ("_begun", "_native", "_segment")

    def __init__(self, group: Any, segment: Any) -> None:
        super().__init__(group)
        self._native, self._segment = native_library(), segment
        self._begun: list[Published] = []
        _by_name[self.name] = self
        finalize(group, self._close).atexit = False  # type: ignore[misc]  # the end of the process frees the memory anyway

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
        """Whether a message goes through shared memory. All ranks agree on it, compiled or not."""
        itemsize = _ITEMSIZES.get(packed.dtype)
        return itemsize is not None and packed.is_cpu and packed.numel() * itemsize <= MOST_BYTES

    def _exchange(self, kind: int, packed: Tensor, target: Tensor) -> Tensor:
        numel, itemsize = packed.numel(), packed.element_size()
        self._native.exchange(self._segment, kind, packed.data_ptr(), numel, itemsize, target.data_ptr())
        return target

    def _begin(self, kind: int, packed: Tensor) -> AsyncCollective:
        packed = packed.contiguous()
        numel, itemsize = packed.numel(), packed.element_size()
        self._native.publish(self._segment, kind, packed.data_ptr(), numel, itemsize)
        self._begun.append(Published(self, packed.new_empty((self.size, numel) if kind == GATHER else numel)))
        return self._begun[-1]

    def leave(self, why: str) -> None:
        super().leave(why)
        with suppress(RuntimeError):  # a closed one, or one that another thread waits in
            self._native.leave_segment(self._segment, why.encode("ascii", "replace").decode())
        self._close()

    def _close(self) -> None:
        self._segment = None  # the library reports None as a destroyed group


class Published(AsyncCollective):
    """A message that this rank has published without waiting for the messages of other ranks.

    It has ended when all that was ``begun`` for it has, and the last of these has the result in place of ``target``.
    """

    def __init__(self, communicator: SharedCommunicator, target: Tensor, *begun: AsyncCollective) -> None:
        self._communicator, self._target, self._all = communicator, target, begun
        self._result = target

    def wait(self) -> Tensor:
        communicator = self._communicator
        if self in communicator._begun:
            communicator._begun.remove(self)
            for one in self._all:
                self._result = one.wait()
            communicator._native.collect(communicator._segment, self._target.data_ptr())
        return self._result


# The exchange in compiled code is an opaque op, so that a compiled rank sends the same messages as one that falls back
# to eager code. The op takes the name of the group, as torch's collectives do: a graph keeps its constants alive.
_by_name: WeakValueDictionary[str, SharedCommunicator] = WeakValueDictionary()
_library = torch.library.Library("bagua_syncbn", "FRAGMENT")
_library.define(
    "exchange(Tensor packed, str group, int ranks, bool sums) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


@torch.library.register_fake("bagua_syncbn::exchange", lib=_library)
def _(packed: Tensor, group: str, ranks: int, sums: bool) -> Tensor:
    return torch.empty_like(packed) if sums else packed.new_empty((ranks, packed.numel()))


def _exchange_by_name(packed: Tensor, group: str, ranks: int, sums: bool) -> Tensor:
    communicator = _by_name.get(group)
    if communicator is None:
        raise RuntimeError(DESTROYED)
    packed = packed.contiguous()
    target = torch.empty_like(packed) if sums else packed.new_empty((ranks, packed.numel()))
    try:
        for begun in communicator._begun[:]:  # messages that a refused eager call left uncollected
            begun.wait()
        return communicator._exchange(SUM if sums else GATHER, packed, target)
    except RuntimeError as error:  # named here, because compiled code calls this without its layer
        members = text_of_ranks(sorted(dist.get_process_group_ranks(communicator.group)))
        what = "sum" if sums else "gather"
        raise RuntimeError(
            f"sync_batch_norm: expected {members} to meet in compiled code, to {what} {packed.numel()} values "
            f"each, got on rank {communicator.rank} of them {type(error).__name__}: {error}. Another rank has ended, "
            "raised an error, is in other code until the time-out, or was late; the group cannot be used any more"
        ) from error


_library.impl("exchange", _exchange_by_name, "CPU")


def problem() -> str:
    """Returns why this process cannot exchange through shared memory, whatever its group; "" where it can."""
    if _WANTED == "collectives":
        return "BAGUA_SYNCBN_EXCHANGE=collectives"
    if os.environ.get("BAGUA_SYNCBN_KERNELS") == "reference":
        return "BAGUA_SYNCBN_KERNELS=reference, which loads no native library"
    return "" if hasattr(native_library(), "exchange") else "no native library, or not on Linux"


@transports.register
def _communicator_of(group: Any) -> SharedCommunicator | None:
    """Returns a communicator of ``group`` if all its ranks share memory; they make it together.

    Raises:
        RuntimeError: rank 0 of the group did not answer within the time-out of the group.
    """
    # Stores of other backends may have no other process behind them.
    if not is_gloo_on_cpu(group):
        reason, segment = "its messages on CPU do not go over gloo", None
    else:
        reason, segment = _agree(group)
    log_way(group, f"collectives: {reason}" if reason else "shared memory")
    return None if segment is None else SharedCommunicator(group, segment)


def log_way(group: Any, way: str) -> None:
    _log.debug("group %s, rank %d of %d: through %s", group.group_name, group.rank(), group.size(), way)


def _agree(group: Any) -> tuple[str, Any]:
    """Returns the reason why the ranks of ``group`` share no memory and None, or "" and this rank's segment."""
    with first_use(group, "shared", "made", "opened") as (_, together):
        return share(together, range(group.size()), group.rank(), timeout_of(group).total_seconds())


@contextmanager
def first_use(group: Any, what: str, *meetings: str) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Context in which the ranks of ``group`` make its first use: gives a store, and a function for ``meetings`` there.

    An error of one rank ends those that have not taken place.
    """
    rank, size, seconds = group.rank(), group.size(), timeout_of(group).total_seconds()
    store = prefix_store(f"bagua_syncbn/{what}", backend_and_store(group)[1])
    # Numbered, because a store may outlive a job, and the next job may use the same names for its groups.
    store = prefix_store(str(store.add(f"times/{rank}", 1)), store)
    leave_through(group, store)

    def together(key: str, value: Any, decide: Callable[[list[Any]], Any] = list) -> Any:
        try:
            return meet(prefix_store(key, store), rank, range(size), value, seconds, decide)
        except MeetingError as error:
            raise RuntimeError(f"first use of a group of {size} ranks failed: {error}") from None

    try:
        yield store, together
    except BaseException as error:
        for meeting in meetings:
            leave_meeting(prefix_store(meeting, store), rank, error)
        leave(group, f"rank {rank} has left the group: {type(error).__name__} in its first use")
        raise


def share(together: Callable[..., Any], here: Sequence[int], rank: int, seconds: float) -> tuple[str, Any]:
    """Has the ranks of a group that are ``here`` share memory, in two meetings of all ranks of the group.

    The first one makes the segment and tells its place, the others open it, and the first looks whether all are there.

    Returns:
        The reason why they do not and None; or "" and this rank's segment.
    """
    name, place, own, segment = f"bagua_syncbn:{secrets.token_hex(16)}", "", problem(), None
    is_first = rank == here[0]

    def begun(problems: list[str]) -> str:
        return first_problem(problems) or (
            "" if native_library().start_segment(segment, seconds) else "ranks see different memory"
        )

    try:
        if is_first and not own:
            segment, place = native_library().make_segment(name, len(here))
    except RuntimeError as error:
        own = str(error)
    brought = together("made", [own, name, place])
    reason, (_, name, place) = first_problem([problem for problem, *_ in brought]), brought[here[0]]
    if reason:
        return reason, None
    try:
        if not is_first:
            segment = native_library().open_segment(name, len(here), here.index(rank), place)
    except RuntimeError as error:
        own = str(error)
    reason = together("opened", own, begun)
    if not reason and rank:
        reason = begun([])
    return reason, None if reason else segment


def first_problem(problems: Sequence[str]) -> str:
    """Returns the first problem that a rank has, with the number of the rank, or ""."""
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), "")


def native_library() -> Any:
    """Returns the native library, or None where the ops did not load it at import of the package."""
    return sys.modules.get(f"{__package__.partition('.')[0]}._C")
