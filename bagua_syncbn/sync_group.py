"""Process groups for users, by the descriptions that layers take."""

from typing import Any

from ..communicators.torch_engine import is_mesh, torch_group_of
from ..groups import NODE, spec_of


def sync_group(process_group: Any) -> Any:
    """Returns the process group of this rank that a description stands for.

    The first use of a description in a job finds out who is in its groups, so all ranks of the job make that use
    together, whether it is this call or the first training forward of a layer, and first uses of several descriptions
    in the same order. This call is the way to have it done at a moment of your choice. It makes the group of the layers
    too, which is another one of the same ranks, so that what you send through this one cannot get in their way.

    Args:
        process_group: an int for that many consecutive ranks, ``"node"`` for the ranks of this host, a list of lists of
            ranks, or a 1-D :class:`torch.distributed.device_mesh.DeviceMesh`.

    Returns:
        A :class:`torch.distributed.ProcessGroup`; the default one if all ranks of the job are in the group. None where
        there is no job.

    Raises:
        TypeError: ``process_group`` is of another kind.
        ValueError: the job's ranks do not divide into groups of this number; a rank of the job is in no list, or the
            job has no rank that is in one; numbers or lists that make sense in no job; ranks gave different ones.

    Example::

        >>> group = bagua_syncbn.sync_group(8)
        >>> torch.distributed.all_reduce(tensor, group=group)
    """
    of_its_kind = type(process_group) in (int, list, tuple) or is_mesh(process_group)
    if not of_its_kind and not (isinstance(process_group, str) and process_group == NODE):
        raise TypeError(
            'process_group: expected an int, "node", a list of lists of ranks or a 1-D DeviceMesh, '
            f"got {type(process_group).__name__}"
        )
    spec = spec_of(process_group)
    spec.communicator()
    return torch_group_of(spec)
