"""Communicators of the processes of a job, and the engines that make them.

Each way to communicate is in a file of its own. torch.distributed is the engine of every job, unless another one runs.
"""

from ..groups import LOCAL, Communicator, LocalCommunicator, RankGroup, engines
from . import torch_engine
from .c10d import TorchCommunicator

__all__ = ["LOCAL", "Communicator", "LocalCommunicator", "RankGroup", "TorchCommunicator"]

engines.register(torch_engine)
