"""A group of one: no job, or a layer that must not communicate."""

from torch import Tensor


class LocalCommunicator:
    """Talks to nobody."""

    size = 1
    rank = 0

    def all_gather(self, packed: Tensor) -> Tensor:
        return packed.unsqueeze(0)

    def all_reduce(self, packed: Tensor) -> Tensor:
        return packed


LOCAL = LocalCommunicator()
