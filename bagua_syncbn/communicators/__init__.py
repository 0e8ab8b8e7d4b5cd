"""Whom a synchronized layer talks to, knowing nothing of what is computed.

A :class:`Communicator` does two things with one small tensor: gather it and add it up. Everything that can synchronize
the processes of a job is one of these, in a file of its own. Replicas in threads of one process are not: a collective
in their backward could wait for one that is to run next on the same thread. They meet as a :class:`Replica` does.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor

from . import torch as _torch
from .groups import check_description, describe_group, is_description, sync_group
from .local import LOCAL, LocalCommunicator
from .replicas import CallbackContext, Replica, Replicas
from .torch import RankGroup, TorchCommunicator

__all__ = [
    "LOCAL",
    "CallbackContext",
    "Communicator",
    "LocalCommunicator",
    "RankGroup",
    "Replica",
    "Replicas",
    "TorchCommunicator",
    "check_process_group",
    "describe_group",
    "resolve_communicator",
    "sync_group",
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
    """
    if process_group is None or isinstance(process_group, (RankGroup, Communicator)):
        return
    if _torch.is_process_group(process_group):
        return
    if not is_description(process_group):
        got = repr(process_group) if isinstance(process_group, str) else type(process_group).__name__
        raise TypeError(
            "process_group: expected None, a torch.distributed.ProcessGroup, an int, 'node', a list of lists of "
            f"ranks, a 1-D DeviceMesh or a Communicator, got {got}"
        )
    check_description(process_group)


def resolve_communicator(process_group: object = None) -> Communicator:
    """Returns the communicator for ``process_group``.

    Args:
        process_group: None for the default group of the job, or of no job: then each process is alone. Otherwise a
            :class:`torch.distributed.ProcessGroup`, a description as :func:`sync_group` takes it, a
            :class:`Communicator`, or the :class:`RankGroup` that a layer holds after it was copied or loaded.

    Raises:
        TypeError, ValueError: as :func:`check_process_group`.
    """
    if process_group is None:
        group = _torch.default_group()
    elif isinstance(process_group, RankGroup):
        group = process_group.resolve()
    elif _torch.is_process_group(process_group):
        group = process_group
    elif is_description(process_group):
        group = sync_group(process_group)
    else:
        check_process_group(process_group)
        assert isinstance(process_group, Communicator)
        return process_group
    return LOCAL if group is None or group.size() == 1 else TorchCommunicator(group)
