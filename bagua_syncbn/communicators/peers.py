"""The door. What a process_group may be is asked here, once; behind it there are only :class:`Peers`."""

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
from .groups import NODE, RankGroup, Rule, check_rule, described, group_ranks, is_ranks, rule_of, told
from .local import LOCAL


@runtime_checkable
class Communicator(Protocol):
    """Exchanges packed tensors between the ranks of a group. All ranks make the same calls in the same order."""

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


class Seat:
    """Where this process meets those that a rule stands for: there is one for each rule, found anew in each job.

    A group of torch that the user gave has a seat of its own, beside the one of its ranks.
    """

    def __init__(self, rule: Rule, given: Callable[[], Any] | None = None) -> None:
        self.rule = rule
        self.given = given  # returns the group, which is not kept alive; None where it is gone
        self.number = next(_numbers)
        # What torch.compile guards on: None where it is to be found.
        self.communicator: Communicator | None = None
        self._world: Callable[[], Any] = lambda: None
        _numbered[self.number] = self

    def find(self) -> Communicator:
        """Returns the communicator, which the ranks of the group make together at the first use in a job."""
        if torch.compiler.is_compiling():
            # The tracer must not see a group: what it sees, compiled code keeps alive.
            if not c10d.in_job():
                c10d.default_group()  # so that it guards on there being none
                return LOCAL
            _take_seat(self.number)
            assert self.communicator is not None
            return self.communicator
        if bagua.is_initialized():
            return self.take()
        world = c10d.default_group()
        if world is None:
            return LOCAL
        found = self.communicator
        return found if found is not None and self._world() is world else self.take()

    def found(self) -> Communicator | None:
        """Returns the communicator if it was made in the job that runs; under Bagua, None."""
        found = self.communicator
        if found is None or self._world() is not c10d.default_group() or bagua.is_initialized():
            return None
        return found

    def size(self) -> int:
        """Returns the number of ranks, before the communicator is made: only for "node" the ranks ask each other."""
        world, rule = c10d.default_group(), self.rule
        if rule == NODE or bagua.is_initialized() or torch.compiler.is_dynamo_compiling():
            return self.find().size
        if world is None or world.size() == 1:
            return 1
        if rule is None or isinstance(rule, int):
            return rule or world.size()
        lists: Any = rule
        return len(lists if is_ranks(rule) else next((ranks for ranks in lists if world.rank() in ranks), lists[0]))

    def take(self) -> Communicator:
        """:meth:`find`, from the beginning."""
        world = c10d.default_group()
        communicator = self._make()
        self._world = _forgetting(self, world)
        self.communicator = communicator
        return communicator

    def _make(self) -> Communicator:
        given = None if self.given is None else self.given()
        if self.given is not None and (given is None or not c10d.is_alive(given)):
            raise RuntimeError(c10d.DESTROYED)
        ranks = self.ranks()
        if len(ranks) == 1:
            return LOCAL
        if bagua.is_initialized():
            return bagua.communicator_among(ranks)
        return make_communicator(ranks, self.rule, given)

    def ranks(self) -> tuple[int, ...]:
        """Returns the ranks of this one's group in the job that runs."""
        if bagua.is_initialized() and (self.rule is None or is_ranks(self.rule)):
            return bagua.own_ranks(self.rule)
        return group_ranks(self.rule, c10d.job_of(c10d.default_group()))


def _forgetting(seat: Seat, group: Any) -> Callable[[], Any]:
    """Returns a weak reference to ``group``, with whose end ``seat`` is to be found anew."""

    def forget(_: Any) -> None:
        seat.communicator = None

    return ref(group, forget)


def make_communicator(ranks: tuple[int, ...], rule: Rule, given: Any) -> Communicator:
    """Returns the communicator that layers have to themselves, which its ``ranks`` make together at their first use.

    Args:
        ranks: the members, of the job of torch.distributed that runs.
        rule: how the user described them.
        given: the group that the user gave in place of a description, or None.
    """
    job = c10d.job_of(c10d.default_group())
    group = job.layers_group(ranks, _told(rule, given), given, like_given=is_ranks(rule))
    return shared.communicator_of(group)


def _told(rule: Rule, given: Any) -> str:
    return told(rule) if given is None else f"group {given.group_name!r} of ranks {rule}"


_seats: dict[Rule, Seat] = {}
_seats_of_given: WeakKeyDictionary[Any, Seat] = WeakKeyDictionary()
_numbers = itertools.count()
_numbered: WeakValueDictionary[int, Seat] = WeakValueDictionary()
_seating = Lock()


def _seat_of(rule: Rule) -> Seat:
    with _seating:
        if rule not in _seats:
            _seats[rule] = Seat(rule)
        return _seats[rule]


def _seat_of_given(group: Any, ranks: tuple[int, ...]) -> Seat:
    with _seating:
        if group not in _seats_of_given:
            _seats_of_given[group] = Seat(ranks, ref(group))
        return _seats_of_given[group]


def _take_seat(number: int) -> None:
    """Sees to it, while torch.compile traces, that there is a communicator: runs as it stands and is not traced."""
    seat = _numbered[number]
    if seat.communicator is None:
        seat.take()


# torch.compiler.assume_constant_result, which would have every process import the compiler.
_take_seat._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Peers:
    """Whom a layer synchronizes with, whatever it was given as. It travels as a description of that.

    Args:
        rule: who they are.
        given: returns the group that the user gave, which is not kept alive; None where it is gone.
        exact: the one communicator to use, in the place of one made for layers alone.
        seat: that of the group that the user gave; None for the one of ``rule``.
    """

    __slots__ = ("_given", "exact", "seat")

    def __init__(
        self,
        rule: Rule = None,
        given: Callable[[], Any] | None = None,
        exact: Communicator | None = None,
        seat: Seat | None = None,
    ) -> None:
        self.seat = _seat_of(rule) if seat is None else seat
        self.exact = exact
        self._given = given

    def communicator(self) -> Communicator:
        """Returns the communicator of this process in the job that runs: alone without one.

        Raises:
            ValueError: this job has no such ranks, or ranks have different descriptions.
            RuntimeError: the group that was given was destroyed.
        """
        if self.exact is not None:
            return self.exact
        # What was made for the group that was given outlives it, as long as the job does.
        # Not asked in a trace, which goes by what it has seen first.
        if not torch.compiler.is_compiling() and self.seat.communicator is None and self._is_gone():
            raise RuntimeError(c10d.DESTROYED)
        return self.seat.find()

    def found(self) -> Communicator | None:
        """Returns the communicator if it was made, and not by Bagua: this makes none."""
        return self.seat.found() if self.exact is None else self.exact

    def size(self) -> int:
        """Returns the number of ranks, before they make their group; only for ``"node"`` they have to be asked."""
        return self.seat.size() if self.exact is None else self.exact.size

    def _is_gone(self) -> bool:
        return self._given is not None and self._given() is None

    @property
    def process_group(self) -> Any:
        """What the user gave: the group as long as it lives, else the description of it."""
        given = None if self._given is None else self._given()
        return self.description if given is None else given

    @property
    def description(self) -> Any:
        """What can be kept in a file."""
        return described(self.seat.rule) if self.exact is None else self.exact

    def torch_group(self) -> Any:
        """Returns the c10d group for the user, made by the members together if need be; None for that of the job.

        Raises:
            TypeError: there is none, as for a Communicator.
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
        rule = self.seat.rule
        return c10d.job_of(world).users_group(self.seat.ranks(), told(rule), like_given=is_ranks(rule))

    def group_before(self) -> Any:
        """Returns what a layer of another class had: the group itself, also where only its ranks were copied."""
        described_only = self._given is None and is_ranks(self.seat.rule)
        return self.torch_group() if described_only else self.process_group

    def __deepcopy__(self, memo: Any) -> "Peers":
        return self if self.seat.given is not None else peers_of(copy.deepcopy(self.description, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return peers_of, (self.description,)

    def __repr__(self) -> str:
        if self._given is None or self.description is not None:
            return repr(self.description)
        group = self._given()
        return "destroyed" if group is None else repr(RankGroup(tuple(_ranks_of(group))))


EVERYONE = Peers()


def peers_of(process_group: Any) -> Peers:
    """Returns whom ``process_group`` stands for.

    Raises:
        TypeError: it is none of the supported kinds.
        ValueError: it is a group that this rank is not a member of, or a description that fits no job, or not this one.
        RuntimeError: it is Bagua's, and Bagua is not initialized.
    """
    if process_group is None:
        return EVERYONE
    if isinstance(process_group, Peers):
        return process_group
    if bagua.is_process_group(process_group):
        return Peers(bagua.rule_of(process_group), lambda: process_group)
    if c10d.is_process_group(process_group):
        return _peers_in(process_group)
    if _is_mesh(process_group):
        return _peers_on(process_group)
    if isinstance(process_group, (type(LOCAL), c10d.TorchCommunicator, bagua.BaguaCommunicator, Communicator)):
        return Peers(exact=process_group)
    rule = rule_of(process_group)
    world = c10d.default_group()
    if world is not None:
        check_rule(rule, world.rank(), world.size())
    return Peers(rule)


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
    peers = peers_of(process_group)
    peers.communicator()
    return peers.torch_group()


def _peers_in(group: Any) -> Peers:
    """The members of a c10d group. The default one stands for everyone, in whatever job a copy is."""
    world = c10d.default_group()
    ranks = c10d.job_of(world).remember(group)
    return Peers(None, ref(group)) if group is world else Peers(ranks, ref(group), seat=_seat_of_given(group, ranks))


def _ranks_of(group: Any) -> list[int]:
    return list(group.ranks) if bagua.is_process_group(group) else dist.get_process_group_ranks(group)


def _is_mesh(process_group: object) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(process_group, DeviceMesh)


def _peers_on(mesh: Any) -> Peers:
    world = c10d.default_group()
    if mesh.ndim != 1:
        raise ValueError(
            f"process_group: expected a DeviceMesh of 1 dimension, got one of {mesh.ndim}; name one, as in mesh['dp']"
        )
    if world is None:  # the job of the mesh has ended
        return Peers(tuple(sorted(mesh.mesh.tolist())))
    if mesh.get_coordinate() is None:
        raise ValueError(f"process_group: expected a DeviceMesh with this rank, rank {world.rank()}, got {mesh}")
    return _peers_in(mesh.get_group())
