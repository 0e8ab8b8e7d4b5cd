"""What a step does beside computing: collectives, and reads of device values on the host."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

# Calls that read a device value on the host. On a GPU each of them waits for the stream.
HOST_READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_to_cpu", "masked_select", "unique")


class ForbidHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name.split("::")[1] not in HOST_READS, f"{func} reads a device value on the host"
        return func(*args, **(kwargs or {}))


def collectives(prof):
    """Counts the c10d operations that were profiled."""
    return Counter(event.name for event in prof.events() if event.name.startswith("c10d::"))
