"""Communication between ranks or replicas, independent of what layers compute.

A :class:`Communicator` gathers one small tensor of each rank, or adds these tensors up. Each way to synchronize the
processes of a job is a communicator in a file of its own.
"""

from .c10d import AsyncCollective, TorchCommunicator, communicator_of, is_large
from .communicator import LOCAL, Communicator, LocalCommunicator
from .group_spec import ENGINES, EVERYONE, GroupSpec, spec_of
from .groups import RankGroup, said_by, text_of_ranks

__all__ = [
    "ENGINES",
    "EVERYONE",
    "LOCAL",
    "AsyncCollective",
    "Communicator",
    "GroupSpec",
    "LocalCommunicator",
    "RankGroup",
    "TorchCommunicator",
    "communicator_of",
    "is_large",
    "said_by",
    "spec_of",
    "text_of_ranks",
]
