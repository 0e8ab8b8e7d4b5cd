"""Specifications of the ranks that a layer synchronizes with: :func:`spec_of` accepts any ``process_group`` argument.

A rule is the normalized form of a description such as ``8``, ``"node"`` or lists of ranks. It needs no job, and can be
copied and saved. Without a job, and in a job of one rank, every rule stands for this process.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch

from ..registry import Registry
from ..torch_internals.autograd import untraced
from .communicator import LOCAL, Communicator

NODE = "node"

Ranks: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class RankGroup:
    """Global ranks of a process group's members, which a copied or saved layer holds instead of its group.

    A RankGroup can be pickled, unlike a :class:`torch.distributed.ProcessGroup`. Without a job it stands for this
    process.
    """

    ranks: tuple[int, ...]


Rule: TypeAlias = None | int | str | tuple[Ranks, ...] | RankGroup
"""All ranks, a number of consecutive ranks, the ranks of this host, lists of ranks, or the ranks of one group."""


def members_by(rule: Rule, rank: int, size: int) -> Ranks | None:
    """Returns the ranks of the group of ``rank`` in a job of ``size`` ranks; None for "node", which ranks agree on.

    Raises:
        ValueError: ``rule`` does not fit the job. A job of one rank fits every rule.
    """
    if size == 1:
        return (0,)
    if rule is None:
        return tuple(range(size))
    if isinstance(rule, str):
        return None
    if isinstance(rule, int):
        if size % rule:
            raise ValueError(
                f"process_group: expected a divisor of {size}, the number of ranks in the job, "
                f"got {rule}, which leaves {size % rule} of them over"
            )
        first = rank - rank % rule
        return tuple(range(first, first + rule))
    if isinstance(rule, RankGroup):
        if rank not in rule.ranks or max(rule.ranks) >= size:
            raise ValueError(
                f"process_group: expected ranks of this job that include this one, rank {rank} of {size}, got "
                f"{rule.ranks}; assign the process_group attribute of the loaded layers, or convert the model again "
                "with a group of this job"
            )
        return rule.ranks
    given, expected = {one for ranks in rule for one in ranks}, set(range(size))
    for what, which in (("no list for rank", expected - given), ("no such rank as", given - expected)):
        if which:
            raise ValueError(
                f"process_group: expected each of the {size} ranks of the job in one list, "
                f"got {what} {', '.join(map(str, sorted(which)))} in {description_of(rule)}"
            )
    return next(tuple(sorted(ranks)) for ranks in rule if rank in ranks)


def description_of(rule: Rule) -> Any:
    """Returns ``rule`` in the form that users write."""
    return [list(ranks) for ranks in rule] if isinstance(rule, tuple) else rule


def text_of(rule: Rule) -> str:
    """Returns a description of ``rule`` for messages."""
    return "the group of all ranks" if rule is None else f"process_group={description_of(rule)!r}"


class Engine(Protocol):
    """Runs jobs, which have process groups: torch.distributed or Bagua."""

    default_group: Callable[[], Any]
    """Returns the group of all ranks of the running job, or None. Each call of a layer asks."""

    def is_in_job(self) -> bool:
        """Returns whether a job runs, in a form that torch.compile can trace without seeing a group."""

    def rank_and_size(self) -> tuple[int, int]:
        """Returns the rank of this process in the running job, and the job's number of ranks."""

    def given(self, process_group: Any) -> tuple[Rule, Callable[[], Any] | None] | None:
        """Returns the rule of this engine's group, None for all ranks, and a function that returns the live group.

        Returns None for other objects.

        Raises:
            TypeError, ValueError, RuntimeError: this rank is not in the group, or the group was destroyed.
        """

    def ranks_of(self, rule: Rule) -> Ranks:
        """Returns the ranks of this rank's group. The ranks agree on a rule at its first use."""

    def communicator_of(self, rule: Rule, given: Any) -> Communicator:
        """Returns the layers' communicator, which the ranks make together; one for each ``given`` group."""


engines: Registry[Engine] = Registry()
"""Engines in ascending priority: the last one with a running job serves it."""

DESTROYED = (
    "process_group: expected a live group, got one that was destroyed; run forward and backward before "
    "destroy_process_group()"
)
FORKED = (
    "cannot synchronize in a forked process, such as a DataLoader worker: it cannot use its parent's process groups; "
    "call the model in the parent, or in evaluation mode, or start the worker by spawn"
)

# Name of the layer or function that makes the first use of a group, for the log of ranks that wait there.
first_user: ContextVar[str] = ContextVar("first_user", default="a synchronized layer")

# Communicators by job, then by rule and given group: specifications of one group share a communicator.
_ready: WeakKeyDictionary[Any, WeakValueDictionary[Any, Communicator]] = WeakKeyDictionary()


def running() -> Engine | None:
    """Returns the engine that runs the job; None without a job."""
    return next((engine for engine in reversed(engines) if engine.default_group() is not None), None)


class GroupSpec:
    """Specification of the ranks that a layer synchronizes with. Copies and pickles hold its description.

    Args:
        rule: which ranks of a job synchronize.
        given: returns the group that the user gave, or None once it was destroyed.
        given_communicator: the communicator that the user gave.
    """

    def __init__(
        self, rule: Rule = None, given: Callable[[], Any] | None = None, given_communicator: Communicator | None = None
    ) -> None:
        self.rule = rule
        self.given_communicator = given_communicator
        self.given = given
        # None until it is made in the running job. torch.compile guards on this attribute.
        self._communicator: Communicator | None = None
        self._world: Callable[[], Any] = lambda: None

    def communicator(self, user: str = "") -> Communicator:
        """Returns the communicator in the running job, LOCAL without a job. Its ranks make it at the first use.

        Args:
            user: name of the caller, for the log of ranks that wait in the first use.

        Raises:
            ValueError: this job has no such ranks, or ranks have different descriptions.
            RuntimeError: the given group was destroyed, or ranks are missing.
        """
        if self.given_communicator is not None:
            return self.given_communicator
        if torch.compiler.is_compiling():
            # The tracer must not see a group, because compiled code keeps alive all that the tracer has seen.
            for engine in engines:
                if engine.is_in_job():
                    self._make_untraced()
                    assert self._communicator is not None
                    return self._communicator
            return LOCAL
        # A given group of one rank has the communicator LOCAL, which outlives the group.
        if self._communicator is None and self._is_gone():
            raise RuntimeError(DESTROYED)
        return self.communicator_if_ready() or self._make(user)

    def communicator_if_ready(self) -> Communicator | None:
        """Returns the communicator if its ranks have made it in the running job, else None; LOCAL without a job."""
        if self.given_communicator is not None:
            return self.given_communicator
        job = None  # as running(), without a call
        for engine in engines:
            job = engine.default_group() or job
        if job is None:
            return LOCAL
        if self._world() is job:
            return self._communicator
        ready = None if self._is_gone() else _ready.get(job)
        communicator = None if ready is None else ready.get(self._key())
        if communicator is not None:
            self._keep(job, communicator)
        return communicator

    def _make(self, user: str = "") -> Communicator:
        """Makes the communicator together with the other ranks of the group."""
        engine = running()
        assert engine is not None
        if self._is_gone():
            raise RuntimeError(DESTROYED)
        world = engine.default_group()
        token = first_user.set(user or first_user.get())
        try:
            communicator = engine.communicator_of(self.rule, None if self.given is None else self.given())
        finally:
            first_user.reset(token)
        if communicator is not LOCAL:
            _ready.setdefault(world, WeakValueDictionary())[self._key()] = communicator
        self._keep(world, communicator)
        return communicator

    @untraced
    def _make_untraced(self) -> None:
        """Makes the communicator while torch.compile traces the caller."""
        if self.communicator_if_ready() is None:
            self._make()

    def _key(self) -> tuple[Any, ...]:
        return self.rule, None if self.rule is None else self.given

    def _keep(self, world: Any, communicator: Communicator) -> None:
        """Keeps ``communicator`` until the job of ``world`` ends."""

        def clear(_: Any) -> None:
            self._communicator = None

        self._world, self._communicator = ref(world, clear), communicator

    def size(self) -> int:
        """Returns the number of ranks without making the group, except for "node", which ranks agree on."""
        if self.given_communicator is not None:
            return self.given_communicator.size
        return self.communicator().size if torch.compiler.is_dynamo_compiling() else len(self.members() or ())

    def members(self) -> Ranks | None:
        """Returns the ranks in the group, as :meth:`size` does; None if a given communicator does not know them."""
        engine = running()
        rank, size = (0, 1) if engine is None else engine.rank_and_size()
        if self.given_communicator is not None:
            return (rank,) if self.given_communicator is LOCAL else getattr(self.given_communicator, "ranks", None)
        ranks = members_by(self.rule, rank, size)
        return engine.ranks_of(self.rule) if ranks is None and engine is not None else ranks

    def _is_gone(self) -> bool:
        return self.given is not None and self.given() is None

    @property
    def process_group(self) -> Any:
        """The ``process_group`` that the user gave. After the end of a group, its description."""
        given = None if self.given is None else self.given()
        return self.description if given is None else given

    @property
    def description(self) -> Any:
        """The value that stands for the group in a file."""
        return description_of(self.rule) if self.given_communicator is None else self.given_communicator

    def __deepcopy__(self, memo: Any) -> "GroupSpec":
        is_given = self.given is not None and self.rule is not None
        return self if is_given else spec_of(copy.deepcopy(self.description, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return spec_of, (self.description,)

    def __repr__(self) -> str:
        if self.given is None or self.description is not None:
            return repr(self.description)
        return "destroyed" if self._is_gone() else repr(RankGroup(self.members() or ()))


EVERYONE = GroupSpec()
ALONE = GroupSpec(given_communicator=LOCAL)
"""Group of calls in evaluation. A layer whose ``process_group`` is LOCAL has another object."""


def spec_of(process_group: Any) -> GroupSpec:
    """Returns the specification of ``process_group``.

    Raises:
        TypeError: ``process_group`` is of an unsupported kind.
        ValueError: this rank is not in the group, or the description fits no job, or not this one.
        RuntimeError: the group belongs to an engine that runs no job.
    """
    if process_group is None:
        return EVERYONE
    if isinstance(process_group, GroupSpec):
        return process_group
    for engine in reversed(engines):
        found = engine.given(process_group)
        if found is not None:
            return GroupSpec(*found)
    if isinstance(process_group, Communicator):
        return GroupSpec(given_communicator=process_group)
    rule = _rule_of(process_group)
    in_job = running()
    if in_job is not None:
        members_by(rule, *in_job.rank_and_size())  # raises if the job has no such ranks
    return GroupSpec(rule)


def _rule_of(description: Any) -> Rule:
    """Returns the rule that an int, ``"node"``, lists of ranks or a :class:`RankGroup` describe."""
    if isinstance(description, RankGroup):
        return RankGroup(tuple(sorted(description.ranks)))
    if isinstance(description, int) and not isinstance(description, bool):
        if description < 1:
            raise ValueError(f"process_group: expected at least 1 consecutive rank, got {description}")
        return description
    if isinstance(description, str) and description == NODE:
        return NODE
    if isinstance(description, (list, tuple)) and all(isinstance(ranks, (list, tuple)) for ranks in description):
        _check_lists(description)
        return tuple(map(tuple, description))
    raise TypeError(
        "process_group: expected None, a torch.distributed.ProcessGroup, a BaguaProcessGroup, an int, 'node', a list "
        f"of lists of ranks, a 1-D DeviceMesh or a Communicator, got {describe_kind(description)}"
    )


def _check_lists(lists: Sequence[Sequence[Any]]) -> None:
    if not lists or not all(lists):
        raise ValueError(f"process_group: expected at least one list, each of at least one rank, got {lists}")
    ranks = [rank for which in lists for rank in which]
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"process_group: expected lists of ranks, each an int, got {rank!r} in {lists}")
    for rank, times in Counter(ranks).items():
        if rank < 0 or times > 1:
            got = f"{rank}{' twice' * (times > 1)}"
            raise ValueError(f"process_group: expected ranks from 0 on, each in one list, got {got} in {lists}")


def describe_kind(given: Any) -> str:
    """Returns a description of an object that is not a group, for messages."""
    if isinstance(given, (list, tuple)) and given and all(isinstance(rank, int) for rank in given):
        return f"{given}; one group of these ranks is {[list(given)]}"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return repr(given) if isinstance(given, str) else type(given).__name__
