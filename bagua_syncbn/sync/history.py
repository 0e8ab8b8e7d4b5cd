"""History of calls: from what was said in a group so far, all its ranks predict the same next message."""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import ref

import torch

from .. import ops
from ..communicators import Communicator
from ..torch_internals import group_named
from .signatures import CallSignature, SharedOptions, describe_compiled, word_of


class CallHistory:
    """The calls of one group, from which each rank knows what its peers expect next: the same on all of them.

    A step begins with the first forward after a backward.
    """

    most = 2**14  # predictions; all ranks forget them at the same call

    def __init__(self, compiled: set[int]) -> None:
        self.calls = 0
        self.number = 1  # next call's number in headers; never 0, which stands for compiled code
        self.device: torch.device | None = None  # device of the messages; None before the first one
        self.failure: str | None = None  # the call after which this rank does not know what others expect
        # The call that has begun to send and is not known to have ended well: another thread is in it, or an exception
        # has ended it.
        self.sending: CallSignature | None = None
        self.pending: Any = None  # PendingError, in case the failure is an error that others may have raised too
        # Kinds whose calls here were compiled. As compiled code does, their eager calls say no more than their options.
        self.compiled = compiled
        self.last: CallSignature | None = None
        self.step = 0  # hash of the calls of this step
        self.after_step: dict[int, tuple[CallSignature, int]] = {}  # the next call, and the hash with it
        self.next: tuple[CallSignature, int] | None = None  # entry of after_step for this place of a step
        self._after_call: dict[tuple[int, int], CallSignature] = {}
        self._numbers: dict[int, tuple[ref[Any], int]] = {}
        self._callers: Counter[str] = Counter()

    def expected(self) -> CallSignature | None:
        """Returns what comes next: what did after the same calls of this step, else after the same last call."""
        if self.next is not None:
            return self.next[0]
        return None if self.last is None else self._after_call.get(self.last.key)

    def add(self, signature: CallSignature) -> None:
        """Adds a call that all ranks have made, and expects it next in this place of a step."""
        known = self.next
        if known is None or (known[0] is not signature and known[0].key != signature.key):
            known = self._learn(signature)
        self.step, self.last = known[1], signature
        self.next = self.after_step.get(self.step)
        self.calls += 1
        self.number = self.calls % (ops.WORD - 1) + 1

    def _learn(self, signature: CallSignature) -> tuple[CallSignature, int]:
        last, step = self.last, self.step
        if len(self.after_step) == self.most and step not in self.after_step:
            self.after_step.clear()
            self._after_call.clear()
        if last is not None:
            self._after_call[last.key] = signature
            if last.is_backward and not signature.is_backward:
                step = 0
        known = self.after_step[self.step] = signature, hash((step, *signature.key))
        return known

    def number_of(self, caller: object, kind: str) -> int:
        """Returns the number of a model, or of a layer by itself, among those of its ``kind`` that call in this group.

        They are counted at their first calls, which all ranks make in the same order; what a rank has besides, and
        never calls here, does not count.
        """
        key = id(caller)
        known = self._numbers.get(key)
        if known is None:

            def forget(_: Any) -> None:
                self._numbers.pop(key, None)

            self._callers[kind] += 1
            known = self._numbers[key] = ref(caller, forget), self._callers[kind]
        return known[1]


# By the id of the group; those of communicators without a group share what was compiled.
_histories: dict[int, tuple[Any, CallHistory]] = {}
_compiled_unnamed: set[int] = set()


def history_in(communicator: Communicator) -> CallHistory:
    """Returns the history of the group of ``communicator``."""
    return _history_of(getattr(communicator, "group", communicator))


def _history_of(group: Any) -> CallHistory:
    number = id(group)
    known = _histories.get(number)
    if known is None:

        def forget(_: Any) -> None:
            _histories.pop(number, None)

        try:
            held: Any = ref(group, forget)
        except TypeError:
            held = group
        history = CallHistory(set() if hasattr(group, "group_name") else _compiled_unnamed)
        known = _histories[number] = held, history
    return known[1]


def note_compilation(group_name: str | None, kind: str, *constants: Any) -> None:
    """Notes that a call with these shared options is compiled, by a layer of this kind, in the group of that name.

    Without a name it says so of all groups that have none.
    """
    word = word_of(kind)
    describe_compiled(word, kind, SharedOptions.of_constants(*constants))
    compiled = _compiled_unnamed if group_name is None else _history_of(group_named(group_name)).compiled
    compiled.add(word)


# torch.compile runs it and does not trace it: a checkpointed region that is compiled must not change outside state.
_untraced: Any = note_compilation
_untraced._dynamo_marked_constant = True
