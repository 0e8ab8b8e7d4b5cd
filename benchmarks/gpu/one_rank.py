"""Synchronization with nobody there: all that a layer does over several ranks, on a machine that has one device."""

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class OneRankGroup:
    """A communicator of two ranks, of which this one is the first; the other's batch is empty, and it does not exist.

    Given to a layer as ``process_group`` it makes it take the path of several ranks, which a group of one never does,
    with the real collectives of that group. The statistics are those of this rank, since a count of 0 weighs nothing.

    Args:
        group: of one rank; the default group if None.
    """

    size = 2
    rank = 0

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        self.group = group or dist.group.WORLD
        # By what they hold: made once, so that no launch is spent on the row of zeros. Layers whose rows are alike
        # share them, one after another on one stream.
        self._gathered: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def all_gather(self, packed: Tensor) -> Tensor:
        key = packed.numel(), packed.dtype, packed.device
        if key not in self._gathered:
            self._gathered[key] = packed.new_zeros(2, packed.numel())
        gathered = self._gathered[key]
        _all_gather_single(gathered[0], packed, group=self.group)
        return gathered

    def all_reduce(self, packed: Tensor) -> Tensor:
        dist.all_reduce(packed, group=self.group)
        return packed
