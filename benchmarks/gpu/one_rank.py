"""The collectives of a group of one rank, on the path of several: for a machine that has one device."""

import torch.distributed as dist
from torch import Tensor

from ..core.one_rank import EmptyPeer

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class OneRankGroup(EmptyPeer):
    """Makes the real collectives of ``group``, which has one rank; the default group if None."""

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        super().__init__()
        self.group = group or dist.group.WORLD

    def all_gather(self, packed: Tensor) -> Tensor:
        gathered = self.rows_for(packed)
        _all_gather_single(gathered[0], packed, group=self.group)
        return gathered

    def all_reduce(self, packed: Tensor) -> Tensor:
        dist.all_reduce(packed, group=self.group)
        return packed
