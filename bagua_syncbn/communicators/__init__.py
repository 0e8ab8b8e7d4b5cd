"""Communicators of the processes of a job, and the engines that make them.

Each way to communicate is in a file of its own. torch.distributed is the engine of every job, unless another one runs.
"""

from ..groups import ENGINES, LOCAL, Communicator, LocalCommunicator, RankGroup
from . import torch_engine
from .c10d import TorchCommunicator

__all__ = ["LOCAL", "Communicator", "LocalCommunicator", "RankGroup", "TorchCommunicator"]

ENGINES.append(torch_engine)
