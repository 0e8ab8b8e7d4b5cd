"""torch.distributed as an engine: its jobs, process groups and meshes."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch.distributed as dist

from ..groups import DESTROYED, FORKED, LOCAL, Communicator, GroupSpec, RankGroup
from ..groups.spec import Ranks, Rule
from . import c10d
from .c10d import IS_AVAILABLE, is_alive
from .jobs import Job, in_one_piece, job_of

# Returns the job's default group, or None without a job. A partial, because every call of a layer makes this call.
default_group: Callable[[], Any] = partial(getattr, dist.group, "WORLD") if IS_AVAILABLE else lambda: None


def is_in_job() -> bool:
    """Returns whether torch.distributed runs a job. Compiled code guards on this without seeing the default group."""
    return IS_AVAILABLE and (dist.is_initialized() or dist.group.WORLD is not None)


def rank_and_size() -> tuple[int, int]:
    """Returns the rank of this process in the job, and the number of its ranks."""
    return dist.get_rank(), dist.get_world_size()


def given(process_group: Any) -> tuple[Rule, Callable[[], Any] | None] | None:
    """Returns the rule of a group or mesh, None for all ranks, and a weak reference to it; None for other objects.

    Raises:
        ValueError: the group or mesh excludes this rank, or was destroyed, or a mesh has several dimensions.
    """
    group = process_group
    if is_mesh(group):
        _check_mesh(group)
        if not is_in_job():  # the job of the mesh has ended
            return RankGroup(tuple(sorted(group.mesh.tolist()))), None
        group = group.get_group()
    elif not is_process_group(group):
        return None
    return job_of(default_group()).remember(group), ref(group)


def ranks_of(rule: Rule) -> Ranks:
    """Returns the ranks of this rank's group; all ranks of the job make the first use of most rules together."""
    return running_job().ranks_of(rule)


def communicator_of(rule: Rule, given: Any) -> Communicator:
    """Returns the layers' communicator; another one for each ``given`` group."""
    job, group = running_job(), None if rule is None else given
    if group is not None and not is_alive(group):
        raise RuntimeError(DESTROYED)

    def make() -> Communicator:
        return LOCAL if len(job.ranks_of(rule)) == 1 else c10d.communicator_of(job.layers_group(rule, group))

    return in_one_piece(make)


# Default groups of the parent, in a forked child.
_inherited: WeakSet[Any] = WeakSet()


def _note_inherited() -> None:
    if default_group() is not None:
        _inherited.add(default_group())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_inherited)


def running_job() -> Job:
    """Returns the running job; raises RuntimeError in a forked child of a process of that job."""
    world = default_group()
    if world in _inherited:
        raise RuntimeError(FORKED)
    return job_of(world)


def is_process_group(process_group: object) -> bool:
    """Returns whether ``process_group`` is a c10d group.

    Raises:
        ValueError: the group excludes this rank, or was destroyed.
    """
    if not IS_AVAILABLE:
        return False
    excluded = dist.GroupMember.NON_GROUP_MEMBER  # an int in some versions of torch, an object in others
    if type(process_group) is type(excluded) and process_group == excluded:
        raise ValueError(
            "process_group: expected a group that this rank is a member of, "
            "got GroupMember.NON_GROUP_MEMBER, which new_group returns to the ranks that it leaves out"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        return False
    if not is_alive(process_group):
        raise ValueError(DESTROYED)
    return True


def is_mesh(process_group: object) -> bool:
    """Returns whether ``process_group`` is a DeviceMesh."""
    if not IS_AVAILABLE:
        return False
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(process_group, DeviceMesh)


def _check_mesh(mesh: Any) -> None:
    if mesh.ndim != 1:
        raise ValueError(
            f"process_group: expected a DeviceMesh of 1 dimension, got one of {mesh.ndim}; name one, as in mesh['dp']"
        )
    if is_in_job() and mesh.get_coordinate() is None:
        raise ValueError(f"process_group: expected a DeviceMesh with this rank, rank {dist.get_rank()}, got {mesh}")


def torch_group_of(spec: GroupSpec) -> Any:
    """Returns a c10d group for the user, which the members make together if needed; None for the job's group.

    Raises:
        TypeError: ``spec`` stands for no c10d group, as with a Communicator.
    """
    given, world = spec.process_group, default_group()
    is_torchs = is_process_group(given)
    if spec.given_communicator is not None or (spec.given is not None and spec.given() is not None and not is_torchs):
        raise TypeError(
            "process_group: expected None, a torch.distributed.ProcessGroup or a description of one where torch "
            f"runs the job, got {type(given).__name__}"
        )
    if given is None or world is None or is_torchs:
        return given if world is not None else None
    return in_one_piece(lambda: job_of(world).users_group(spec.rule))


def group_before(spec: GroupSpec) -> Any:
    """Returns the group that a layer had before conversion, even if a copy holds only the ranks of that group."""
    described_only = spec.given is None and isinstance(spec.rule, RankGroup)
    return torch_group_of(spec) if described_only else spec.process_group
