"""History of calls: from the messages of a group so far, all its ranks predict the same next one."""

from __future__ import annotations

import itertools
import os
from collections import Counter, deque
from collections.abc import Callable
from typing import Any
from weakref import finalize

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .. import ops
from ..groups import FORKED, Communicator
from ..registry import Registry
from ..torch_internals.autograd import untraced
from ..torch_internals.groups import group_named
from .faults import forget_records, record_of
from .signatures import CallSignature, checksum, describe_compiled, exact_bits, word_of


class CallHistory:
    """The calls of one group, from which each rank predicts the next one: the same on all of them.

    A step begins with the first forward after a backward.
    """

    most = 2**14  # predictions; all ranks forget them at the same call

    def __init__(self, compiled: set[int], name: str) -> None:
        self.name = name  # unique; key of the fault records
        self.rank = self.size = 0  # both 0 before the first eager call
        self.exact_bits = 0  # bits of a fingerprint that are exact in sums of this group
        self.calls = 0
        self.number = 1  # next call's number in headers; never 0, which stands for compiled code
        self.device: torch.device | None = None  # device of the messages; None before the first one
        self.failure: str | None = None  # the call after which ranks no longer agree on the next one
        # The call that has begun to send and has not finished: another thread is in it, or an exception ended it.
        self.sending: CallSignature | None = None
        self.pending: Any = None  # the Probe of this rank's error, if all other ranks may have raised one too
        # Kinds compiled here. Their eager calls too send only their options, as compiled code does.
        self.compiled = compiled
        self.last: CallSignature | None = None
        self.recent: deque[tuple[int, CallSignature]] = deque(maxlen=2**12)  # numbers of calls, and the calls
        self.probes = 0  # number of probes sent
        self.step = 0  # checksum of the calls of this step
        self.after_step: dict[int, tuple[CallSignature, int]] = {}  # the next call, and the checksum that includes it
        self.next: tuple[CallSignature, int] | None = None  # entry of after_step for this place of a step
        self._after_call: dict[int, CallSignature] = {}  # by caller
        self._numbers = WeakIdKeyDictionary()
        self._callers: Counter[str] = Counter()

    def expected(self) -> CallSignature | None:
        """Predicts the next call: from the calls of this step, else from the last call."""
        known, last = self.next, self.last  # read once: reports read them while the group goes on
        if known is not None:
            return known[0]
        return None if last is None else self._after_call.get(last.caller)

    def add(self, signature: CallSignature) -> None:
        """Adds a call that all ranks have made, and expects it next in this place of a step."""
        known = self.next
        if known is None or known[0] is not signature:
            known = self._learn(signature)
        self.step, self.last = known[1], signature
        self.next = self.after_step.get(self.step)
        self.calls += 1
        self.recent.append((self.calls, signature))
        self.number = self.calls % (ops.WORD - 1) + 1

    def _learn(self, signature: CallSignature) -> tuple[CallSignature, int]:
        last, step = self.last, self.step
        if len(self.after_step) == self.most and step not in self.after_step:
            self.after_step.clear()
            self._after_call.clear()
        if last is not None:
            self._after_call[last.caller] = signature
            if last.is_backward and not signature.is_backward:
                step = 0
        known = self.after_step[self.step] = signature, checksum(step, signature.caller, 0)
        return known

    def number_of(self, caller: object, kind: str) -> int:
        """Returns the number of a model, or of a layer outside of a model, among all of its ``kind``.

        They are numbered at their first calls in this group, which all ranks make in the same order.
        """
        number: int | None = self._numbers.get(caller)
        if number is None:
            self._callers[kind] += 1
            number = self._numbers[caller] = self._callers[kind]
        return number


# By group, or by communicator without a group. Compared by identity, because communicators may define equality.
_histories = WeakIdKeyDictionary()
_lasting: list[tuple[Any, CallHistory]] = []  # histories of communicators that allow no weak reference
_compiled_unnamed: set[int] = set()  # compiled kinds of all communicators without a group
_numbers = itertools.count()

first_message_hooks: Registry[Callable[[CallHistory, Communicator], None]] = Registry()
"""Called with the history of a group and with its communicator, before the first message."""


def history_in(communicator: Communicator) -> CallHistory:
    """Returns the history of the group of ``communicator``."""
    history = _history_of(getattr(communicator, "group", communicator))
    history.rank, history.size = communicator.rank, communicator.size
    history.exact_bits = exact_bits(history.size)
    return history


def histories() -> list[CallHistory]:
    """Returns the histories of all groups that live, in any thread."""
    groups = [group for held in _histories.keyrefs() if (group := held()) is not None]
    return [*(_histories[group] for group in groups), *(history for _, history in _lasting)]


def _history_of(group: Any) -> CallHistory:
    known = [history for held, history in _lasting if held is group]
    if known or group in _histories:
        return known[0] if known else _histories[group]
    compiled = set() if hasattr(group, "group_name") else _compiled_unnamed
    history = CallHistory(compiled, f"{getattr(group, 'group_name', '')} {next(_numbers)}")
    finalize(history, forget_records, history.name)
    try:
        _histories[group] = history
    except TypeError:
        _lasting.append((group, history))
    return history


def _fail_after_fork() -> None:
    """Fails all groups in a child process: only the parent has the threads of their backends."""
    for history in histories():
        history.failure, history.pending = FORKED, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fail_after_fork)


@untraced  # a checkpointed region that is compiled must not change outside state
def note_compilation(group_name: str | None, kind: str, device_type: str, *shared: Any) -> str:
    """Notes that a call with these shared options is compiled, by a layer of this kind, in the group of that name.

    Without a name this holds for all groups without one. Returns the name under which the fault record is kept.
    """
    describe_compiled(kind, shared)
    history = None if group_name is None else _history_of(group_named(group_name))
    (_compiled_unnamed if history is None else history.compiled).add(word_of(kind))
    name = "" if history is None else history.name
    record_of(name, device_type, () if history is None else history.recent)
    return name
