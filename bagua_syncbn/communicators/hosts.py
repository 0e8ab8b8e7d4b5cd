"""Ranks on several hosts: shared memory on each, and collectives between the first ranks, which carry for their hosts.

A message has three steps: the ranks of each host meet, the carriers meet, each carrier spreads the result on its host.
A rank that only begins a message cannot carry, since it waits for nobody. It sets a mark behind the values; then all
ranks send the message once more, through the collectives of the whole group.
"""

from __future__ import annotations

import re
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
from .shared import GATHER, MOST_BYTES, SUM, Published, SharedCommunicator, first_problem, first_use, log_way, share

_BEGIN = {GATHER: TorchCommunicator.begin_all_gather, SUM: TorchCommunicator.begin_all_reduce}


class HostsCommunicator(SharedCommunicator):
    """A :class:`SharedCommunicator` of the ranks on each host, around a :class:`TorchCommunicator` of carriers."""

    __slots__ = ("_carriers", "_free", "_here", "_most", "_order")

    def __init__(self, group: Any, segment: Any, hosts: Sequence[Sequence[int]], carriers: Any) -> None:
        super().__init__(group, segment)
        self._here = next(here for here in hosts if self.rank in here)
        self._most = max(map(len, hosts))  # rows of each host in a gather; absent ranks have zeros
        rows = {rank: i * self._most + j for i, here in enumerate(hosts) for j, rank in enumerate(here)}
        self._order = torch.tensor([rows[rank] for rank in range(self.size)])
        self._carriers = None if carriers is None else TorchCommunicator(carriers)
        self._free = Lock()

    def _fits(self, kind: int, packed: Tensor) -> bool:
        values = (self.size if kind == GATHER else 1) * (packed.numel() + 1)  # in the last step
        return super()._fits(kind, packed) and values * packed.element_size() <= MOST_BYTES

    def _exchange(self, kind: int, packed: Tensor, target: Tensor) -> Tensor:
        if not self._free.acquire(blocking=False):
            raise RuntimeError("process_group: expected one thread at a time to use a group, got another one in it")
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
        """Returns the rows of all ranks, or one with their sum, and marks behind them."""
        message, sent = self._marked(kind, packed, 0)
        self._turn(kind, message, sent)
        if self._carriers is None:
            result = packed.new_zeros((self.size if kind == GATHER else 1, message.numel()))
        elif kind == GATHER:
            result = self._carriers.all_gather(sent.view(-1)).view(-1, message.numel())[self._order]
        else:
            result = self._carriers.all_reduce(sent.view(-1)).view(1, -1)
        if sent[:, -1].any():  # as all ranks of the host see
            return sent
        return self._turn(SUM, result, result)  # the others have zeros

    def _marked(self, kind: int, packed: Tensor, mark: int) -> tuple[Tensor, Tensor]:
        """Returns the message of this rank, and room for what its host sends."""
        message = packed.new_full((packed.numel() + 1,), mark)
        message[:-1] = packed
        return message, packed.new_zeros((self._most if kind == GATHER else 1, message.numel()))

    def _turn(self, kind: int, message: Tensor, target: Tensor) -> Tensor:
        """Exchanges a message on the host. Errors have the numbers of ranks in the whole group."""
        try:
            return super()._exchange(kind, message, target)
        except RuntimeError as error:
            told, *why = str(error).split(" destroyed it: ", 1)
            told = re.sub(r"\brank (\d+)", lambda found: f"rank {self._here[int(found[1])]}", told)
            raise RuntimeError(*why or [told]) from error  # a rank that has left has these numbers

    def _begin(self, kind: int, packed: Tensor) -> AsyncCollective:
        message, sent = self._marked(kind, packed, 1)
        sent[0] = message
        self._native.publish(self._segment, kind, message.data_ptr(), message.numel(), message.element_size())
        carried = [] if self._carriers is None else [_BEGIN[kind](self._carriers, sent.view(-1))]
        self._begun.append(Published(self, sent, *carried, _BEGIN[kind](self, packed.clone())))
        return self._begun[-1]


@transports.register  # after shared.py, which serves groups on one host
def _communicator_of(group: Any) -> HostsCommunicator | None:
    """Returns the communicator of ``group``, which its ranks make together; None where they use its collectives.

    They do on one host, with one rank on each, and if the ranks of a host cannot share memory.
    """
    if not is_gloo_on_cpu(group):
        return None
    rank, seconds = group.rank(), timeout_of(group).total_seconds()
    with first_use(group, "hosts", "hosts", "made", "opened", "shared") as (store, together):
        names = [tuple(name) for name in together("hosts", host_name())]
        hosts = [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
        if not 1 < len(hosts) < group.size():
            return None
        here = next(here for here in hosts if rank in here)
        # The carriers' time-out is the group's; a host waits for what its carrier tells after it.
        reason, segment = share(together, here, rank, seconds + 1)
        brought = together("shared", [reason, secrets.token_hex(8)])
        if first_problem([problem for problem, _ in brought]):
            return None
        carriers = None
        if rank == here[0]:
            members = [dist.get_process_group_ranks(group)[first] for first, *_ in hosts]
            name, world = f"{group.group_name}:{brought[0][1]}", dist.group.WORLD
            carriers = make_group(world, members, group, store, name, device_of(world), False, "gloo")
            leave_through(carriers, store)
            finalize(group, _end, ref(carriers)).atexit = False  # type: ignore[misc]  # the job ends all groups
    log_way(group, f"shared memory on each of {len(hosts)} hosts, collectives between them")
    return HostsCommunicator(group, segment, hosts, carriers)


def _end(held: ref[Any]) -> None:
    if (carriers := held()) is not None and is_alive(carriers):
        dist.destroy_process_group(carriers)
