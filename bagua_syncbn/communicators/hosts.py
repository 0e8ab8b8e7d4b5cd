"""Chooses the transport of a group's CPU messages, and sends them between hosts.

Between hosts, a message takes three steps: the ranks on each host exchange it through shared memory, the carriers (the
first rank on each host) exchange their hosts' rows with collectives, and each carrier shares the result with its host.
A carrier that begins a message without waiting cannot relay it. It marks its row instead; all ranks then resend the
message with collectives of the whole group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals.groups import backend_and_store, is_gloo_on_cpu, make_group, timeout_of
from .c10d import AsyncCollective, TorchCommunicator, end_with, leave_through, transports
from .jobs import host_name
from .meeting import Meeting
from .shared import GATHER, MOST_BYTES, SUM, Published, SharedCommunicator, first_problem, problem, share

_log = logging.getLogger("bagua_syncbn")

_BEGIN = {GATHER: TorchCommunicator.begin_all_gather, SUM: TorchCommunicator.begin_all_reduce}


class HostsCommunicator(SharedCommunicator):
    """A :class:`SharedCommunicator` for each host, plus a :class:`TorchCommunicator` between the carriers."""

    __slots__ = ("_carriers", "_free", "_most", "_order")

    def __init__(self, group: Any, segment: Any, hosts: Sequence[Sequence[int]], carriers: Any) -> None:
        super().__init__(group, segment)
        self._most = max(map(len, hosts))  # rows per host in a gather; hosts with fewer ranks send zeros
        rows = {rank: i * self._most + j for i, here in enumerate(hosts) for j, rank in enumerate(here)}
        self._order = torch.tensor([rows[rank] for rank in range(self.size)])
        self._carriers = None if carriers is None else TorchCommunicator(carriers)
        self._free = Lock()

    def _fits(self, kind: int, packed: Tensor) -> bool:
        values = (self.size if kind == GATHER else 1) * (packed.numel() + 1)  # in the last step
        return super()._fits(kind, packed) and values * packed.element_size() <= MOST_BYTES

    def _exchange(self, kind: int, packed: Tensor, target: Tensor) -> Tensor:
        if not self._free.acquire(blocking=False):
            raise RuntimeError("process_group: another thread is using this group; use one thread at a time")
        try:
            rows = self._cross(kind, packed)
            if rows[:, -1].any():
                return target.copy_(_BEGIN[kind](self, packed.clone()).wait())
            return target.copy_(rows[:, :-1].view_as(target))
        except BaseException as error:
            self.leave(f"rank {self.rank} has left the group: {str(error) or type(error).__name__}")
            raise
        finally:
            self._free.release()

    def _cross(self, kind: int, packed: Tensor) -> Tensor:
        """Returns all ranks' rows, or a single row with their sum; the last element of each row is the mark."""
        message, sent = self._marked(kind, packed, 0)
        super()._exchange(kind, message, sent)
        if self._carriers is None:
            result = packed.new_zeros((self.size if kind == GATHER else 1, message.numel()))
        elif kind == GATHER:
            result = self._carriers.all_gather(sent.view(-1)).view(-1, message.numel())[self._order]
        else:
            result = self._carriers.all_reduce(sent.view(-1)).view(1, -1)
        if sent[:, -1].any():  # all ranks on the host read the mark
            return sent
        return super()._exchange(SUM, result, result)  # only the carrier's row is nonzero

    def _marked(self, kind: int, packed: Tensor, mark: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's message with the mark, and a buffer for the host's rows."""
        message = packed.new_full((packed.numel() + 1,), mark)
        message[:-1] = packed
        return message, packed.new_zeros((self._most if kind == GATHER else 1, message.numel()))

    def _begin(self, kind: int, packed: Tensor) -> AsyncCollective:
        message, sent = self._marked(kind, packed, 1)
        sent[0] = message
        self._native.publish(self._segment, kind, message.data_ptr(), message.numel(), message.element_size())
        carried = [] if self._carriers is None else [_BEGIN[kind](self._carriers, sent.view(-1))]
        self._begun.append(Published(self, sent, *carried, _BEGIN[kind](self, packed.clone())))
        return self._begun[-1]


@transports.register
def communicator_of(group: Any, meeting: Meeting) -> SharedCommunicator | None:
    """Returns a communicator through shared memory, or None if some ranks cannot use it. All ranks call this.

    Raises:
        RuntimeError: a rank did not answer within the group's timeout.
    """
    communicator: Any = None
    reason = "its CPU messages do not go over gloo"
    if is_gloo_on_cpu(group):
        leave_through(group, meeting.store)
        reason, communicator = _connect(group, meeting)
    way = f"collectives: {reason}" if reason else "shared memory"
    _log.debug("group %s, rank %d of %d: through %s", group.group_name, group.rank(), group.size(), way)
    return communicator  # type: ignore[no-any-return]


def _connect(group: Any, meeting: Meeting) -> tuple[str, SharedCommunicator | None]:
    """Returns "" and the communicator, or the reason for using collectives and None."""
    rank, own = group.rank(), problem()
    brought = meeting.exchange([own, [] if own else sorted(os.sched_getaffinity(0)), host_name()])
    names = [tuple(name) for *_, name in brought]
    hosts = [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
    reason = first_problem(row[0] for row in brought) or "each rank is on a different host" * (len(hosts) == len(names))
    if reason:
        return reason, None
    here = next(here for here in hosts if rank in here)
    spins = len({core for other in here for core in brought[other][1]}) >= len(here)  # each rank has a core
    # Between hosts, longer than the carriers' timeout, so that carriers can pass on its error.
    reason, segment = share(meeting, here, rank, timeout_of(group).total_seconds() + (len(hosts) > 1), spins)
    if reason or len(hosts) == 1:
        return reason, None if segment is None else SharedCommunicator(group, segment)
    carriers = None
    if rank == here[0]:
        members = [dist.get_process_group_ranks(group)[first] for first, *_ in hosts]
        store = backend_and_store(group)[1]
        carriers = make_group(members, group, store, f"{group.group_name}:carriers", backend="gloo")
        leave_through(carriers, meeting.store)
        end_with(group, carriers)
    return "", HostsCommunicator(group, segment, hosts, carriers)
