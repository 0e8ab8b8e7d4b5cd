"""Synchronization with nobody there: all that a layer does over several ranks, in one process."""

import torch.distributed as dist
from torch import Tensor

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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


class OneRankGroup(Twin):
    """A twin that makes the real collectives of a group of one rank, the default one: for a machine with one device.

    The missing rank costs one copy forward and one launch backward besides.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def all_gather(self, packed: Tensor) -> Tensor:
        gathered = packed.new_empty(2, packed.numel())
        _all_gather_single(gathered[0], packed, group=self._group)
        gathered[1] = packed
        return gathered

    def all_reduce(self, packed: Tensor) -> Tensor:
        dist.all_reduce(packed, group=self._group)
        return packed.mul_(2)
