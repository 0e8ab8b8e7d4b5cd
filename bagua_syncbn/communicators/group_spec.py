"""The entry point for every ``process_group`` that a user gives: :func:`spec_of` turns it into a :class:`GroupSpec`."""

import copy
import itertools
from collections.abc import Callable
from threading import Lock
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from . import bagua, c10d, shared
from .groups import NODE, RankGroup, Rule, check_rule, described, group_ranks, is_ranks, ranks_by_rule, rule_of, text_of
from .jobs import job_of


@runtime_checkable
class Communicator(Protocol):
    """Exchanges packed tensors between the ranks of a group. All ranks make the same calls in the same order.

    Tensors are float32 or float64. A communicator whose backend adds no float64 up may have an attribute
    ``adds_float64 = False``: its ranks gather statistics, however many they are.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""

    def all_gather(self, packed: Tensor) -> Tensor:
        """Returns (size, n): row ``r`` is what rank ``r`` passed as ``packed``, contiguous of shape (n)."""

    def all_reduce(self, packed: Tensor) -> Tensor:
        """Returns the sum over ranks of ``packed``, contiguous of shape (n); ``packed`` may be overwritten."""


class LocalCommunicator:
    """Group of one rank: gathers and sums are the rank's own tensor."""

    size = 1
    rank = 0

    def all_gather(self, packed: Tensor) -> Tensor:
        return packed.unsqueeze(0)

    def all_reduce(self, packed: Tensor) -> Tensor:
        return packed


LOCAL = LocalCommunicator()


class CachedCommunicator:
    """The communicator of a rule in this process, made in each job at the first use: one object for each rule.

    A torch group that the user gave has an object of its own, apart from the one for the ranks of that group.
    """

    def __init__(self, rule: Rule, given: Callable[[], Any] | None = None) -> None:
        self.rule = rule
        self.given = given  # returns the group, which is not kept alive, or None after its end
        self.number = next(_numbers)
        # None until it is made. torch.compile guards on this attribute.
        self.communicator: Communicator | None = None
        self._world: Callable[[], Any] = lambda: None
        _numbered[self.number] = self

    def find(self) -> Communicator:
        """Returns the communicator, which the ranks of the group make together at the first use in a job."""
        if torch.compiler.is_compiling():
            # The tracer must not see a group, since compiled code keeps alive whatever the tracer has seen.
            if not c10d.in_job():
                c10d.default_group()  # compiled code then guards on the absence of a default group
                return LOCAL
            _find_by_number(self.number)
            assert self.communicator is not None
            return self.communicator
        world = _running_job()
        if world is None:
            return LOCAL
        return self.made() or self.make()

    def made(self) -> Communicator | None:
        """Returns the communicator if it was already made in the running job."""
        return self.communicator if self._world() is _running_job() else None

    def size(self) -> int:
        """Returns the number of ranks without making the communicator; only for "node" ranks ask each other."""
        return self.find().size if torch.compiler.is_dynamo_compiling() else len(self.members())

    def members(self) -> tuple[int, ...]:
        """Returns the ranks of the group without making the communicator; only for "node" ranks ask each other."""
        world = c10d.default_group()
        if world is None or world.size() == 1:
            return (0,)
        if self.rule == NODE or bagua.is_initialized():
            return self.ranks()
        return ranks_by_rule(self.rule, world.rank(), world.size())

    def make(self) -> Communicator:
        """Makes the communicator in the running job, whether or not there is an older one, and returns it."""
        world = _running_job()
        communicator = self._make_among_ranks()

        def clear(_: Any) -> None:
            self.communicator = None

        self._world = ref(world, clear)
        self.communicator = communicator
        return communicator

    def _make_among_ranks(self) -> Communicator:
        given = None if self.given is None else self.given()
        if self.given is not None and (given is None or not c10d.is_alive(given)):
            raise RuntimeError(c10d.DESTROYED)
        ranks = self.ranks()
        if len(ranks) == 1:
            return LOCAL
        if bagua.is_initialized():
            return bagua.communicator_among(ranks)
        what = text_of(self.rule) if given is None else f"group {given.group_name!r} of ranks {self.rule}"
        job = job_of(c10d.default_group())
        return shared.communicator_of(job.layers_group(ranks, what, given, like_given=is_ranks(self.rule)))

    def ranks(self) -> tuple[int, ...]:
        """Returns the ranks of the group that this rank is in, in the running job."""
        if bagua.is_initialized() and (self.rule is None or is_ranks(self.rule)):
            return bagua.own_ranks(self.rule)
        return group_ranks(self.rule, job_of(c10d.default_group()))


def _running_job() -> Any:
    """Returns the group of all ranks, of Bagua or else of torch.distributed; None where there is no job."""
    return bagua.default_group() or (dist.group.WORLD if c10d.IS_AVAILABLE else None)


_cached_for_rule: dict[Rule, CachedCommunicator] = {}
_cached_for_group: WeakKeyDictionary[Any, CachedCommunicator] = WeakKeyDictionary()
_numbers = itertools.count()
_numbered: WeakValueDictionary[int, CachedCommunicator] = WeakValueDictionary()
_caching = Lock()


def _cached_for(rule: Rule, group: Any = None) -> CachedCommunicator:
    """Returns the cached communicator of a rule, or of a group that the user gave, whose ranks ``rule`` lists."""
    known: Any = _cached_for_rule if group is None else _cached_for_group
    key = rule if group is None else group
    with _caching:
        if key not in known:
            known[key] = CachedCommunicator(rule, None if group is None else ref(group))
        cached: CachedCommunicator = known[key]
    return cached


def _find_by_number(number: int) -> None:
    """Makes the communicator while torch.compile traces the caller; the tracer runs this function untraced."""
    cached = _numbered[number]
    if cached.communicator is None:
        cached.make()


# Stands for torch.compiler.assume_constant_result, which would make every process import the compiler.
_find_by_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


class GroupSpec:
    """Specification of the ranks that a layer synchronizes with. Copies and pickles hold its description.

    Args:
        rule: the normalized description, which says which ranks of a job synchronize.
        given: returns the group that the user gave, which is not kept alive, or None after its end.
        exact: the communicator to use in place of one that only layers use.
        cached: the cached communicator of the group that the user gave; None to use the one of ``rule``.
    """

    __slots__ = ("_given", "cached", "exact")

    def __init__(
        self,
        rule: Rule = None,
        given: Callable[[], Any] | None = None,
        exact: Communicator | None = None,
        cached: CachedCommunicator | None = None,
    ) -> None:
        self.cached = _cached_for(rule) if cached is None else cached
        self.exact = exact
        self._given = given

    def communicator(self) -> Communicator:
        """Returns the communicator of this process in the running job; the local one where no job runs.

        Raises:
            ValueError: this job has no such ranks, or ranks have different descriptions.
            RuntimeError: the given group was destroyed.
        """
        if self.exact is not None:
            return self.exact
        # A communicator that was made for the given group stays usable after the end of that group, until the job ends.
        # A trace keeps to what it saw first, so it skips this check.
        if not torch.compiler.is_compiling() and self.cached.communicator is None and self._is_gone():
            raise RuntimeError(c10d.DESTROYED)
        return self.cached.find()

    def made(self) -> Communicator | None:
        """Returns the communicator if it was already made, else None."""
        return self.cached.made() if self.exact is None else self.exact

    def size(self) -> int:
        """Returns the number of ranks without making the group, except for ``"node"``, where ranks ask each other."""
        return self.cached.size() if self.exact is None else self.exact.size

    def members(self) -> tuple[int, ...] | None:
        """Returns the ranks in the group, as :meth:`size`; None for a communicator that does not tell them."""
        exact = self.exact
        if isinstance(exact, c10d.TorchCommunicator):
            return tuple(dist.get_process_group_ranks(exact.group))
        if exact is LOCAL:
            return (dist.get_rank(),) if c10d.in_job() else (0,)
        return self.cached.members() if exact is None else None

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
        return described(self.cached.rule) if self.exact is None else self.exact

    def torch_group(self) -> Any:
        """Returns a c10d group for the user, which the members make together if needed; None for the job's group.

        Raises:
            TypeError: the specification stands for no c10d group, as with a Communicator.
        """
        given = self.process_group
        if self.exact is not None or bagua.is_process_group(given):
            raise TypeError(
                "process_group: expected None, a torch.distributed.ProcessGroup or a description of one where torch "
                f"runs the job, got {type(given).__name__}"
            )
        world = c10d.default_group()
        if given is None or world is None or c10d.is_process_group(given):
            return given if world is not None else None
        rule = self.cached.rule
        return job_of(world).users_group(self.cached.ranks(), text_of(rule), like_given=is_ranks(rule))

    def group_before(self) -> Any:
        """Returns the group that a layer of another class had, also where a copy holds only the ranks of that group."""
        described_only = self._given is None and is_ranks(self.cached.rule)
        return self.torch_group() if described_only else self.process_group

    def __deepcopy__(self, memo: Any) -> "GroupSpec":
        return self if self.cached.given is not None else spec_of(copy.deepcopy(self.description, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return spec_of, (self.description,)

    def __repr__(self) -> str:
        if self._given is None or self.description is not None:
            return repr(self.description)
        group = self._given()
        return "destroyed" if group is None else repr(RankGroup(tuple(_ranks_of(group))))


EVERYONE = GroupSpec()


def spec_of(process_group: Any) -> GroupSpec:
    """Returns the specification that ``process_group`` stands for.

    Raises:
        TypeError: ``process_group`` is none of the supported kinds.
        ValueError: this rank is not a member of the group, or the description fits no job, or not this one.
        RuntimeError: the group is a BaguaProcessGroup, and Bagua is not initialized.
    """
    if process_group is None:
        return EVERYONE
    if isinstance(process_group, GroupSpec):
        return process_group
    if bagua.is_process_group(process_group):
        return GroupSpec(bagua.rule_of(process_group), lambda: process_group)
    if c10d.is_process_group(process_group):
        return _spec_of_group(process_group)
    if _is_mesh(process_group):
        return _spec_of_mesh(process_group)
    if isinstance(process_group, Communicator):
        return GroupSpec(exact=process_group)
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


def sync_group(process_group: Any) -> Any:
    """Returns the process group of this rank that a description stands for.

    The first use of a description in a job finds out who is in its groups, so all ranks of the job make that use
    together, whether it is this call or the first training forward of a layer, and those of several descriptions in
    the same order. This call is the way to have it done at a moment of your choice. It makes the group of the layers
    too, which is another one of the same ranks, so that what you send through this one cannot get in their way.

    Args:
        process_group: an int for that many consecutive ranks, ``"node"`` for the ranks of this host, a list of lists of
            ranks, or a 1-D :class:`torch.distributed.device_mesh.DeviceMesh`.

    Returns:
        A :class:`torch.distributed.ProcessGroup`; the default one if all ranks of the job are in the group. None where
        there is no job.

    Raises:
        TypeError: ``process_group`` is none of these.
        ValueError: the job's ranks do not divide into groups of this number; a rank of the job is in no list, or the
            job has no rank that is in one; numbers or lists that make sense in no job; ranks gave different ones.

    Example::

        >>> group = bagua_syncbn.sync_group(8)
        >>> torch.distributed.all_reduce(tensor, group=group)
    """
    of_its_kind = type(process_group) in (int, list, tuple) or _is_mesh(process_group)
    if not of_its_kind and not (isinstance(process_group, str) and process_group == NODE):
        raise TypeError(
            'process_group: expected an int, "node", a list of lists of ranks or a 1-D DeviceMesh, '
            f"got {type(process_group).__name__}"
        )
    spec = spec_of(process_group)
    spec.communicator()
    return spec.torch_group()


def _spec_of_group(group: Any) -> GroupSpec:
    """Returns the specification of a c10d group. The default group stands for all ranks, also for a copy elsewhere."""
    world = c10d.default_group()
    ranks = job_of(world).remember(group)
    if group is world:
        return GroupSpec(None, ref(group))
    return GroupSpec(ranks, ref(group), cached=_cached_for(ranks, group))


def _ranks_of(group: Any) -> list[int]:
    return list(group.ranks) if bagua.is_process_group(group) else dist.get_process_group_ranks(group)


def _is_mesh(process_group: object) -> bool:
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
