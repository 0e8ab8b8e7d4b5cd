"""Groups by what they are to be rather than by which ranks they have: ``8``, ``"node"``, lists of ranks, a mesh.

A description can be written down before there is a job, copied and saved. In a job it stands for the group that this
rank is in, made once and shared by all layers that have it; without a job, for no group at all.
"""

import socket
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

from . import bagua
from .c10d import RankGroup, WeakGroup, default_group, describe_process_group, is_process_group, made_once

NODE = "node"

_Partition = tuple[tuple[int, ...], ...]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def sync_group(process_group: Any) -> Any:
    """Returns the process group of this rank that a description stands for, the one that layers with it use.

    The first use of a description in a job makes its groups, so all ranks of the job make that use together, whether
    it is this call or the first training forward of a layer, and make those of several descriptions in the same order.
    This call is the way to have it done at a moment of your choice. A mesh has its groups already.

    Args:
        process_group: an int for that many consecutive ranks, ``"node"`` for the ranks of this host, a list of lists of
            ranks, or a 1-D :class:`torch.distributed.device_mesh.DeviceMesh`.

    Returns:
        A :class:`torch.distributed.ProcessGroup`; the default one if all ranks of the job are in the group. None where
        there is no job.

    Raises:
        TypeError: ``process_group`` is none of these.
        ValueError: the job's ranks do not divide into groups of this number; a rank of the job is in no list, or the
            job has no rank that is in one; numbers or lists that make sense in no job.

    Example::

        >>> group = bagua_syncbn.sync_group(8)
        >>> torch.distributed.all_reduce(tensor, group=group)
    """
    if not is_description(process_group):
        raise TypeError(
            'process_group: expected an int, "node", a list of lists of ranks or a 1-D DeviceMesh, '
            f"got {type(process_group).__name__}"
        )
    return described_group(process_group)


def described_group(description: Any) -> Any:
    """:func:`sync_group` of what :func:`is_description` accepts. Each forward pass comes here."""
    world = default_group()
    if world is None or _is_mesh(description):
        check_description(description)
        return None if world is None else description.get_group()

    def make() -> Any:
        check_description(description)
        partition = _partition(description, world)
        # By the partition too, so that descriptions of the same groups share them.
        return made_once(partition, lambda: _make_groups(partition, world))

    # Lists as tuples, unchecked: there are groups only of such as make sense.
    return made_once(tuple(map(tuple, description)) if isinstance(description, (list, tuple)) else description, make)


def to_torch_group(process_group: Any) -> Any:
    """Returns the c10d group that ``process_group`` stands for, made by the members together if need be; None stays.

    Raises:
        TypeError: it is neither a c10d group nor a description or the ranks of one, such as a Communicator.
    """
    if process_group is None or is_process_group(process_group):
        return process_group
    if isinstance(process_group, RankGroup):
        return process_group.resolve()
    if is_description(process_group):
        return described_group(process_group)
    raise TypeError(
        "process_group: expected None, a torch.distributed.ProcessGroup or a description of one where torch runs the "
        f"job, got {type(process_group).__name__}"
    )


def describe_group(process_group: Any) -> Any:
    """Returns what to keep of ``process_group`` in a copy or a file: a description of it, where it is not one itself.

    A mesh holds process groups, which cannot travel, so of it remain the ranks too.
    """
    if isinstance(process_group, WeakGroup):
        return process_group.description
    if bagua.is_process_group(process_group):
        return None if process_group is bagua.default_group() else RankGroup(tuple(process_group.ranks))
    if is_process_group(process_group):
        return describe_process_group(process_group)
    if _is_mesh(process_group):
        if default_group() is None:
            return RankGroup(tuple(process_group.mesh.tolist()))
        return describe_process_group(process_group.get_group())
    return process_group


def held_weakly(process_group: Any) -> Any:
    """Returns what a layer keeps of ``process_group``: a weak reference to a c10d group, or to that of a mesh.

    Raises:
        ValueError: as :func:`check_description`, for a mesh in a job.
    """
    if _is_mesh(process_group) and default_group() is not None:
        check_description(process_group)
        process_group = process_group.get_group()
    return WeakGroup(process_group) if is_process_group(process_group) else process_group


def is_description(process_group: object) -> bool:
    """Whether ``process_group`` is of a kind that :func:`sync_group` takes."""
    if isinstance(process_group, (list, tuple)):
        return all(isinstance(ranks, (list, tuple)) for ranks in process_group)
    if isinstance(process_group, int):
        return not isinstance(process_group, bool)
    return (isinstance(process_group, str) and process_group == NODE) or _is_mesh(process_group)


def check_description(process_group: Any) -> None:
    """Raises for a description that this process can know to be wrong, without communication.

    Raises:
        TypeError: something other than an int stands where a rank is expected.
        ValueError: as :func:`sync_group`.
    """
    world = default_group()
    if _is_mesh(process_group):
        _check_mesh(process_group, world)
    elif isinstance(process_group, int):
        if process_group < 1:
            raise ValueError(f"process_group: expected at least 1 consecutive rank, got {process_group}")
        if world is not None and world.size() % process_group:
            raise ValueError(
                f"process_group: expected a number that divides the {world.size()} ranks of the job, "
                f"got {process_group}, which leaves {world.size() % process_group} of them over"
            )
    elif process_group != NODE:
        _check_lists(process_group)
        if world is not None:
            _check_lists_cover(process_group, world)


def _partition(description: Any, world: Any) -> _Partition:
    """The ranks of all groups that ``description`` stands for, in one order however they were given."""
    if description == NODE:
        return _exchange_hosts(world)
    if isinstance(description, int):
        return tuple(tuple(range(first, first + description)) for first in range(0, world.size(), description))
    return tuple(sorted(tuple(sorted(ranks)) for ranks in description))


def _make_groups(partition: _Partition, world: Any) -> Any:
    """Makes all groups of ``partition``, and returns the one of this rank: the default one, if it is the only one.

    Made by all ranks, because new_group with use_local_synchronization finds the members of a group together only if
    they are in the same number of groups already: it names the group by that.
    """
    if len(partition) == 1:
        return world
    own = None
    for ranks in partition:
        group = dist.new_group(list(ranks))
        if world.rank() in ranks:
            own = group
    return own


def _exchange_hosts(world: Any) -> _Partition:
    hosts: list[Any] = [None] * world.size()
    dist.all_gather_object(hosts, _host())
    ranks: dict[Any, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return tuple(tuple(members) for members in ranks.values())


def _host() -> tuple[str, str]:
    # The name alone would join machines that share one, as images with a fixed name do.
    return socket.gethostname(), _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _check_lists(lists: Sequence[Sequence[Any]]) -> None:
    for ranks in lists:
        for rank in ranks:
            if not isinstance(rank, int) or isinstance(rank, bool):
                raise TypeError(f"process_group: expected lists of ranks, each an int, got {rank!r} in {lists}")
    if not lists or not all(lists):
        raise ValueError(f"process_group: expected at least one list, each of at least one rank, got {lists}")
    ranks = sorted(rank for ranks in lists for rank in ranks)
    if ranks[0] < 0:
        raise ValueError(f"process_group: expected ranks from 0 on, got {ranks[0]} in {lists}")
    for rank, following in pairwise(ranks):
        if rank == following:
            raise ValueError(f"process_group: expected each rank in one list, once, got rank {rank} twice in {lists}")


def _check_lists_cover(lists: Sequence[Sequence[int]], world: Any) -> None:
    given, expected = {rank for ranks in lists for rank in ranks}, set(range(world.size()))
    for what, ranks in (("no list for rank", expected - given), ("no such rank as", given - expected)):
        if ranks:
            numbers = ", ".join(map(str, sorted(ranks)))
            raise ValueError(
                f"process_group: expected each of the {world.size()} ranks of the job in one list, "
                f"got {what} {numbers} in {lists}"
            )


def _is_mesh(process_group: object) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(process_group, DeviceMesh)


def _check_mesh(mesh: Any, world: Any) -> None:
    if mesh.ndim != 1:
        raise ValueError(
            f"process_group: expected a DeviceMesh of 1 dimension, got one of {mesh.ndim}; name one, as in mesh['dp']"
        )
    if world is not None and mesh.get_coordinate() is None:
        raise ValueError(f"process_group: expected a DeviceMesh with this rank, rank {world.rank()}, got {mesh}")
