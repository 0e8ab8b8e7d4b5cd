"""Whom a synchronized layer talks to, knowing nothing of what is computed.

A :class:`Communicator` does two things with one small tensor: gather it and add it up. Everything that can synchronize
the processes of a job is one of these, in a file of its own. Replicas in threads of one process are not: a collective
in their backward could wait for one that is to run next on the same thread. They meet as a :class:`Replica` does.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from . import bagua, c10d
from .c10d import RankGroup, TorchCommunicator, WeakGroup
from .groups import (
    check_description,
    describe_group,
    described_group,
    held_weakly,
    is_description,
    sync_group,
    to_torch_group,
)
from .local import LOCAL, LocalCommunicator
from .replicas import CallbackContext, Replica, Replicas

__all__ = [
    "LOCAL",
    "CallbackContext",
    "Communicator",
    "LocalCommunicator",
    "RankGroup",
    "Replica",
    "Replicas",
    "TorchCommunicator",
    "WeakGroup",
    "check_process_group",
    "describe_group",
    "held_weakly",
    "resolve_communicator",
    "sync_group",
    "to_torch_group",
]


@runtime_checkable
class Communicator(Protocol):
    """Exchanges packed tensors between the ranks of a group. All ranks make the same calls in the same order."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""

    def all_gather(self, packed: Tensor) -> Tensor:
        """Returns (size, n): row ``r`` is what rank ``r`` passed as ``packed``, contiguous of shape (n)."""

    def all_reduce(self, packed: Tensor) -> Tensor:
        """Returns the sum over ranks of ``packed``, contiguous of shape (n); ``packed`` may be overwritten."""


def check_process_group(process_group: object) -> None:
    """Raises unless ``process_group`` is something that :func:`resolve_communicator` can take on this rank.

    Raises:
        TypeError: it is none of the supported kinds.
        ValueError: it is a group that this rank is not a member of, or a description that fits no job, or not this one.
        RuntimeError: it is Bagua's, and Bagua is not initialized; it was destroyed.
    """
    if process_group is None or isinstance(process_group, (RankGroup, Communicator)):
        return
    if isinstance(process_group, WeakGroup):
        raise RuntimeError(c10d.DESTROYED)
    if bagua.is_process_group(process_group) or c10d.is_process_group(process_group):
        return
    if not is_description(process_group):
        got = repr(process_group) if isinstance(process_group, str) else type(process_group).__name__
        raise TypeError(
            "process_group: expected None, a torch.distributed.ProcessGroup, a BaguaProcessGroup, an int, 'node', a "
            f"list of lists of ranks, a 1-D DeviceMesh or a Communicator, got {got}"
        )
    check_description(process_group)


def resolve_communicator(process_group: object = None) -> Communicator:
    """Returns the communicator for ``process_group``.

    Args:
        process_group: None for the default group of the job, or of no job: then each process is alone. Otherwise a
            :class:`torch.distributed.ProcessGroup`, a ``BaguaProcessGroup``, a description as :func:`sync_group` takes
            it, a :class:`Communicator`, or the :class:`RankGroup` that a layer holds after it was copied or loaded.
            In a Bagua job all of them but the Communicator lead to Bagua's communicator among their ranks.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`check_process_group`.
    """
    if isinstance(process_group, (LocalCommunicator, TorchCommunicator, bagua.BaguaCommunicator)):
        return process_group
    ranks = _ranks_in_bagua_job(process_group) if bagua.is_initialized() else None
    if ranks is not None:
        return LOCAL if len(ranks) == 1 else bagua.communicator_among(ranks)
    if process_group is None:
        group = c10d.default_group()
    elif isinstance(process_group, RankGroup):
        group = process_group.resolve()
    elif c10d.is_process_group(process_group):
        group = process_group
    elif is_description(process_group):
        group = described_group(process_group)
    else:
        check_process_group(process_group)
        assert isinstance(process_group, Communicator)
        return process_group
    return LOCAL if group is None or group.size() == 1 else TorchCommunicator(group)


def _ranks_in_bagua_job(process_group: Any) -> Sequence[int] | None:
    """The ranks of the job that ``process_group`` stands for; None for what has its own way to them, or is no group."""
    if process_group is None:
        process_group = bagua.default_group()
    if isinstance(process_group, RankGroup) or bagua.is_process_group(process_group):
        ranks: Sequence[int] = process_group.ranks
        bagua.check_ranks(ranks)
        return ranks
    if is_description(process_group):
        return dist.get_process_group_ranks(described_group(process_group))
    return dist.get_process_group_ranks(process_group) if c10d.is_process_group(process_group) else None
