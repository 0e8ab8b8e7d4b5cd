"""Ranks of a torch.distributed job: NCCL, gloo and any other c10d backend."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed all_gather_into_tensor. Both are absent where torch is built without distributed.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

# Groups of backends that cannot gather into one tensor. All ranks of a group find out at the same call.
_gathers_into_list_only: WeakSet[Any] = WeakSet()

# Groups of this process by what they were asked for, so that all layers and copies that ask for the same share one.
# torch holds a group until it is destroyed; torch.compile traces a plain dict of these, and no WeakValueDictionary.
_groups: dict[Any, "ref[Any]"] = {}

DESTROYED = (
    "process_group: expected a live group, got one that was destroyed; run forward and backward before "
    "destroy_process_group()"
)


class TorchCommunicator:
    """Collectives of one :class:`torch.distributed.ProcessGroup`, of which this rank is a member.

    Graphs hold communicators, and outputs hold graphs. So it does not keep the group alive: one that outlives
    ``destroy_process_group`` has threads that abort the process when the interpreter ends.
    """

    __slots__ = ("_group", "rank", "size")

    def __init__(self, group: Any) -> None:
        self._group = ref(group)
        self.size: int = group.size()
        self.rank: int = group.rank()

    @property
    def group(self) -> Any:
        """The group; raises RuntimeError where it was destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError(DESTROYED)
        return group

    def all_gather(self, packed: Tensor) -> Tensor:
        group = self.group
        gathered = packed.new_empty(self.size * packed.numel())  # gloo takes the concatenated form only
        if group not in _gathers_into_list_only:
            try:
                _all_gather_single(gathered, packed, group=group)
                return gathered.view(self.size, -1)
            except RuntimeError as error:
                if not isinstance(error, NotImplementedError) and "does not support" not in str(error):
                    raise
                _gathers_into_list_only.add(group)
        dist.all_gather(list(gathered.chunk(self.size)), packed, group=group)
        return gathered.view(self.size, -1)

    def all_reduce(self, packed: Tensor) -> Tensor:
        dist.all_reduce(packed, group=self.group)
        return packed


def default_group() -> Any:
    """Returns the job's default group, or None where there is no job."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def is_process_group(process_group: object) -> bool:
    """Whether ``process_group`` is a c10d group; raises ValueError if it is one that excludes this rank."""
    if not dist.is_available():
        return False
    excluded = dist.GroupMember.NON_GROUP_MEMBER  # an int in some versions of torch, an object in others
    if type(process_group) is type(excluded) and process_group == excluded:
        raise ValueError(
            "process_group: expected a group that this rank is a member of, "
            "got GroupMember.NON_GROUP_MEMBER, which new_group returns to the ranks that it leaves out"
        )
    return isinstance(process_group, dist.ProcessGroup)


@dataclass(frozen=True)
class RankGroup:
    """A process group by the global ranks of its members: what a layer keeps of its group when it is copied or saved.

    It can travel where a :class:`torch.distributed.ProcessGroup` cannot. In a process without a job it stands for no
    group at all.
    """

    ranks: tuple[int, ...]

    def resolve(self) -> Any:
        """Returns the group of these ranks, made by its members together at their first use of it if need be.

        Raises:
            ValueError: this job has no such ranks, or this rank is not among them.
        """
        world = default_group()
        if world is None:
            return None

        def make() -> Any:
            if world.rank() not in self.ranks or max(self.ranks) >= world.size():
                raise ValueError(
                    f"process_group: expected ranks of this job that include this one, rank {world.rank()} of "
                    f"{world.size()}, got {self.ranks}; assign the process_group attribute of the loaded layers, or "
                    "convert the model again with a group of this job"
                )
            return dist.new_group(list(self.ranks), use_local_synchronization=True)

        return made_once(self.ranks, make)


class WeakGroup:
    """A c10d group as a layer has it: not kept alive, and with the ranks that a copy of the layer is to have."""

    def __init__(self, group: Any) -> None:
        self._group = ref(group)
        self.description = describe_process_group(group)

    def get(self) -> Any:
        """Returns the group, or itself where that was destroyed."""
        group = self._group()
        return self if group is None else group

    def __repr__(self) -> str:
        return f"<destroyed process group {self.description}>"


def describe_process_group(process_group: Any) -> Any:
    """Returns what to keep of a live c10d group in a copy or a file: None for the default one, else its ranks."""
    if process_group is default_group():
        return None
    if not is_alive(process_group):
        raise ValueError(DESTROYED)
    ranks = tuple(dist.get_process_group_ranks(process_group))
    _groups[ranks] = ref(process_group)
    return RankGroup(ranks)


def made_once(key: Any, make: Callable[[], Any]) -> Any:
    """Returns the group that ``make`` returned for ``key`` before in this job; makes it if there is none or no more.

    Raises:
        RuntimeError: it would have to be made while torch.compile traces, which does not see collectives of the host.
    """
    known = _groups.get(key)
    group = None if known is None else known()
    if group is None or not is_alive(group):
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "process_group: expected a group that exists when torch.compile traces its use, got one that is still "
                "to be made; before, call bagua_syncbn.sync_group(process_group) or the model itself, on all ranks"
            )
        # Nor may the compiler look in after a graph break. It takes a second to import; without that there is none.
        group = torch.compiler.disable(make)() if "torch._dynamo" in sys.modules else make()
        _groups[key] = ref(group)
    return group


def is_alive(group: Any) -> bool:
    """Whether ``group`` belongs to the job that runs now, and was not destroyed."""
    try:
        dist.get_rank(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True
