"""The collectives of a group of one rank, on the path of several: for a machine that has one device."""

import torch.distributed as dist
from torch import Tensor

from ..core.one_rank import Twin

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class OneRankGroup(Twin):
    """Makes the real collectives of ``group``, which has one rank; the default group if None.

    Besides, one copy forward and one launch backward, for what the rank that is not there would have sent.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        self.group = group or dist.group.WORLD

    def all_gather(self, packed: Tensor) -> Tensor:
        gathered = packed.new_empty(2, packed.numel())
        _all_gather_single(gathered[0], packed, group=self.group)
        gathered[1] = packed
        return gathered

    def all_reduce(self, packed: Tensor) -> Tensor:
        dist.all_reduce(packed, group=self.group)
        return packed.mul_(2)
