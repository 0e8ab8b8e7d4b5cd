"""Process groups for users, from the descriptions that layers accept."""

from typing import Any

from .communicators.torch_engine import torch_group_of
from .groups import spec_of


def sync_group(process_group: Any) -> Any:
    """Returns the process group of this rank for a description.

    All ranks of the job must take part in the first use of a description, which creates the groups. First
    uses of several descriptions must be in the same order on all ranks. A first use is this call or the first training
    forward of a layer. This call also creates the layers' group, a second group with the same ranks, so that your
    messages do not interfere with the layers' messages.

    Args:
        process_group: an int for that many consecutive ranks, ``"node"`` for the ranks of this host, a list of lists of
            ranks, or a 1-D :class:`torch.distributed.device_mesh.DeviceMesh`.

    Returns:
        A :class:`torch.distributed.ProcessGroup`: the default group if it has the same ranks. None without a job.

    Raises:
        TypeError: ``process_group`` has an unsupported type.
        ValueError: the number does not divide the job's ranks; the lists do not contain each rank of the job exactly
            once; ranks have different descriptions.

    Example::

        >>> group = bagua_syncbn.sync_group(8)
        >>> torch.distributed.all_reduce(tensor, group=group)
    """
    spec = spec_of(process_group)
    spec.communicator()
    return torch_group_of(spec)
