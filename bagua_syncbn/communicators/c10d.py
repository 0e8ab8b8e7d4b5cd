"""Ranks of a torch.distributed job: NCCL, gloo and any other c10d backend."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from .. import torch_internals
from .waiting import AsyncCollective, keep_last_works_of, wait_in_slices

_IS_AVAILABLE = dist.is_available()

DESTROYED = (
    "process_group: expected a live group, got one that was destroyed; run forward and backward before "
    "destroy_process_group()"
)


class TorchCommunicator:
    """Collectives of one :class:`torch.distributed.ProcessGroup`, of which this rank is a member.

    A layer with this communicator as its ``process_group`` uses that group itself, even if the group carries other
    messages too.

    The communicator does not keep the group alive, because graphs hold communicators and outputs hold graphs: a group
    that outlives ``destroy_process_group`` has threads that abort the process when the interpreter ends. Compiled code
    holds the name of the group instead.
    """

    __slots__ = ("__weakref__", "_gathers_lists", "_group", "name", "rank", "size")

    def __init__(self, group: Any) -> None:
        self._group = ref(group)
        keep_last_works_of(group)
        self._gathers_lists = False  # True once the backend refused, before any message, to gather into one tensor
        self.name: str = group.group_name
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
        if torch.compiler.is_compiling():
            return torch_internals.traced_all_gather(packed, self.size, self.name)
        group = self._group() or self.group  # the property raises
        gathered, work = self._all_gather(group, packed, packed.is_cpu)
        _end(work, group, packed)
        return gathered

    def all_reduce(self, packed: Tensor) -> Tensor:
        if _is_gathered(packed, self.size):
            return self.all_gather(packed).sum(0)
        if torch.compiler.is_compiling():
            return torch_internals.traced_all_reduce(packed, self.name)
        group = self.group
        work = group.allreduce([packed]) if packed.is_cpu else group.allreduce([packed], _SUM_IN_STREAM)
        _end(work, group, packed)
        return packed

    def begin_all_gather(self, packed: Tensor) -> AsyncCollective:
        """Starts :meth:`all_gather` without waiting for the other ranks."""
        group = self.group
        return AsyncCollective(group, *self._all_gather(group, packed, True))

    def begin_all_reduce(self, packed: Tensor) -> AsyncCollective:
        """Starts :meth:`all_reduce` without waiting for the other ranks."""
        if _is_gathered(packed, self.size):
            group = self.group
            return AsyncCollective(group, *self._all_gather(group, packed, True), adds_up=True)
        return AsyncCollective(self.group, packed, self.group.allreduce([packed]))

    # The methods of groups, since torch.distributed's functions check arguments for longer than the call itself takes.
    def _all_gather(self, group: Any, packed: Tensor, async_op: bool) -> tuple[Tensor, Any]:
        gathered = packed.new_empty(self.size * packed.numel())  # gloo takes the concatenated form only
        rows = gathered.view(self.size, -1)
        if not self._gathers_lists:
            try:
                options = () if async_op else (_GATHER_IN_STREAM,)
                return rows, getattr(group, torch_internals.GATHER_METHOD)(gathered, packed, *options)
            except RuntimeError as error:
                if not isinstance(error, NotImplementedError) and "does not support" not in str(error):
                    raise
                self._gathers_lists = True
        return rows, dist.all_gather(list(rows.unbind()), packed, group=group, async_op=async_op)

    def __repr__(self) -> str:
        group = self._group()
        return f"TorchCommunicator(ranks={tuple(dist.get_process_group_ranks(group)) if group else 'destroyed'})"

    def __deepcopy__(self, memo: Any) -> "TorchCommunicator":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"process_group: expected what can leave this process, got {self!r}, which is one group of it; "
            "give the layer the group itself, whose ranks can be saved, or a description"
        )


_SUM_IN_STREAM, _GATHER_IN_STREAM = (
    map(torch_internals.in_stream, ("Allreduce", "Allgather")) if _IS_AVAILABLE else (None, None)
)


def _end(work: Any, group: Any, packed: Tensor) -> None:
    """Waits for a collective of ``packed``: the host on CPU; elsewhere the stream at most, or not even that."""
    if work is None:  # has run on the current stream
        return
    if packed.is_cpu:
        wait_in_slices(work, group)
    else:
        work.wait()  # a wait with a time limit would be the host's


# Smallest group that sends nothing whose size grows with the number of ranks; docs/design.md has the model.
FEWEST_ADDED = 32


def is_large(ranks: int) -> bool:
    """Whether a group of so many ranks adds up the statistics that smaller groups gather."""
    return ranks >= FEWEST_ADDED


# Largest message in bytes whose sum is gathered on CPU, and added up by each rank. Waiting for other processes takes
# much longer there than sending, and a gather over a ring has half the steps of an all-reduce.
_MOST_GATHERED = 2**14


def _is_gathered(packed: Tensor, ranks: int) -> bool:
    """Whether each rank gathers ``packed`` and adds it up itself. All ranks agree on it, compiled or not."""
    return ranks < FEWEST_ADDED and packed.is_cpu and packed.numel() * packed.element_size() <= _MOST_GATHERED


def in_job() -> bool:
    """Whether torch.distributed runs a job. The check shows no group to torch.compile."""
    return _IS_AVAILABLE and dist.is_initialized()


def default_group() -> Any:
    """Returns the job's default group, or None where there is no job."""
    return dist.group.WORLD if _IS_AVAILABLE else None


def is_process_group(process_group: object) -> bool:
    """Whether ``process_group`` is a c10d group.

    Raises:
        ValueError: the group excludes this rank, or was destroyed.
    """
    if not _IS_AVAILABLE:
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


def is_alive(group: Any) -> bool:
    """Whether ``group`` belongs to the running job and was not destroyed."""
    try:
        dist.get_rank(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


class Job:
    """Groups and agreements of this package in one torch.distributed job, which ends with its default group."""

    def __init__(self, world: Any) -> None:
        self._world: Callable[[], Any] = ref(world)
        self.rank: int = world.rank()
        self.size: int = world.size()
        self._backend, self._store = torch_internals.backend_and_store(world)
        self._device = torch_internals.device_of(world)
        self._timeout: timedelta = torch_internals.timeout_of(world)
        self._exchanges = 0
        self._given: dict[tuple[int, ...], ref[Any]] = {}
        self._made: dict[str, ref[Any]] = {}
        self._times_tried: Counter[str] = Counter()
        self._own_ranks: dict[Any, tuple[int, ...]] = {}
        self._finding = Lock()
        self._making: dict[str, Lock] = {}

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def remember(self, group: Any) -> tuple[int, ...]:
        """Returns the ranks of a group that the user made. Groups for a RankGroup of these ranks follow it."""
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        if group is not self._world():
            self._given[ranks] = ref(group)
        return ranks

    def own_ranks(self, rule: Any, find: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the ranks that ``find`` returned for ``rule`` at the first use of the rule in this job."""
        with self._finding:
            if rule not in self._own_ranks:
                self._own_ranks[rule] = find()
            return self._own_ranks[rule]

    def layers_group(self, ranks: tuple[int, ...], what: str, given: Any = None, like_given: bool = False) -> Any:
        """Returns the group of these ranks that only layers use; its members make it at the first use.

        Each ``given`` group has one, and these ranks without a given group have another. Backend, options and time-out
        are those of ``given``; with ``like_given`` those of the last given group of these ranks; else those of the job.

        Raises:
            RuntimeError: some members did not arrive within the job's time-out.
        """
        if given is not None:
            return self._made_once("layers", ranks, given, what, named_after=given.group_name)
        model = self._alive(self._given.get(ranks)) if like_given else None
        return self._made_once("layers", ranks, model or self._world(), what)

    def users_group(self, ranks: tuple[int, ...], what: str, like_given: bool) -> Any:
        """Returns a group of these ranks for the user: the default group, a given one, or one that the members make.

        The group of the layers is never returned: messages of the user must not come between those of layers.
        """
        given = self._alive(self._given.get(ranks)) if like_given else None
        if given is not None or len(ranks) == self.size:
            return given or self._world()
        return self._made_once("user", ranks, self._world(), what)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Returns the values of all ranks of the job, in rank order; all ranks make the call for ``what``.

        Raises:
            RuntimeError: a rank did not arrive within the job's time-out.
        """
        number = self._exchanges
        self._exchanges += 1
        return self._meet(f"exchange {number}", self.everyone, value, what)

    def _meet(self, key: str, ranks: Sequence[int], value: Any, what: str) -> list[Any]:
        """Returns the values that ``ranks`` brought to the meeting ``key``; each of them makes the call once.

        Values are of JSON's types and go through the job's store, because in the middle of a trace no tensor can be
        sent. A meeting takes place for all ranks or for none: the first rank that gives up decides for later ones.

        Raises:
            RuntimeError: some ranks did not arrive within the job's time-out.
        """
        if str(self._backend) == "fake":  # torch's backend without other processes
            return [value] * len(ranks)
        store = torch_internals.prefix_store(f"bagua_syncbn/{key}", self._store)
        try:
            outcome = self._outcome_of(store, ranks, value, what)
        except RuntimeError as error:
            raise RuntimeError(
                f"process_group: expected the job's store to answer in the first use of {what}, got "
                f"{type(error).__name__}: {error}; the rank that keeps it may have ended"
            ) from error
        if "failed" in outcome:
            raise RuntimeError(
                f"process_group: expected {_ranks(ranks)} to make the first use of {what} together, got that "
                f"{outcome['failed']}; sync_group makes a description's groups beforehand"
            )
        brought: list[Any] = outcome["brought"]
        return brought

    def _outcome_of(self, store: Any, ranks: Sequence[int], value: Any, what: str) -> Any:
        """Returns the outcome of the meeting in ``store``, and tells the other ranks if this rank leaves it."""
        doing = torch_internals.prefix_store(_DOING, self._store)
        doing.set(str(self.rank), what)
        store.set(str(self.rank), json.dumps(value))
        try:
            outcome = self._wait_for_outcome(store, ranks)
        except BaseException as error:
            with suppress(RuntimeError):
                _settle(store, {"failed": f"rank {self.rank} left with {type(error).__name__}"})
            raise
        if "failed" not in outcome:
            doing.set(str(self.rank), "")
        return outcome

    def _wait_for_outcome(self, store: Any, ranks: Sequence[int]) -> Any:
        """Returns the outcome of the meeting in ``store``; the first of ``ranks`` decides it once all have arrived.

        Polls the store, because a blocking wait would keep other threads from it.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = 0.001
        while not store.check(["outcome"]):
            if self.rank == ranks[0] and store.check([str(rank) for rank in ranks]):
                return _settle(store, {"brought": [json.loads(store.get(str(rank))) for rank in ranks]})
            if time.monotonic() > deadline:
                return _settle(store, {"failed": self._who_is_missing(store, ranks)})
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return json.loads(store.get("outcome"))

    def _who_is_missing(self, store: Any, ranks: Sequence[int]) -> str:
        doing = torch_internals.prefix_store(_DOING, self._store)
        missing = [str(rank) for rank in ranks if not store.check([str(rank)])]
        does = {rank: doing.get(rank).decode() for rank in missing if doing.check([rank])}
        told = [f"rank {rank} waits in the first use of {what}" for rank, what in does.items() if what]
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}" if missing else "an answer"
        waited = f"rank {self.rank} waited for {who} for {self._timeout.total_seconds():g} s, the job's time-out"
        return "; ".join([waited, *told])

    def _alive(self, group: "ref[Any] | None") -> Any:
        found = None if group is None else group()
        return found if found is not None and is_alive(found) else None

    def _made_once(
        self, whose: str, ranks: tuple[int, ...], model: Any, what: str, named_after: str | None = None
    ) -> Any:
        backend, _ = torch_internals.backend_and_store(model)
        key = f"{backend} {ranks}" if named_after is None else f"{backend} {ranks} {named_after}"
        name = f"bagua_syncbn:{whose}:{hashlib.sha1(key.encode(), usedforsecurity=False).hexdigest()}"
        with self._making.setdefault(name, Lock()):
            group = self._alive(self._made.get(name))
            if group is None:
                # Attempts are numbered alike on all members: a member that arrives at a failed attempt fails in it too.
                number = self._times_tried[name]
                self._times_tried[name] += 1
                group = self._make_group(ranks, model, f"{name}:{number}", what, named_after is not None)
                self._made[name] = ref(group)
        return group

    def _make_group(self, ranks: tuple[int, ...], model: Any, name: str, what: str, is_given: bool) -> Any:
        """Makes a group as torch's ``new_group`` does, but by the members alone and under a name known to each of them.

        ``new_group`` numbers groups in the job, which takes all its ranks, or on the rank, where members that are in
        different numbers of other groups wait for each other forever.
        """
        self._meet(name, ranks, None, what)
        # Threads may make given groups at the same time, and one store connection serves one thread at a time.
        store = _clone(self._store) if is_given else self._store
        # Splitting an NCCL communicator off that of the job takes all ranks of the job, in one order.
        splits = not is_given and len(ranks) == self.size
        try:
            return torch_internals.make_group(self._world(), ranks, model, store, name, self._device, splits)
        except RuntimeError as error:
            raise RuntimeError(
                f"process_group: expected {_ranks(ranks)} to connect in the first use of {what}, got on rank "
                f"{self.rank} {type(error).__name__}: {error}; another rank may have ended"
            ) from error


_DOING = "bagua_syncbn/doing"  # prefix of the keys under which each rank names the first use that it waits in


def _settle(store: Any, outcome: Any) -> Any:
    """Sets the outcome of a meeting unless it is already set; returns the outcome that holds."""
    return json.loads(store.compare_set("outcome", "", json.dumps(outcome)))


def _clone(store: Any) -> Any:
    """Returns another connection to ``store``, or ``store`` itself if its class cannot make one."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):
        return store


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


_jobs: WeakKeyDictionary[Any, Job] = WeakKeyDictionary()


def job_of(world: Any) -> Job:
    """Returns the job that has ``world`` as its default group."""
    with _finding_job:
        job = _jobs.get(world)
        if job is None:
            job = _jobs[world] = Job(world)
    return job


_finding_job = Lock()
