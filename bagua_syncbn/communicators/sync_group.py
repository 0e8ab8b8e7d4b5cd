"""Process groups for users, from the descriptions that layers accept."""

from typing import TYPE_CHECKING

from .._groups import ProcessGroupLike, spec_of
from .torch_engine import torch_group_of

if TYPE_CHECKING:  # some builds of torch have no torch.distributed
    from torch.distributed import ProcessGroup


def sync_group(process_group: ProcessGroupLike) -> "ProcessGroup | None":
    """Returns this rank's process group for a description, for your own messages.

    The first call with a description creates up to two groups of its ranks: the returned group, and the group that
    layers with this description use. All ranks of the job (for a mesh or a group, its members) must make this call,
    with several descriptions in the same order.
    Layers also create their group in their first training forward, under the same conditions.

    Args:
        process_group: any :data:`~bagua_syncbn.ProcessGroupLike` except a Communicator or a group of Bagua; None for
            all ranks.

    Returns:
        A :class:`torch.distributed.ProcessGroup`: the default group if it has the same ranks. None, which torch takes
        as the default group, if ``process_group`` is None or there is no job.

    Raises:
        TypeError: ``process_group`` has an unsupported type, or is a Communicator or a group of Bagua.
        ValueError: the number is not positive or does not divide the job's ranks; the lists do not contain each rank of
            the job exactly once; ranks have different descriptions; the group was destroyed or excludes this rank.
        RuntimeError: a mesh has several dimensions; a rank did not arrive within the timeout.

    Example::

        >>> group = bagua_syncbn.sync_group(8)
        >>> torch.distributed.all_reduce(tensor, group=group)
    """
    spec = spec_of(process_group)
    spec.communicator()
    return torch_group_of(spec)
