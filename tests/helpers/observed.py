"""Counts the collectives of a step; forbids host reads of device values."""

from contextlib import contextmanager

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from bagua_syncbn.communicators import shared
from tests.helpers.counted import EXCHANGE, CollectiveCounter
from tests.helpers.dispatched import reads_on_host

# The message of a forward or backward pass with few channels: an exchange through shared memory, or a method of c10d,
# whose name depends on the version of torch.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "_allgather_base"
MESSAGE = GATHER if shared.problem() else EXCHANGE
MESSAGE_IN_GRAPH = "all_gather_into_tensor" if shared.problem() else "exchange"


class ForbidHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not reads_on_host(func, args, kwargs), f"{func} reads a device value on the host"
        return func(*args, **(kwargs or {}))


@contextmanager
def collectives():
    """Counts the collectives of this process, in all threads, by c10d method."""
    with CollectiveCounter().installed() as counter:
        yield counter.collectives
