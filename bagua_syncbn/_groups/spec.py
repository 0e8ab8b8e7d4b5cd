"""Specifications of the ranks that a layer synchronizes with: :func:`spec_of` accepts any ``process_group`` argument.

A rule is the normalized form of a description such as ``8``, ``"node"`` or lists of ranks. Rules do not need a job, and
can be copied and saved. In a single-rank job, every rule selects that rank.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import nn

from .._errors import restored
from .._torch.autograd import untraced
from .communicator import LOCAL, Communicator
from .texts import text_of_argument

NODE = "node"

Ranks: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class RankGroup:
    """Global ranks of a process group's members. Pickles and files contain it instead of the group.

    Without a job, it selects this process.
    """

    ranks: tuple[int, ...]


NO_RANKS = RankGroup(())
"""Group of a rank outside of a group: torch's ``GroupMember.NON_GROUP_MEMBER``. The first training call raises."""

Rule: TypeAlias = None | int | str | tuple[Ranks, ...] | RankGroup
"""All ranks, a number of consecutive ranks, the ranks on this host, lists of ranks, or the members of a group."""


def members_by(rule: Rule, rank: int, size: int) -> Ranks | None:
    """Returns the members of ``rank``'s group in a job of ``size`` ranks; None for "node".

    "node" has no members until ranks exchange their hosts.

    Raises:
        ValueError: ``rule`` does not fit the job. Every rule fits a single-rank job.
    """
    if size == 1:
        return (0,)
    if rule is None:
        return tuple(range(size))
    if isinstance(rule, str):
        return None
    if isinstance(rule, int):
        if size % rule:
            raise ValueError(f"process_group: expected a divisor of the job's {size} ranks, got {rule}")
        first = rank - rank % rule
        return tuple(range(first, first + rule))
    if rule == NO_RANKS:
        raise ValueError(
            f"process_group: new_group returned NON_GROUP_MEMBER, because rank {rank} is not in its group; train this "
            "layer on the group's ranks only, or set layer.process_group"
        )
    if isinstance(rule, RankGroup):
        if rank not in rule.ranks or max(rule.ranks) >= size:
            raise ValueError(
                f"process_group: expected ranks of this job that include this one, rank {rank} of {size}, got "
                f"{rule.ranks}; set layer.process_group, or convert the model again with a group of this job"
            )
        return rule.ranks
    if sorted(rank for ranks in rule for rank in ranks) != list(range(size)):
        raise ValueError(
            f"process_group: expected each of the job's {size} ranks in exactly one list, got {description_of(rule)}"
        )
    return next(tuple(sorted(ranks)) for ranks in rule if rank in ranks)


def description_of(rule: Rule) -> Any:
    """Returns ``rule`` as a ``process_group`` argument."""
    return [list(ranks) for ranks in rule] if isinstance(rule, tuple) else rule


def text_of(rule: Rule) -> str:
    """Returns a description of ``rule`` for messages."""
    return "the group of all ranks" if rule is None else f"process_group={description_of(rule)!r}"


# Returns the job's group of all ranks, or None without a job. Every layer call uses it; a partial is fastest.
world: Callable[[], Any] = partial(getattr, dist.group, "WORLD") if dist.is_available() else lambda: None


def is_in_job() -> bool:
    """Returns whether a job is running. Compiled code guards on the result, and does not access the default group."""
    # torch.compile takes is_initialized() as a constant, without a guard. If it is False, reading WORLD adds the guard.
    return dist.is_available() and (dist.is_initialized() or dist.group.WORLD is not None)


def rank_and_size() -> tuple[int, int]:
    """Returns this process's rank in the job, and the job's number of ranks; (0, 1) without a job."""
    return (dist.get_rank(), dist.get_world_size()) if is_in_job() else (0, 1)


class Engine(Protocol):
    """Creates the communicators of layers: torch.distributed in every job, unless Bagua runs in addition."""

    def is_running(self) -> bool:
        """Returns whether this engine was started."""

    def rule_and_getter(self, process_group: Any) -> tuple[Rule, Callable[[], Any] | None] | None:
        """Returns the rule of this engine's group and a function that returns the live group; None otherwise.

        Raises an error if the group excludes this rank or was destroyed.
        """

    def communicator_of(self, rule: Rule, given: Any, creates: bool) -> Communicator | None:
        """Returns the layers' communicator, which all its ranks create at the first use. torch has one for each
        ``given`` group.

        If ``creates`` is False, returns None for a communicator that does not exist yet.
        """

    def is_data_parallel(self, module: nn.Module) -> bool:
        """Returns whether this engine has made ``module`` itself data parallel."""


engines: list[Engine] = []
"""Engines in ascending priority: the last running engine creates communicators."""

DESTROYED = (
    "process_group: expected a live group, got a destroyed one; run forward and backward before destroy_process_group()"
)
FORKED = (
    "cannot synchronize in a forked process, such as a DataLoader worker; call the model in the parent, call it in "
    "evaluation mode, or start the worker by spawn"
)


_job_names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by default group
_job_numbers = count(1)


class _Job(type):
    @property
    def name(cls) -> str:
        """A name of the running job that no other job of this process has; "" without a job."""
        job = world()
        return "" if job is None else _job_names.get(job) or _job_names.setdefault(job, f"job {next(_job_numbers)}")


class RunningJob(metaclass=_Job):
    """Tells compiled code which job runs: torch.compile does not trace a property of a metaclass. Before each call,
    compiled code compares the property's value, and is compiled again if it differs.
    """


class GroupSpec:
    """Specification of the ranks that a layer synchronizes with. Pickles contain only the description.

    Args:
        rule: selects ranks of a job.
        get_given: returns the user's group, or None after it was destroyed.
        given_communicator: the user's communicator.
    """

    def __init__(
        self,
        rule: Rule = None,
        get_given: Callable[[], Any] | None = None,
        given_communicator: Communicator | None = None,
    ) -> None:
        self.rule = rule
        self.given_communicator = given_communicator
        self.get_given = get_given
        # Equal for equal descriptions, for keys of steps.
        self.identity: Any = rule if get_given is None and given_communicator is None else self
        self._communicator: Communicator | None = None  # the last one created; valid only in its job
        self._job: Callable[[], Any] = lambda: None  # the job that created it
        self._job_name = ""  # for compiled code

    def communicator(self) -> Communicator:
        """Returns the communicator in the running job, or LOCAL without a job. All ranks create it at the first use.

        Raises:
            ValueError: this job has no such ranks, or ranks have different descriptions.
            RuntimeError: the given group was destroyed, or a rank did not arrive in time.
        """
        if self.given_communicator is not None:
            return self.given_communicator
        if torch.compiler.is_compiling():
            # The tracer must not access a group: compiled code keeps alive all objects that the tracer accesses.
            if not is_in_job():
                return LOCAL
            self._create_untraced()
            if self._job_name != RunningJob.name:  # a guard: later jobs compile again
                raise RuntimeError(DESTROYED)
            assert self._communicator is not None
            return self._communicator
        return self.communicator_if_ready() or self._ask_engine(creates=True)

    def communicator_if_ready(self) -> Communicator | None:
        """Returns the communicator if it exists in the running job, else None; LOCAL without a job."""
        job = world()
        if job is not None and self._job() is job:
            return self._communicator
        if self.given_communicator is not None:
            return self.given_communicator
        return LOCAL if job is None and self.get_given is None else self._ask_engine(creates=False)

    @untraced
    def _create_untraced(self) -> None:
        """Creates the communicator while torch.compile traces the caller."""
        if self.communicator_if_ready() is None:
            self._ask_engine(creates=True)

    def _ask_engine(self, creates: bool) -> Any:
        """Returns the engine's communicator, and caches it for this job. All ranks must call it to create one.

        Engines that start later do not replace the communicator.
        """
        job, given = world(), None if self.get_given is None else self.get_given()
        if job is None or (self.get_given is not None and given is None):
            if creates:
                raise RuntimeError(DESTROYED)
            return None
        engine = next(engine for engine in reversed(engines) if engine.is_running())
        communicator = engine.communicator_of(self.rule, given, creates)
        if communicator is not None:
            self._job, self._job_name, self._communicator = ref(job), RunningJob.name, communicator
        return communicator

    def size(self) -> int:
        """Returns the number of ranks. Creates the group only for "node", where ranks must exchange their hosts."""
        if self.given_communicator is not None:
            return self.given_communicator.size
        return self.communicator().size if torch.compiler.is_dynamo_compiling() else len(self.members() or ())

    def members(self) -> Ranks | None:
        """Returns the ranks in the group, which is created only for "node"; None if they are not known."""
        communicator, (rank, size) = self.given_communicator, rank_and_size()
        if communicator is None:
            ranks = members_by(self.rule, rank, size)
            if ranks is not None:
                return ranks
            communicator = self.communicator()
        return (rank,) if communicator.size == 1 else getattr(communicator, "ranks", None)

    @property
    def given(self) -> Any:
        """The user's live group or communicator; None if it was destroyed, or if there is only a description."""
        return self.given_communicator if self.get_given is None else self.get_given()

    @property
    def process_group(self) -> Any:
        """The user's ``process_group``, or the description if the group was destroyed."""
        given = self.given
        return self.description if given is None else given

    @property
    def description(self) -> Any:
        """The group's serializable form, for checkpoints."""
        return description_of(self.rule) if self.given_communicator is None else self.given_communicator

    def __deepcopy__(self, memo: Any) -> "GroupSpec":
        return spec_of(copy.deepcopy(self.description, memo)) if self.rule is None else self

    def __reduce__(self) -> tuple[Any, ...]:
        # Plain data: files contain no class of this package.
        rule = self.rule
        saved = ("ranks", rule.ranks) if isinstance(rule, RankGroup) else ("process_group", self.description)
        return OrderedDict, (), None, None, iter([saved])

    def __repr__(self) -> str:
        if self.get_given is None or self.description is not None:
            return repr(self.description)
        return "destroyed" if self.get_given() is None else repr(RankGroup(self.members() or ()))


EVERYONE = GroupSpec()


def spec_in_file(saved: Any) -> GroupSpec:
    """Returns the specification in a file. Does not raise in jobs without these ranks."""
    if "ranks" in saved:
        return GroupSpec(RankGroup(tuple(saved["ranks"])))
    group = saved["process_group"]
    return spec_of(group) if group is None or isinstance(group, Communicator) else GroupSpec(_rule_of(group))


replacement: GroupSpec | None = None
"""The specification of every group inside :func:`replaced_groups`; None outside."""


@contextmanager
def replaced_groups(communicator: Communicator) -> Iterator[None]:
    """Makes ``spec_of`` return ``communicator`` for all groups, in all threads. Layers keep their groups."""
    global replacement

    def restore() -> None:
        global replacement
        replacement = None

    with restored(restore):
        replacement = GroupSpec(given_communicator=communicator)
        yield


def spec_of(process_group: Any) -> GroupSpec:
    """Returns the specification of ``process_group``.

    Raises:
        TypeError: ``process_group`` has an unsupported type.
        ValueError: this rank is not in the group, or the description is invalid or does not fit this job.
        RuntimeError: the group belongs to an engine that is not running.
    """
    if replacement is not None:
        return replacement
    if process_group is None:
        return EVERYONE
    if isinstance(process_group, GroupSpec):
        return process_group
    if torch.compiler.is_compiling():  # it cannot trace weak references
        return _new_spec(process_group)
    known = _given.get(id(process_group))
    if known is not None and known.given is process_group:
        return known
    spec = _new_spec(process_group)
    if spec.given is process_group:
        _given[id(process_group)] = spec
    return spec


_given: WeakValueDictionary[int, GroupSpec] = WeakValueDictionary()  # by id of the user's group or communicator


def _new_spec(process_group: Any) -> GroupSpec:
    for engine in reversed(engines):
        found = engine.rule_and_getter(process_group)
        if found is not None:
            return GroupSpec(*found)
    if isinstance(process_group, Communicator) and not isinstance(process_group, type):
        size, rank = process_group.size, process_group.rank
        if not (isinstance(size, int) and isinstance(rank, int) and 0 <= rank < size):
            got = f"size {text_of_argument(size)} and rank {text_of_argument(rank)}"
            raise TypeError(f"process_group: expected a Communicator with a rank from 0 to size - 1, got {got}")
        return GroupSpec(given_communicator=process_group)
    rule = _rule_of(process_group)
    members_by(rule, *rank_and_size())  # raises if the job has no such ranks
    return GroupSpec(rule)


def _rule_of(description: Any) -> Rule:
    """Returns the rule for an int, ``"node"``, lists of ranks or a :class:`RankGroup`."""
    if isinstance(description, RankGroup) and _is_ranks(description.ranks):
        ranks = sorted(description.ranks)
        if not ranks or ranks[0] < 0 or len(set(ranks)) < len(ranks):
            raise ValueError(
                f"process_group: expected a RankGroup of at least one rank, none negative or twice, got {description}"
            )
        return RankGroup(tuple(ranks))
    if isinstance(description, int) and not isinstance(description, bool):
        if description < 1:
            raise ValueError(f"process_group: expected a positive number of ranks, got {description}")
        return description
    if isinstance(description, str) and description == NODE:
        return NODE
    if isinstance(description, (list, tuple)) and all(map(_is_ranks, description)):
        ranks = sorted(rank for ranks in description for rank in ranks)
        if not ranks or not all(description) or ranks != list(range(len(ranks))):
            expected = "non-empty lists that contain each rank from 0 on exactly once"
            raise ValueError(f"process_group: expected {expected}, got {description!r:.200}")
        return tuple(map(tuple, description))
    raise TypeError(
        "process_group: expected None, a torch.distributed.ProcessGroup, a BaguaProcessGroup, an int, 'node', a list "
        f"of lists of ranks, a 1-D DeviceMesh or a Communicator, got {text_of_argument(description)}"
    )


def _is_ranks(value: Any) -> bool:
    """Returns whether ``value`` is a list or tuple of ints."""
    return isinstance(value, (list, tuple)) and all(type(rank) is int for rank in value)
