"""Chooses the transport of a group's CPU messages, and sends them between hosts.

Between hosts, a message takes three steps: the ranks on each host exchange it through shared memory, the carriers (the
first rank on each host) exchange their hosts' rows with collectives, and each carrier shares the result with its host.
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

from ..torch_internals.process_groups import backend_and_store, is_gloo_on_cpu, make_group, timeout_of
from .c10d import TorchCommunicator, end_with, leave_through, transports
from .jobs import host_name
from .meeting import Meeting
from .shared import GATHER, MOST_VALUES, SUM, SharedCommunicator, first_problem, problem, share

_log = logging.getLogger("bagua_syncbn")


class HostsCommunicator(SharedCommunicator):
    """A :class:`SharedCommunicator` for each host, plus a :class:`TorchCommunicator` between the carriers."""

    begins = False  # a carrier must wait for the ranks on its host
    __slots__ = ("_carriers", "_free", "_most", "_most_values", "_order")

    def __init__(self, group: Any, segment: Any, hosts: Sequence[Sequence[int]], carriers: Any) -> None:
        super().__init__(group, segment)
        self._most = max(map(len, hosts))  # rows per host in a gather; hosts with fewer ranks send zeros
        rows = {rank: i * self._most + j for i, here in enumerate(hosts) for j, rank in enumerate(here)}
        self._order = torch.tensor([rows[rank] for rank in range(self.size)])
        self._carriers = None if carriers is None else TorchCommunicator(carriers)
        self._free = Lock()
        # The last step of a gather shares all ranks' rows, which must fit together.
        self._most_values = {dtype: most // self.size for dtype, most in MOST_VALUES.items()}, MOST_VALUES

    def _exchange_over_hosts(self, kind: int, packed: Tensor, target: Tensor) -> Tensor:
        if not self._free.acquire(blocking=False):
            raise RuntimeError("process_group: another thread is using this group; use one thread at a time")
        try:
            sent = packed.new_zeros((self._most if kind == GATHER else 1, packed.numel()))
            self._begin(kind, packed, sent).wait()
            if self._carriers is None:
                result = torch.zeros_like(target)
            elif kind == GATHER:
                result = self._carriers.all_gather(sent.view(-1)).unflatten(1, sent.shape).flatten(0, 1)[self._order]
            else:
                result = self._carriers.all_reduce(sent[0])
            return self._begin(SUM, result, target).wait()  # only the carrier's row is nonzero
        except BaseException as error:
            self.leave(f"rank {self.rank} has left the group: {str(error) or type(error).__name__}")
            raise
        finally:
            self._free.release()


@transports.register
def shared_communicator(group: Any, meeting: Meeting) -> SharedCommunicator | None:
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
    return communicator


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
    # With several hosts, ranks wait a second longer than carriers, so that a carrier can report its timeout to them.
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
