"""Synchronization with nobody there: all that a layer does over several ranks, in one process."""

from torch import Tensor


class Twin:
    """A communicator of two ranks. The second one does not exist, and always sends what the first one sends.

    Given to a layer as ``process_group`` it makes it take the path of several ranks, which a group of one never does.
    Mean, variance and gradients are those of this rank alone; what is counted is counted twice.
    """

    size = 2
    rank = 0

    def all_gather(self, packed: Tensor) -> Tensor:
        return packed.repeat(2, 1)

    def all_reduce(self, packed: Tensor) -> Tensor:
        return packed.mul_(2)
