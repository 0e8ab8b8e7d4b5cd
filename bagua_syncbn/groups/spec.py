"""The entry point for every ``process_group`` that a user gives: :func:`spec_of` turns it into a :class:`GroupSpec`."""

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch

from ..registry import Registry
from ..torch_internals.autograd import untraced
from .communicator import LOCAL, Communicator
from .rules import NODE, RankGroup, Ranks, Rule, check_rule, described, ranks_by_rule, rule_of


class Engine(Protocol):
    """Runs jobs, which have process groups: torch.distributed, or a framework that runs beside it."""

    default_group: Callable[[], Any]
    """Returns the group of all ranks of the running job; None without one. Every call of a layer asks."""

    def is_in_job(self) -> bool:
        """Whether a job runs, in a form that torch.compile can trace, and shows no group to it."""

    def rank_and_size(self) -> tuple[int, int]:
        """Returns the rank of this process in the running job, and the number of its ranks."""

    def given(self, process_group: Any) -> tuple[Ranks | None, Callable[[], Any] | None] | None:
        """Returns the ranks of a group of this engine, and a function that returns the group until its end.

        None for other objects. None in place of the ranks stands for all of them, in other jobs too.

        Raises:
            TypeError, ValueError, RuntimeError: this rank is not in the group, or the group has ended.
        """

    def ranks_of(self, rule: Rule) -> Ranks:
        """Returns the ranks of the group that this rank is in by ``rule``. Its members agree on it at the first use."""

    def communicator_of(self, rule: Rule, given: Any) -> Communicator:
        """Returns the communicator of layers that synchronize by ``rule``, which the ranks make together.

        It is another one for each group of this engine that was ``given``.
        """


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


def running() -> Engine | None:
    """Returns the engine that runs the job; None without a job."""
    return next((engine for engine in reversed(engines) if engine.default_group() is not None), None)


# Name of the layer or function that makes the first use of a group, for messages of ranks that wait there.
first_user: ContextVar[str] = ContextVar("first_user", default="a synchronized layer")

# Communicators by job, then by rule and given group: specifications of one group share a communicator.
_ready: WeakKeyDictionary[Any, WeakValueDictionary[Any, Communicator]] = WeakKeyDictionary()


class GroupSpec:
    """Specification of the ranks that a layer synchronizes with. Copies and pickles hold its description.

    Args:
        rule: the normalized description, which says which ranks of a job synchronize.
        given: returns the group that the user gave, or None after its end.
        given_communicator: the communicator to use in place of one that only layers use.
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
        """Returns the communicator of this process in the running job; the local one where no job runs.

        Args:
            user: name of the caller, for the log of ranks that wait in the first use of the group.

        Raises:
            ValueError: this job has no such ranks, or ranks have different descriptions.
            RuntimeError: the given group was destroyed.
        """
        if self.given_communicator is not None:
            return self.given_communicator
        if torch.compiler.is_compiling():
            # The tracer must not see a group, since compiled code keeps alive whatever the tracer has seen.
            for engine in engines:
                if engine.is_in_job():
                    self._make_untraced()
                    assert self._communicator is not None
                    return self._communicator
            return LOCAL
        # The communicator of a given group of one rank, the local one, outlives the group.
        if self._communicator is None and self._is_gone():
            raise RuntimeError(DESTROYED)
        return self.made() or self._make(user)

    def made(self) -> Communicator | None:
        """Returns the communicator if it was already made in the running job, else None; LOCAL where no job runs."""
        if self.given_communicator is not None:
            return self.given_communicator
        job = None  # as running, without its call
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
        """Makes the communicator, together with the other ranks of the group, for the rest of the running job."""
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

    def _key(self) -> tuple[Any, ...]:
        return self.rule, None if self.rule is None else self.given

    def _keep(self, world: Any, communicator: Communicator) -> None:
        def clear(_: Any) -> None:
            self._communicator = None

        self._world, self._communicator = ref(world, clear), communicator

    @untraced
    def _make_untraced(self) -> None:
        """Makes the communicator while torch.compile traces the caller."""
        if self.made() is None:
            self._make()

    def size(self) -> int:
        """Returns the number of ranks without making the group, except for ``"node"``, where ranks ask each other."""
        if self.given_communicator is not None:
            return self.given_communicator.size
        return self.communicator().size if torch.compiler.is_dynamo_compiling() else len(self._members())

    def members(self) -> Ranks | None:
        """Returns the ranks in the group, as :meth:`size`; None for a communicator that does not tell them."""
        given = self.given_communicator
        if given is LOCAL:
            engine = running()
            return (0 if engine is None else engine.rank_and_size()[0],)
        return self._members() if given is None else getattr(given, "ranks", None)

    def _members(self) -> Ranks:
        engine = running()
        rank, size = (0, 1) if engine is None else engine.rank_and_size()
        if engine is None or size == 1:
            return (0,)
        if self.rule == NODE:
            return engine.ranks_of(self.rule)
        check_rule(self.rule, rank, size)
        return ranks_by_rule(self.rule, rank, size)

    def _is_gone(self) -> bool:
        return self.given is not None and self.given() is None

    @property
    def process_group(self) -> Any:
        """The ``process_group`` that the user gave: the group as long as it lives, then its description."""
        given = None if self.given is None else self.given()
        return self.description if given is None else given

    @property
    def description(self) -> Any:
        """The value that stands for the group in a file."""
        return described(self.rule) if self.given_communicator is None else self.given_communicator

    def __deepcopy__(self, memo: Any) -> "GroupSpec":
        is_given = self.given is not None and self.rule is not None
        return self if is_given else spec_of(copy.deepcopy(self.description, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return spec_of, (self.description,)

    def __repr__(self) -> str:
        if self.given is None or self.description is not None:
            return repr(self.description)
        return "destroyed" if self._is_gone() else repr(RankGroup(self._members()))


EVERYONE = GroupSpec()
ALONE = GroupSpec(given_communicator=LOCAL)
"""Group of calls in evaluation. A layer whose ``process_group`` is LOCAL has another object."""


def spec_of(process_group: Any) -> GroupSpec:
    """Returns the specification that ``process_group`` stands for.

    Raises:
        TypeError: ``process_group`` is of no supported kind.
        ValueError: this rank is not a member of the group, or the description fits no job, or not this one.
        RuntimeError: the group is that of an engine which runs no job.
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
    rule = rule_of(process_group)
    if rule is None:
        raise TypeError(f"process_group: expected {_KINDS}, got {describe_kind(process_group)}")
    in_job = running()
    if in_job is not None:
        check_rule(rule, *in_job.rank_and_size())
    return GroupSpec(rule)


_KINDS = (
    "None, a torch.distributed.ProcessGroup, a BaguaProcessGroup, an int, 'node', a list of lists of ranks, a 1-D "
    "DeviceMesh or a Communicator"
)


def describe_kind(given: Any) -> str:
    """Returns a description of an object that is not a group, for messages."""
    if isinstance(given, (list, tuple)) and given and all(isinstance(rank, int) for rank in given):
        return f"{given}; one group of these ranks is {[list(given)]}"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return repr(given) if isinstance(given, str) else type(given).__name__
