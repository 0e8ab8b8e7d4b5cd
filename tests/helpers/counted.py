"""Counts this process's collectives, through c10d and shared memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from bagua_syncbn.communicators.shared import SharedCommunicator

# Methods of process groups that communicate, in all versions of torch.
_COLLECTIVES = ("all", "broadcast", "reduce", "gather", "scatter")
EXCHANGE = "_exchange"  # method of the communicator for shared memory


class CollectiveCounter:
    """Counts all threads' collectives while it is installed."""

    def __init__(self) -> None:
        self.collectives: Counter[str] = Counter()  # by method
        self.waits = 0
        self.shared_bytes = 0  # sent by this rank through shared memory
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
            if name == "wait":  # counts only finished waits, because layers wait in slices
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
        # Takes originals from vars(): a compiled method from getattr would not bind again.
        methods = [name for name in vars(dist.ProcessGroup) if name.lstrip("_").startswith(_COLLECTIVES)]
        places = [*((dist.ProcessGroup, name) for name in methods), (dist.Work, "wait"), (SharedCommunicator, EXCHANGE)]
        originals = [(owner, name, vars(owner)[name]) for owner, name in places]
        for owner, name in places:
            setattr(owner, name, self._counted(getattr(owner, name), name))
        try:
            yield self
        finally:
            for owner, name, method in originals:
                setattr(owner, name, method)
