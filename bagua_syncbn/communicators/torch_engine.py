"""torch.distributed as an engine: jobs, process groups and meshes; process groups for users."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._groups import DESTROYED, FORKED, Communicator, GroupSpec, ProcessGroupLike, RankGroup, spec_of
from .._groups.spec import NO_RANKS, Rule, is_in_job, world
from .._torch.modules import is_replicated_in_place
from .c10d import IS_AVAILABLE, is_alive
from .jobs import Job

is_running = is_in_job


def rule_and_getter(process_group: Any) -> tuple[Rule, Callable[[], Any] | None] | None:
    """Returns the rule of a group or mesh (None for all ranks) and a reference to the group; None for other objects.

    Raises:
        ValueError: the group was destroyed.
        RuntimeError: the mesh has several dimensions.
    """
    group = process_group
    if is_in_job() and type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
        return NO_RANKS, None
    if IS_AVAILABLE and isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            select = f"mesh[{names[0]!r}]" if names else "mesh.get_group(0)"
            got = f"{group.ndim} dimensions" + f" {names}" * (names is not None)
            raise RuntimeError(f"process_group: expected a 1-D DeviceMesh, got {got}; select one, such as {select}")
        group = group.get_group()
    elif not is_process_group(group):
        return None
    rule = None if group is world() else RankGroup(tuple(sorted(dist.get_process_group_ranks(group))))
    return rule, partial(_live, ref(group))


def _live(get_group: Callable[[], Any]) -> Any:
    group = get_group()
    return group if group is not None and is_alive(group) else None


def communicator_of(rule: Rule, given: Any, creates: bool) -> Communicator | None:
    """Returns the layers' communicator, or None if it does not exist and ``creates`` is False."""
    if creates and given is not None and not is_alive(given):
        raise RuntimeError(DESTROYED)
    return running_job().communicator("layers", rule, None if rule is None else given, creates)


def is_data_parallel(module: nn.Module) -> bool:
    """Returns whether ``module`` is a DistributedDataParallel, or was made data parallel in place."""
    return isinstance(module, DistributedDataParallel) or is_replicated_in_place(module)


_jobs: WeakKeyDictionary[Any, Job] = WeakKeyDictionary()  # keyed by default group

# The parent's default groups, in a forked child.
_inherited: WeakSet[Any] = WeakSet()


def _note_inherited() -> None:
    if world() is not None:
        _inherited.add(world())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_inherited)


def running_job() -> Job:
    """Returns the running job. Raises RuntimeError in a forked child of the job's process."""
    job = world()
    if job in _inherited:
        raise RuntimeError(FORKED)
    return _jobs.get(job) or _jobs.setdefault(job, Job(job))


def is_process_group(process_group: object) -> bool:
    """Returns whether ``process_group`` is a c10d group. Raises ValueError if the group was destroyed."""
    if not IS_AVAILABLE or not isinstance(process_group, dist.ProcessGroup):
        return False
    if not is_alive(process_group):
        raise ValueError(DESTROYED)
    return True


def torch_group_of(spec: GroupSpec) -> Any:
    """Returns a c10d group for the user, which the members create if needed; None for the job's group.

    Raises:
        TypeError: ``spec`` has no c10d group, e.g. a Communicator.
    """
    given = spec.process_group
    if is_process_group(given):
        return given
    if spec.given_communicator is not None or (spec.get_given is not None and spec.get_given() is not None):
        raise TypeError(
            "process_group: expected None, a torch.distributed.ProcessGroup or a description in a torch job, "
            f"got {type(given).__name__}"
        )
    return None if given is None or world() is None else running_job().users_group(spec.rule)


def group_before(spec: GroupSpec) -> Any:
    """Returns the group that a layer had before conversion, even if a copy holds only its ranks."""
    if spec.rule == NO_RANKS:
        return dist.GroupMember.NON_GROUP_MEMBER
    described_only = spec.get_given is None and isinstance(spec.rule, RankGroup)
    return torch_group_of(spec) if described_only else spec.process_group


def sync_group(process_group: ProcessGroupLike) -> "dist.ProcessGroup | None":
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
