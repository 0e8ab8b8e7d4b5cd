"""The interface of a group of ranks: a size, a rank and two collectives."""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Communicator(Protocol):
    """Exchanges packed tensors between the ranks of a group. All ranks make the same calls in the same order.

    Tensors are float32 or float64. If its backend adds no float64 up, a communicator may have an attribute
    ``adds_float64 = False``: its ranks gather statistics, however many they are.
    """

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


class LocalCommunicator:
    """Group of one rank: gathers and sums are the rank's own tensor."""

    size = 1
    rank = 0

    def all_gather(self, packed: Tensor) -> Tensor:
        return packed.unsqueeze(0)

    def all_reduce(self, packed: Tensor) -> Tensor:
        return packed


LOCAL = LocalCommunicator()
