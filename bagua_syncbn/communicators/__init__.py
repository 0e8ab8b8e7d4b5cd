"""Communicators, one file for each transport, and the engines that create them.

torch.distributed is the engine of every job unless another engine runs.
"""

from .._groups import LOCAL, Communicator, RankGroup, engines
from . import torch_engine
from .c10d import TorchCommunicator

__all__ = ["LOCAL", "Communicator", "RankGroup", "TorchCommunicator"]

engines.append(torch_engine)
