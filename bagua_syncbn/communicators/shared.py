"""Shared-memory exchange for small CPU messages between ranks on a host; other messages use c10d collectives.

Ranks agree on whether to use shared memory when they create their communicator. After that, the choice depends only on
message size.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from .._groups import DESTROYED
from .._torch.process_groups import is_gloo_on_cpu, timeout_of
from .c10d import AsyncCollective, TorchCommunicator, failed, leave_through, raise_if_left
from .meeting import Meeting, host_name

_log = logging.getLogger("bagua_syncbn")

_WANTED = os.environ.get("BAGUA_SYNCBN_EXCHANGE") or "shared"
if _WANTED not in ("shared", "collectives"):
    raise ImportError(f'BAGUA_SYNCBN_EXCHANGE: expected "shared" or "collectives", got {_WANTED!r}')

# Kinds of messages, and the most values in 64 KiB; equal to csrc/exchange/segment.h. Compiled ranks agree too.
GATHER, SUM = 0, 1
_MOST_VALUES = {torch.float32: 2**14, torch.float64: 2**13}


def _through_memory(name: str, kind: int) -> Any:
    """Returns the method ``name``, which sends small messages on CPU through shared memory and all other messages
    through collectives.

    The exchange is inlined, because every forward and backward runs it.
    """
    collective = getattr(TorchCommunicator, name)

    def send(self: Any, packed: Tensor) -> Any:
        if not packed.is_cpu or packed.numel() > _MOST_VALUES.get(packed.dtype, -1):
            return collective(self, packed)
        if torch.compiler.is_compiling() or type(packed) is not Tensor:
            return torch.ops.bagua_syncbn.exchange(packed, self.name, self.size, kind == SUM)
        packed, numel = packed.contiguous(), packed.numel()
        target = packed if kind == SUM else packed.new_empty((self.size, numel))
        try:
            self._native.exchange(
                self._segment, kind, packed.data_ptr(), numel, packed.element_size(), target.data_ptr()
            )
        except RuntimeError as error:
            self._raise_reason(error)
        return target

    return send


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
        finalize(group, self._close).atexit = False  # the system frees the memory at exit

    all_gather = _through_memory("all_gather", GATHER)
    all_reduce = _through_memory("all_reduce", SUM)

    def begin(self, packed: Tensor, sums: bool) -> AsyncCollective:
        if not packed.is_cpu or packed.numel() > _MOST_VALUES.get(packed.dtype, -1):
            return super().begin(packed, sums)
        packed, kind = packed.contiguous(), SUM if sums else GATHER
        target = packed if sums else packed.new_empty((self.size, packed.numel()))
        try:
            self._native.publish(self._segment, kind, packed.data_ptr(), packed.numel(), packed.element_size())
        except RuntimeError as error:
            self._raise_reason(error)
        self._begun.append(Published(self, target))
        return self._begun[-1]

    def _raise_reason(self, error: RuntimeError) -> NoReturn:
        """Raises the native library's ``error``, or a clearer one if a rank left or the group was destroyed."""
        if self._segment is None or "has left" in str(error):
            raise_if_left(self.group)
        raise error

    def leave(self, why: str) -> None:
        super().leave(why)  # before leave_segment(), after which peers read `why`
        with suppress(RuntimeError):  # closed already, or in use by another thread
            self._native.leave_segment(self._segment)
        self._close()

    def _close(self) -> None:
        self._segment = None


class Published(AsyncCollective):
    """A message that this rank has published without waiting for peers."""

    def __init__(self, communicator: SharedCommunicator, target: Tensor) -> None:
        self._communicator, self._target = communicator, target

    def wait(self) -> Tensor:
        communicator = self._communicator
        if self in communicator._begun:
            communicator._begun.remove(self)
            try:
                communicator._native.collect(communicator._segment, self._target.data_ptr())
            except RuntimeError as error:
                communicator._raise_reason(error)
        return self._target


check_headers: Callable[[Tensor, SharedCommunicator, bool], None] = lambda message, communicator, sums: None  # noqa: E731
"""Raises RuntimeError if a message of compiled code has different headers. Set by ``_reliability``."""

# An opaque op for compiled code, so that compiled and eager ranks send the same messages. It takes the group's name,
# like torch's collectives, because a graph keeps its constants alive.
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
    try:
        for begun in communicator._begun[:]:  # messages of an eager call that raised
            begun.wait()
        # A copy for sums, because the result must not be the input.
        message = communicator.all_reduce(packed.clone()) if sums else communicator.all_gather(packed)
    except RuntimeError as error:
        raise failed("compiled code", communicator, error) from error
    check_headers(message, communicator, sums)
    return message


_library.impl("exchange", _exchange_by_name, "CPU")


def layers_communicator(group: Any, meeting: Meeting) -> TorchCommunicator:
    """Returns the layers' communicator for a new group, through shared memory if possible. All ranks must call this.

    Raises:
        RuntimeError: a rank did not answer within the group's timeout.
    """
    reason, segment = "its CPU messages do not go over gloo", None
    if is_gloo_on_cpu(group):
        leave_through(group, meeting.store)
        reason, segment = _share(group, meeting)
    way = f"collectives: {reason}" if reason else "shared memory"
    _log.debug("group %s, rank %d of %d: through %s", group.group_name, group.rank(), group.size(), way)
    return TorchCommunicator(group) if reason else SharedCommunicator(group, segment)


def _share(group: Any, meeting: Meeting) -> tuple[str, Any]:
    """Maps memory for the ranks of a group.

    Returns:
        A reason and a segment: "" and this rank's segment, or why a rank of the group cannot share memory and None.
    """
    rank, size, own, place, segment = group.rank(), group.size(), problem(), "", None
    brought = meeting.exchange([own, [] if own else sorted(os.sched_getaffinity(0)), host_name()])
    reason = _first_problem(row[0] for row in brought)
    reason = reason or "its ranks are on several hosts" * (len({tuple(host) for *_, host in brought}) > 1)
    if reason:
        return reason, None
    spins = len({core for _, cores, _ in brought for core in cores}) >= size  # each rank has a core
    name, seconds = f"bagua_syncbn:{secrets.token_hex(16)}", timeout_of(group).total_seconds()
    for opens in (rank == 0, rank != 0):  # rank 0 creates the memory, then its peers open it
        try:
            if opens:
                segment, place = native_library().map_segment(name, size, seconds, spins, rank, place)
        except RuntimeError as error:
            own = str(error)
        brought = meeting.exchange([own, name, place])
        reason, (_, name, place) = _first_problem(row[0] for row in brought), brought[0]
        if reason:
            return reason, None
    return "", segment


def problem() -> str:
    """Returns the reason that this process cannot use shared memory with any group, or ""."""
    if _WANTED == "collectives":
        return "BAGUA_SYNCBN_EXCHANGE=collectives"
    if os.environ.get("BAGUA_SYNCBN_KERNELS") == "reference":
        return "BAGUA_SYNCBN_KERNELS=reference, which loads no native library"
    return "" if hasattr(native_library(), "map_segment") else "no native library, or not on Linux"


def _first_problem(problems: Iterable[str]) -> str:
    """Returns the first rank's nonempty problem, or ""."""
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), "")


def native_library() -> Any:
    """Returns the native library, or None if it was not loaded at import."""
    return sys.modules.get(f"{__name__.partition('.')[0]}._C")
