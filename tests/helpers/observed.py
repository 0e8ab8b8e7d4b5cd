"""What a step does beside computing: collectives, and reads of device values on the host."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.core.dispatch import reads_on_host


class ForbidHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not reads_on_host(func, args, kwargs), f"{func} reads a device value on the host"
        return func(*args, **(kwargs or {}))


def collectives(prof):
    """Counts the c10d operations that were profiled."""
    return Counter(event.name for event in prof.events() if event.name.startswith("c10d::"))
