"""Jobs of torch.distributed, whose ranks create groups and agree on descriptions."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, ref

from .._groups import LOCAL, RankGroup, text_of_ranks
from .._groups.spec import NODE, Ranks, Rule, description_of, members_by, text_of
from .._torch import process_groups
from .c10d import TorchCommunicator, end_with
from .meeting import Meeting, host_name
from .shared import layers_communicator


class Job:
    """Creates groups and agrees on descriptions in a torch.distributed job, which ends when its default group is
    destroyed."""

    def __init__(self, world: Any) -> None:
        self._world: Any = ref(world)
        self.rank: int = world.rank()
        self.size: int = world.size()
        self._backend, self._store = process_groups.backend_and_store(world)
        self._device = world.bound_device_id
        self._timeout = process_groups.timeout_of(world)
        self._ranks: dict[Rule, Ranks] = {}  # by rule, for rules in use
        self._agreeing = Lock()
        # Communicators by user and ranks, for each group that they end with: the default group, or a given group.
        self._communicators: WeakKeyDictionary[Any, dict[tuple[str, Ranks], Any]] = WeakKeyDictionary()
        self._creating: dict[str, Lock] = {}

    def ranks_of(self, rule: Rule) -> Ranks:
        """Returns the ranks in this rank's group.

        All ranks of the job take part in a rule's first use, except for a RankGroup.

        Raises:
            ValueError: ``rule`` does not fit the job, or ranks have different rules.
            RuntimeError: a rank did not arrive within the job's timeout.
        """
        ranks = members_by(rule, self.rank, self.size)
        if ranks is not None and (self.size == 1 or isinstance(rule, RankGroup)):
            return self._ranks.setdefault(rule, ranks)
        with self._agreeing:
            if rule not in self._ranks:
                same_host = self._agree_on(rule)
                self._ranks[rule] = same_host if ranks is None else ranks
            return self._ranks[rule]

    def _agree_on(self, rule: Rule) -> Ranks:
        """Checks that all ranks have the same ``rule``. For "node", returns the ranks on this host."""
        text, host = str(description_of(rule)), list(host_name()) if rule == NODE else []
        with self._meeting("agreement", range(self.size), text_of(rule)) as meeting:
            brought = meeting.exchange([text, host])
        texts = [text for text, _ in brought]
        if len(set(texts)) > 1:
            got = ", ".join(f"{text} on rank {texts.index(text)}" for text in dict.fromkeys(texts))
            raise ValueError(f"process_group: expected equal values on all {self.size} ranks of the job, got {got}")
        return tuple(rank for rank, (_, other) in enumerate(brought) if other == host)

    def communicator(
        self, user: str, rule: Rule, given: Any = None, creates: bool = True, make: Callable[[Ranks], Any] | None = None
    ) -> Any:
        """Returns the communicator for ``user`` ("layers" or "user"), which members create at the first use.

        Each ``given`` group has a separate communicator with the group's backend and timeout, which is destroyed with
        the group. By default, backend and timeout are those of the job's group. Layers get LOCAL for a single
        rank.

        torch's ``new_group`` names groups by number. If it counts groups per job, all ranks must take part; if it
        counts per rank, members that have created different numbers of groups wait forever. Instead, members agree
        on the group's name.

        Args:
            creates: if False, returns None if the communicator does not exist yet.
            make: creates the communicator of another engine.

        Raises:
            ValueError, RuntimeError: as :meth:`ranks_of`; or some members did not arrive within the timeout of the job,
                or of the ``given`` group if it is shorter.
        """
        ranks = self.ranks_of(rule) if creates else self._ranks.get(rule)
        if ranks is None:
            return None
        if user == "layers" and len(ranks) == 1:
            return LOCAL
        model = given or self._world()
        known = self._communicators.setdefault(model, {})
        if not creates:
            return known.get((user, ranks))
        key = f"{user} {ranks} {given.group_name if given else ''}"
        name = f"bagua_syncbn:{hashlib.sha1(key.encode(), usedforsecurity=False).hexdigest()}"
        what = text_of(rule) if given is None else f"group {given.group_name!r} of {text_of_ranks(ranks)}"
        with self._creating.setdefault(name, Lock()):
            if (user, ranks) not in known:
                with self._meeting(name, ranks, what, process_groups.timeout_of(model)) as meeting:
                    meeting.exchange()
                    known[user, ranks] = make(ranks) if make else self._make(user, ranks, given, name, meeting)
            return known[user, ranks]

    def _make(self, user: str, ranks: Ranks, given: Any, name: str, meeting: Meeting) -> TorchCommunicator:
        store, model = meeting.store or self._store, given or self._world()
        group = process_groups.make_group(ranks, model, store, f"{name}:{meeting.attempt}", self._device)
        if given is not None:
            end_with(given, group)
        return layers_communicator(group, meeting) if user == "layers" else TorchCommunicator(group)

    def users_group(self, rule: Rule) -> Any:
        """Returns a group for the user: the default group if it has the same ranks, else a new one.

        Never returns the layers' group, so that user messages cannot interleave with the layers' messages.
        """
        return self._world() if len(self.ranks_of(rule)) == self.size else self.communicator("user", rule).group

    def _meeting(self, name: str, ranks: Sequence[int], what: str, limit: timedelta | None = None) -> Meeting:
        """Returns a meeting of ``ranks`` for the first use of ``what``; ``limit`` may shorten the job's timeout."""
        store: Any = None if str(self._backend) == "fake" else self._store
        with suppress(AttributeError, RuntimeError):  # some stores cannot be cloned
            store = store.clone()  # threads may share the store, but a connection serves one thread at a time
        timeout = self._timeout if limit is None else min(limit, self._timeout)
        return Meeting(store, name, self.rank, ranks, timeout, what)
