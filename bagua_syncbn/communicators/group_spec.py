"""The entry point for every ``process_group`` that a user gives: :func:`spec_of` turns it into a :class:`GroupSpec`."""

import copy
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist

from ..torch_internals.autograd import untraced
from . import c10d
from .communicator import LOCAL, Communicator
from .groups import NODE, RankGroup, Ranks, Rule, check_rule, described, is_ranks, ranks_by_rule, rule_of
from .jobs import in_one_piece, job_of


class Engine(Protocol):
    """Runs jobs in place of torch.distributed, with process groups of its own."""

    is_imported: Callable[[], bool]
    """Whether this process may run a job of the engine. Every call of a layer asks, so it takes no time."""

    def default_group(self) -> Any:
        """Returns the group of all ranks of the running job; None without one."""

    def rank_and_size(self) -> tuple[int, int]:
        """Returns the rank of this process in the job, and the number of its ranks."""

    def is_process_group(self, process_group: object) -> bool:
        """Whether ``process_group`` is a group of the engine; raises RuntimeError if it is, and no job runs."""

    def rule_of(self, group: Any) -> Ranks | None:
        """Returns the ranks of a group; None for the default group, so that a copy stands for all ranks too."""

    def communicator_among(self, ranks: Ranks) -> Communicator:
        """Returns the communicator that layers use among these ranks; its members make it together."""


# Engines beside torch.distributed, set by others.
ENGINES: list[Engine] = []


class GroupSpec:
    """Specification of the ranks that a layer synchronizes with. Copies and pickles hold its description.

    Args:
        rule: the normalized description, which says which ranks of a job synchronize.
        given: returns the group that the user gave, or None after its end; groups of torch are not kept alive.
        given_communicator: the communicator to use in place of one that only layers use.
    """

    def __init__(
        self, rule: Rule = None, given: Callable[[], Any] | None = None, given_communicator: Communicator | None = None
    ) -> None:
        self.rule = rule
        self.given_communicator = given_communicator
        self._given = given
        # A group of torch other than the default one: its layers have a communicator of their own.
        self._group = given if isinstance(given, ref) and rule is not None else None
        # None until it is made in the running job. torch.compile guards on this attribute.
        self._communicator: Communicator | None = None
        self._world: Callable[[], Any] = lambda: None

    def communicator(self) -> Communicator:
        """Returns the communicator of this process in the running job; the local one where no job runs.

        Raises:
            ValueError: this job has no such ranks, or ranks have different descriptions.
            RuntimeError: the given group was destroyed.
        """
        if self.given_communicator is not None:
            return self.given_communicator
        if torch.compiler.is_compiling():
            # The tracer must not see a group, since compiled code keeps alive whatever the tracer has seen.
            if not c10d.in_job():
                c10d.default_group()  # compiled code then guards on the absence of a default group
                return LOCAL
            self._make_untraced()
            assert self._communicator is not None
            return self._communicator
        # The communicator of a given group of one rank, the local one, outlives the group.
        if self._communicator is None and self._is_gone():
            raise RuntimeError(c10d.DESTROYED)
        return self.made() or self._make()

    def made(self) -> Communicator | None:
        """Returns the communicator if it was already made in the running job, else None; LOCAL where no job runs."""
        if self.given_communicator is not None:
            return self.given_communicator
        # As _engine, without its call.
        job = dist.group.WORLD if c10d.IS_AVAILABLE else None
        for engine in ENGINES:
            if engine.is_imported():
                job = engine.default_group() or job
        if job is None:
            return LOCAL
        return self._communicator if self._world() is job else None

    def _make(self) -> Communicator:
        """Makes the communicator, together with the other ranks of the group, for the rest of the running job."""
        engine, group = _engine(), None
        world = c10d.default_group() if engine is None else engine.default_group()
        if self._group is not None:
            group = self._group()
            if group is None or not c10d.is_alive(group):
                raise RuntimeError(c10d.DESTROYED)

        def make() -> Communicator:
            ranks = self._ranks()
            if len(ranks) == 1:
                return LOCAL
            if engine is not None:
                return engine.communicator_among(ranks)
            return c10d.communicator_of(job_of(world).layers_group(self.rule, group))

        communicator = in_one_piece(make) if engine is None else make()

        def clear(_: Any) -> None:
            self._communicator = None

        self._world, self._communicator = ref(world, clear), communicator
        return communicator

    @untraced
    def _make_untraced(self) -> None:
        """Makes the communicator while torch.compile traces the caller."""
        if self.made() is None:
            self._make()

    def _ranks(self) -> tuple[int, ...]:
        """Returns the ranks of the group that this rank is in, in the running job."""
        engine = _engine()
        if engine is not None and (self.rule is None or is_ranks(self.rule)):
            check_rule(self.rule, *engine.rank_and_size())
            return ranks_by_rule(self.rule, *engine.rank_and_size())
        return job_of(c10d.default_group()).ranks_of(self.rule)

    def size(self) -> int:
        """Returns the number of ranks without making the group, except for ``"node"``, where ranks ask each other."""
        if self.given_communicator is not None:
            return self.given_communicator.size
        return self.communicator().size if torch.compiler.is_dynamo_compiling() else len(self._members())

    def members(self) -> tuple[int, ...] | None:
        """Returns the ranks in the group, as :meth:`size`; None for a communicator that does not tell them."""
        given = self.given_communicator
        if isinstance(given, c10d.TorchCommunicator):
            return tuple(dist.get_process_group_ranks(given.group))
        if given is LOCAL:
            return (dist.get_rank(),) if c10d.in_job() else (0,)
        return self._members() if given is None else None

    def _members(self) -> tuple[int, ...]:
        world = c10d.default_group()
        if world is None or world.size() == 1:
            return (0,)
        if self.rule == NODE or _engine() is not None:
            return self._ranks()
        return ranks_by_rule(self.rule, world.rank(), world.size())

    def _is_gone(self) -> bool:
        return self._given is not None and self._given() is None

    @property
    def process_group(self) -> Any:
        """The ``process_group`` that the user gave: the group as long as it lives, then its description."""
        given = None if self._given is None else self._given()
        return self.description if given is None else given

    @property
    def description(self) -> Any:
        """The value that stands for the group in a file."""
        return described(self.rule) if self.given_communicator is None else self.given_communicator

    def torch_group(self) -> Any:
        """Returns a c10d group for the user, which the members make together if needed; None for the job's group.

        Raises:
            TypeError: the specification stands for no c10d group, as with a Communicator.
        """
        given = self.process_group
        if self.given_communicator is not None or _engine_of(given) is not None:
            raise TypeError(
                "process_group: expected None, a torch.distributed.ProcessGroup or a description of one where torch "
                f"runs the job, got {type(given).__name__}"
            )
        world = c10d.default_group()
        if given is None or world is None or c10d.is_process_group(given):
            return given if world is not None else None
        return in_one_piece(lambda: job_of(world).users_group(self.rule))

    def group_before(self) -> Any:
        """Returns the group that a layer of another class had, also where a copy holds only the ranks of that group."""
        described_only = self._given is None and is_ranks(self.rule)
        return self.torch_group() if described_only else self.process_group

    def __deepcopy__(self, memo: Any) -> "GroupSpec":
        return self if self._group is not None else spec_of(copy.deepcopy(self.description, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return spec_of, (self.description,)

    def __repr__(self) -> str:
        if self._given is None or self.description is not None:
            return repr(self.description)
        return "destroyed" if self._is_gone() else repr(RankGroup(self._members()))


EVERYONE = GroupSpec()


def _engine() -> Engine | None:
    """Returns the engine that runs the job; None for torch.distributed, or without a job."""
    return next((engine for engine in ENGINES if engine.is_imported() and engine.default_group() is not None), None)


def _engine_of(process_group: object) -> Engine | None:
    """Returns the engine whose group ``process_group`` is; None for any other object."""
    return next((engine for engine in ENGINES if engine.is_process_group(process_group)), None)


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
    engine = _engine_of(process_group)
    if engine is not None:
        ranks = engine.rule_of(process_group)
        check_rule(ranks, *engine.rank_and_size())
        return GroupSpec(ranks, lambda: process_group)
    if c10d.is_process_group(process_group):
        return _spec_of_group(process_group)
    if is_mesh(process_group):
        return _spec_of_mesh(process_group)
    if isinstance(process_group, Communicator):
        return GroupSpec(given_communicator=process_group)
    rule = rule_of(process_group)
    if rule is None:
        raise TypeError(f"process_group: expected {_KINDS}, got {_kind_of(process_group)}")
    world = c10d.default_group()
    if world is not None:
        check_rule(rule, world.rank(), world.size())
    return GroupSpec(rule)


_KINDS = (
    "None, a torch.distributed.ProcessGroup, a BaguaProcessGroup, an int, 'node', a list of lists of ranks, a 1-D "
    "DeviceMesh or a Communicator"
)


def _kind_of(given: Any) -> str:
    if isinstance(given, (list, tuple)) and given and all(isinstance(rank, int) for rank in given):
        return f"{given}; one group of these ranks is {[list(given)]}"
    return repr(given) if isinstance(given, str) else type(given).__name__


def _spec_of_group(group: Any) -> GroupSpec:
    """Returns the specification of a c10d group. The default group stands for all ranks, also for a copy elsewhere."""
    world = c10d.default_group()
    ranks = job_of(world).remember(group)
    return GroupSpec(None if group is world else ranks, ref(group))


def is_mesh(process_group: object) -> bool:
    """Whether ``process_group`` is a DeviceMesh."""
    if not dist.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(process_group, DeviceMesh)


def _spec_of_mesh(mesh: Any) -> GroupSpec:
    world = c10d.default_group()
    if mesh.ndim != 1:
        raise ValueError(
            f"process_group: expected a DeviceMesh of 1 dimension, got one of {mesh.ndim}; name one, as in mesh['dp']"
        )
    if world is None:  # the job of the mesh has ended
        return GroupSpec(tuple(sorted(mesh.mesh.tolist())))
    if mesh.get_coordinate() is None:
        raise ValueError(f"process_group: expected a DeviceMesh with this rank, rank {world.rank()}, got {mesh}")
    return _spec_of_group(mesh.get_group())
