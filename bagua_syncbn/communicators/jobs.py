"""Jobs of torch.distributed, and meetings of ranks in the job's store."""

import hashlib
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import ContextVar, copy_context
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist

from ..groups import RankGroup, ranks_by_text, text_of_ranks
from ..groups.spec import NODE, Ranks, Rule, description_of, first_user, members_by, text_of
from ..torch_internals import groups as torch_groups
from .c10d import is_alive

_log = logging.getLogger("bagua_syncbn")

_Made = TypeVar("_Made")
_CAUSES = (
    "Likely causes: a rank has ended or raised an error, is evaluating or running other code, or has a model that was "
    "not converted"
)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# Holds the exception that ended the main thread's wait for the thread of a first use, see in_one_piece.
_interrupts: ContextVar[Sequence[BaseException]] = ContextVar("interrupts", default=())


def in_one_piece(make: Callable[[], _Made]) -> _Made:
    """Returns ``make()``, in which ranks meet. If a signal handler raises, the next meeting fails on all ranks.

    After a meeting the other ranks connect to this one: without it they would wait for the time-out. So ``make`` runs
    in a helper thread, because Python runs signal handlers in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        return make()
    made: Future[_Made] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # each thread has its own
    interrupts: list[BaseException] = []

    def run() -> None:
        _interrupts.set(interrupts)
        try:
            with torch.cuda.device(device):
                made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    try:
        threading.Thread(target=copy_context().run, args=(run,), daemon=True).start()
        return made.result()
    except BaseException as error:
        if not made.done():
            interrupts.append(error)
            wait([made], 5)  # lets the thread tell the others, because the process may end now
        raise


class MeetingError(RuntimeError):
    """Says why a meeting failed."""


def meet(
    store: Any,
    rank: int,
    ranks: Sequence[int],
    value: Any,
    seconds: float,
    decide: Callable[[list[Any]], Any] = list,
    what: str = "a group",
    time_out: str = "the group's time-out",
    explain: Callable[[list[int]], str] = lambda missing: f". {_CAUSES}",
) -> Any:
    """Returns the result of ``decide``, which the first of ``ranks`` calls with the values of all ranks in their order.

    Each of ``ranks`` makes the call once, with a ``value`` that JSON can represent and a ``store`` of this meeting. The
    meeting succeeds on all ranks or on none: the first rank that gives up decides for later ones.

    Args:
        what: the group whose first use this is, for messages.
        time_out: the time-out of ``seconds``, for messages.
        explain: returns the end of a sentence about missing ranks, which says why they are missing.

    Raises:
        MeetingError: some ranks did not arrive within ``seconds``, or one has left.
    """

    def arrived(others: Sequence[int]) -> bool:
        return bool(store.check([str(other) for other in others]))

    def missing() -> tuple[str, str]:
        """Returns the ranks that have not arrived, and the end of a sentence that says why."""
        absent = [other for other in ranks if not arrived([other])]
        return (text_of_ranks(absent), explain(absent)) if absent else ("an answer", "")

    begin, pause, outcome, has_logged = time.monotonic(), 0.0005, None, False
    try:
        store.set(str(rank), json.dumps(value))
        while outcome is None:
            waited = time.monotonic() - begin
            if store.check(["outcome"]):
                outcome = json.loads(store.get("outcome"))
            elif interrupts := _interrupts.get():
                outcome = _settle(store, _left(rank, interrupts[0]))
            elif rank == ranks[0] and arrived(ranks):
                outcome = _settle(store, {"decided": decide([json.loads(store.get(str(other))) for other in ranks])})
            elif waited > seconds:
                who, why = missing()
                outcome = _settle(store, {"failed": f"rank {rank} waited for {who} for {seconds:g} s, {time_out}{why}"})
            else:
                if waited > seconds / 2 and not has_logged:
                    (who, why), has_logged = missing(), True
                    use = f"{first_user.get()}: first use of {what}"
                    half = f"{seconds / 2:.3g} s, half of {time_out}"
                    _log.warning("%s: rank %d has waited for %s for %s%s", use, rank, who, half, why)
                # Polls, because a blocking wait would keep other threads from the store and ignore Ctrl-C.
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
    except BaseException as error:
        leave_meeting(store, rank, error)
        raise
    if "failed" in outcome:
        raise MeetingError(outcome["failed"])
    return outcome["decided"]


def leave_meeting(store: Any, rank: int, error: BaseException) -> None:
    """Fails the meeting in ``store`` for all ranks, unless it has an outcome, because of an ``error`` on ``rank``."""
    with suppress(RuntimeError):
        _settle(store, _left(rank, error))


def _left(rank: int, error: BaseException) -> Any:
    return {"failed": f"rank {rank} left with {type(error).__name__}"}


def _settle(store: Any, outcome: Any) -> Any:
    """Sets the outcome of a meeting unless it has one. Returns the outcome that holds."""
    return json.loads(store.compare_set("outcome", "", json.dumps(outcome)))


class Job:
    """Groups and agreements of this package in one torch.distributed job, which ends with its default group."""

    def __init__(self, world: Any) -> None:
        self._world: Callable[[], Any] = ref(world)
        self.rank: int = world.rank()
        self.size: int = world.size()
        self._backend, self._store = torch_groups.backend_and_store(world)
        self._device = torch_groups.device_of(world)
        self._timeout: timedelta = torch_groups.timeout_of(world)
        self._given: dict[Rule, ref[Any]] = {}
        self._made: dict[str, ref[Any]] = {}
        self._made_for: dict[str, ref[Any]] = {}  # given groups, by the names of their layers' groups
        self._meetings: Counter[str] = Counter()
        self._own_ranks: dict[Rule, Ranks] = {}
        self._finding = Lock()
        self._making: dict[str, Lock] = {}

    def ranks_of(self, rule: Rule) -> Ranks:
        """Returns the ranks of the group that this rank is in.

        All ranks of the job make the first use of a rule together, except for a rule that lists one group's ranks.

        Raises:
            ValueError: ``rule`` does not fit the job, or ranks have different rules.
            RuntimeError: a rank did not arrive within the job's time-out.
        """
        ranks = members_by(rule, self.rank, self.size)
        if ranks is not None and (self.size == 1 or isinstance(rule, RankGroup)):
            return ranks
        with self._finding:
            if rule not in self._own_ranks:
                hosts = self._agree_on(rule)
                on_host = tuple(rank for rank, host in enumerate(hosts) if host == hosts[self.rank])
                self._own_ranks[rule] = on_host if ranks is None else ranks
            return self._own_ranks[rule]

    def _agree_on(self, rule: Rule) -> list[int]:
        """Checks that all ranks have the same ``rule``. Returns for "node" the first rank on the host of each rank."""

        def compare(brought: list[Any]) -> tuple[dict[str, int], list[int]]:
            """Returns the first rank with each rule, and the first rank on the host of each rank."""
            rules: dict[str, int] = {}
            hosts: dict[tuple[str, ...], int] = {}
            of_rank = []
            for rank, (own, *host) in enumerate(brought):
                rules.setdefault(own, rank)
                of_rank.append(hosts.setdefault(tuple(host), rank))
            return rules, of_rank if rule == NODE else []

        value = [str(description_of(rule)), *host_name()]
        hint = "" if rule is None else "; if only some ranks have such layers, call sync_group on all ranks first"
        rules, hosts = self.meet("agreement", range(self.size), text_of(rule), value, compare, hint=hint)
        if len(rules) > 1:
            got = ", ".join(f"{text} on rank {rank}" for text, rank in rules.items())
            raise ValueError(f"process_group: expected the same on all {self.size} ranks of the job, got {got}")
        return hosts  # type: ignore[no-any-return]

    def remember(self, group: Any) -> Rule:
        """Returns the rule of a group that the user made: its ranks, or None for the default group."""
        if group is self._world():
            return None
        rule = RankGroup(tuple(sorted(dist.get_process_group_ranks(group))))
        self._given[rule] = ref(group)
        return rule

    def layers_group(self, rule: Rule, given: Any = None) -> Any:
        """Returns the group that only layers use; its members make it at the first use.

        Each ``given`` group has one, which ends with it, and its ranks without a given group have another. Backend,
        options and time-out come from ``given``, or for a RankGroup from the last given group of its ranks, or from the
        job.

        Raises:
            ValueError, RuntimeError: as :meth:`ranks_of`; or some members did not arrive within the time-out of the
                job, or of the ``given`` group if it is less.
        """
        ranks = self.ranks_of(rule)
        if given is not None:
            return self._group("layers", ranks, f"group {given.group_name!r} of {text_of_ranks(ranks)}", given=given)
        return self._group("layers", ranks, text_of(rule), model=_alive(self._given.get(rule)))

    def users_group(self, rule: Rule) -> Any:
        """Returns a group for the user: the default group, a given one, or one that the members make.

        The layers' group is never returned, because the user's messages must not come between the layers' messages.
        """
        ranks, given = self.ranks_of(rule), _alive(self._given.get(rule))
        if given is not None or len(ranks) == self.size:
            return given or self._world()
        return self._group("user", ranks, text_of(rule))

    def meet(
        self,
        name: str,
        ranks: Sequence[int],
        what: str,
        value: Any = None,
        decide: Callable[[list[Any]], Any] = list,
        limit: timedelta | None = None,
        hint: str = "",
    ) -> Any:
        """Returns the result of :func:`meet` for ``ranks``, which make the first use of ``what``.

        The meeting is in the job's store, because no tensor can be sent while a trace runs. All ranks number the
        meetings of a ``name`` alike: a rank that arrives at a failed one fails in it too.

        Args:
            limit: time-out of the group, if it may be shorter than the job's.
            hint: advice for the case that ranks do not arrive.

        Raises:
            RuntimeError: some ranks did not arrive in time, or the store did not answer.
        """
        self._meetings[name] += 1
        if str(self._backend) == "fake":  # torch's backend without other processes
            return decide([value] * len(ranks))
        doing = torch_groups.prefix_store("bagua_syncbn/doing", self._store)  # the first use that each rank waits in

        def explain(missing: list[int]) -> str:
            does = [(rank, doing.get(str(rank)).decode()) for rank in missing if doing.check([str(rank)])]
            waits = ranks_by_text((rank, use) for rank, use in does if use)
            texts = [f"; {who} wait{'s' * who.startswith('rank ')} in the first use of {use}" for who, use in waits]
            return "".join(texts) or f". {_CAUSES}{hint}"

        timeout, time_out = self._timeout, "the job's time-out"
        if limit is not None and limit < timeout:
            timeout, time_out = limit, "the group's time-out"
        store = torch_groups.prefix_store(f"bagua_syncbn/{name}:{self._meetings[name]}", self._store)
        try:
            doing.set(str(self.rank), what)
            decided = meet(store, self.rank, ranks, value, timeout.total_seconds(), decide, what, time_out, explain)
            doing.set(str(self.rank), "")
        except MeetingError as error:
            raise RuntimeError(f"first use of {what} failed: {error}") from None
        except RuntimeError as error:
            raise RuntimeError(
                f"first use of {what} failed: the job's store does not answer ({type(error).__name__}: {error}); the "
                "rank that hosts it may have ended"
            ) from error
        return decided

    def _group(self, whose: str, ranks: Ranks, what: str, *, given: Any = None, model: Any = None) -> Any:
        """Returns the group of ``whose`` ``ranks``, which they make once; for a ``given`` group, until its end.

        It has the options of ``given``, of ``model``, or of the default group. torch's ``new_group`` numbers groups in
        the job, which takes all its ranks, or on each rank, where members with different numbers of other groups wait
        for each other forever. So members make this group under a name that all of them know.
        """
        world = self._world()
        model = given or model or world
        backend, _ = torch_groups.backend_and_store(model)
        key = f"{backend} {ranks}" if given is None else f"{backend} {ranks} {given.group_name}"
        name = f"bagua_syncbn:{whose}:{hashlib.sha1(key.encode(), usedforsecurity=False).hexdigest()}"
        with self._making.setdefault(name, Lock()):
            group = _alive(self._made.get(name))
            if group is not None:
                return group
            self.meet(name, ranks, what, limit=torch_groups.timeout_of(model))
            own_name = f"{name}:{self._meetings[name]}"
            store = self._store
            if given is not None:  # by several threads at once; a connection to the store serves one at a time
                with suppress(AttributeError, RuntimeError):  # classes of stores that cannot make another connection
                    store = store.clone()
            # All ranks of the job, in one order, must take part in a split of its NCCL communicator.
            splits = given is None and len(ranks) == self.size
            try:
                group = torch_groups.make_group(world, ranks, model, store, own_name, self._device, splits)
            except RuntimeError as error:
                raise RuntimeError(
                    f"first use of {what} failed: rank {self.rank} cannot connect to the others "
                    f"({type(error).__name__}: {error}); one of them may have ended"
                ) from error
            self._made[name] = ref(group)
            if given is not None:
                finalize(given, self._end, name).atexit = False  # type: ignore[misc]  # the job ends all groups
                for other, its_given in list(self._made_for.items()):  # destroyed, but kept alive by something
                    if _alive(its_given) is None:
                        self._end(other)
                self._made_for[name] = ref(given)
        return group

    def _end(self, name: str) -> None:
        """Ends the layers' group of a given group that has ended; torch itself keeps each group until its end."""
        self._made_for.pop(name, None)
        group = _alive(self._made.pop(name, None))
        if group is not None:
            dist.destroy_process_group(group)


def _alive(group: "ref[Any] | None") -> Any:
    found = None if group is None else group()
    return found if found is not None and is_alive(found) else None


def host_name() -> tuple[str, str]:
    # Host names alone are ambiguous: machines started from one image may share a name.
    return socket.gethostname(), _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


_jobs: WeakKeyDictionary[Any, Job] = WeakKeyDictionary()
_finding_job = Lock()


def job_of(world: Any) -> Job:
    """Returns the job that has ``world`` as its default group."""
    with _finding_job:
        job = _jobs.get(world)
        if job is None:
            job = _jobs[world] = Job(world)
    return job
