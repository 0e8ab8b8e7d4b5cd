"""Communicators with a simulated second rank, to run a layer's synchronized path in one process."""

import torch.distributed as dist
from torch import Tensor

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Twin:
    """A communicator of two ranks, the second of which is simulated and sends the same messages as the first.

    A layer with this ``process_group`` takes the multi-rank path, unlike in a group of one. Mean, variance and
    gradients equal the local ones; counts are doubled.
    """

    size = 2
    rank = 0

    def all_gather(self, packed: Tensor) -> Tensor:
        return packed.repeat(2, 1)

    def all_reduce(self, packed: Tensor) -> Tensor:
        return packed.mul_(2)


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
