"""Collectives of this process, counted: those of c10d's groups, and messages of layers through shared memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from bagua_syncbn.communicators.shared import SharedCommunicator

# The methods behind torch.distributed's functions, under the names of all versions of torch.
_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "all_gather_single",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
)
EXCHANGE = "_exchange"  # through shared memory


class CollectiveCounter:
    """Counts while it is installed, in all threads."""

    def __init__(self) -> None:
        self.collectives: Counter[str] = Counter()  # by their method
        self.waits = 0
        self.shared_bytes = 0  # that this rank sent through shared memory
        self._inside = False

    def _counted(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside = True
            try:
                result = method(*args, **kwargs)
            finally:
                self._inside = False
            if name == "wait":  # one that came to an end: the layer waits in slices
                self.waits += 1
            else:
                self.collectives[name] += 1
            if name == EXCHANGE:
                self.waits += 1
                self.shared_bytes += args[2].nbytes
            return result

        return counted

    @contextmanager
    def installed(self) -> Iterator["CollectiveCounter"]:
        # As they lie in the classes: what getattr returns of a compiled method does not bind again when it is put back.
        places = [(dist.ProcessGroup, name) for name in _METHODS if name in vars(dist.ProcessGroup)]
        places.append((dist.Work, "wait"))
        places.append((SharedCommunicator, EXCHANGE))
        originals = [(owner, name, vars(owner)[name]) for owner, name in places]
        for owner, name in places:
            setattr(owner, name, self._counted(getattr(owner, name), name))
        try:
            yield self
        finally:
            for owner, name, method in originals:
                setattr(owner, name, method)
