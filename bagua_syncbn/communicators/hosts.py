"""Exchange between several hosts: shared memory on each, and collectives between one carrier (the first rank) per host.

A message takes three steps: the ranks of each host exchange it, the carriers exchange the rows of their hosts, and each
carrier spreads the result on its host. A rank that begins a message without waiting cannot carry. It marks its row
instead; then all ranks send the message again through the collectives of the whole group.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from threading import Lock
from typing import Any
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals.groups import device_of, is_gloo_on_cpu, make_group, timeout_of
from .c10d import AsyncCollective, TorchCommunicator, is_alive, leave_through, transports
from .jobs import host_name
from .shared import GATHER, MOST_BYTES, SUM, Published, SharedCommunicator, first_use, log_way, share

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
        """Returns the rows of all ranks, or their sum as one row, each with a mark at its end."""
        message, sent = self._marked(kind, packed, 0)
        super()._exchange(kind, message, sent)
        if self._carriers is None:
            result = packed.new_zeros((self.size if kind == GATHER else 1, message.numel()))
        elif kind == GATHER:
            result = self._carriers.all_gather(sent.view(-1)).view(-1, message.numel())[self._order]
        else:
            result = self._carriers.all_reduce(sent.view(-1)).view(1, -1)
        if sent[:, -1].any():  # all ranks of the host see the mark
            return sent
        return super()._exchange(SUM, result, result)  # only the carrier's is not zero

    def _marked(self, kind: int, packed: Tensor, mark: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's message with its mark, and a buffer for the rows of its host."""
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


@transports.register  # after shared.py, which serves groups on one host
def _communicator_of(group: Any) -> HostsCommunicator | None:
    """Returns a communicator of ``group``, whose ranks call this together; None if collectives serve it better.

    They do with a single host, with one rank per host, and if some ranks cannot share memory.
    """
    if not is_gloo_on_cpu(group):
        return None
    rank, seconds = group.rank(), timeout_of(group).total_seconds()
    with first_use(group, "hosts") as (store, together):
        rows = together([*host_name(), secrets.token_hex(8)])
        names = [tuple(row[:2]) for row in rows]
        hosts = [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
        if not 1 < len(hosts) < group.size():
            return None
        here = next(here for here in hosts if rank in here)
        # Longer than the carriers' time-out, whose error the carrier passes on to its host.
        reason, segment = share(together, here, rank, seconds + 1)
        if reason:
            return None
        carriers = None
        if rank == here[0]:
            members = [dist.get_process_group_ranks(group)[first] for first, *_ in hosts]
            name, world = f"{group.group_name}:{rows[0][2]}", dist.group.WORLD
            carriers = make_group(world, members, group, store, name, device_of(world), False, "gloo")
            leave_through(carriers, store)
            finalize(group, _end, ref(carriers)).atexit = False  # type: ignore[misc]  # the job ends all groups
    log_way(group, f"shared memory on each of {len(hosts)} hosts, collectives between them")
    return HostsCommunicator(group, segment, hosts, carriers)


def _end(held: ref[Any]) -> None:
    if (carriers := held()) is not None and is_alive(carriers):
        dist.destroy_process_group(carriers)
