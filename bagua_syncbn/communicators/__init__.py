"""Whom a synchronized layer talks to, knowing nothing of what is computed.

A :class:`Communicator` does two things with one small tensor: gather it and add it up. Everything that can synchronize
the processes of a job is one of these, in a file of its own. Replicas in threads of one process are not: a collective
in their backward could wait for one that is to run next on the same thread. They meet as a :class:`Replica` does.
"""

from .c10d import TorchCommunicator
from .groups import RankGroup
from .local import LOCAL, LocalCommunicator
from .peers import EVERYONE, Communicator, Peers, peers_of, sync_group
from .replicas import CallbackContext, Replica, Replicas
from .shared import SharedCommunicator, communicator_of
from .waiting import Begun

__all__ = [
    "EVERYONE",
    "LOCAL",
    "Begun",
    "CallbackContext",
    "Communicator",
    "LocalCommunicator",
    "Peers",
    "RankGroup",
    "Replica",
    "Replicas",
    "SharedCommunicator",
    "TorchCommunicator",
    "communicator_of",
    "peers_of",
    "sync_group",
]
