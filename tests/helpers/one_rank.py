"""Communicators with a simulated second rank: layers take the path of several ranks in one process."""

import torch.distributed as dist
from torch import Tensor

from bagua_syncbn.verification.steps import Twin

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class OneRankGroup(Twin):
    """A twin that also runs real collectives in a group of one rank (default: torch's default group).

    Useful on machines with one device. Simulating the second rank costs an extra copy in forward and a launch in
    backward.
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
