"""Call history of a group, from which all ranks predict the same next message."""

from __future__ import annotations

import os
from collections import Counter, deque
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .. import _ops as ops
from .._groups import FORKED, Communicator
from .faults import FaultRecord
from .signatures import CallSignature, exact_bits


class CallHistory:
    """Calls of a group, and predictions that are equal on all ranks. A step starts at a forward after a backward."""

    most = 2**14  # maximum number of predictions; all ranks clear them at the same call

    def __init__(self, ranks: int) -> None:
        self.exact_bits = exact_bits(ranks)
        self.calls = 0
        self.number = 1  # next call's number in headers; never 0, the number of compiled calls
        self.probes = 0
        self.compiled: set[int] = set()  # kinds of compiled layers, whose eager calls also use compiled headers
        self.device: torch.device | None = None  # device of probes; None before the first message
        self.failure: str | None = None  # failed call, after which ranks do not agree on the next call
        self.sending: CallSignature | None = None  # unfinished call, in any thread
        self.pending: Any = None  # the Probe for this rank's error, until the peers' answers are read
        self.last: CallSignature | None = None
        self.next: CallSignature | None = None  # the call that followed the same sequence in an earlier step
        self.recent: deque[tuple[int, CallSignature]] = deque(maxlen=2**12)  # numbers and signatures of calls
        self._records: dict[str, FaultRecord] = {}  # by type of device
        self._place = 0  # hash of this step's calls so far
        # Next call, keyed by position in the step, and by caller of the last call.
        self._following: dict[int, CallSignature] = {}
        self._numbers = WeakIdKeyDictionary()
        self._callers: Counter[str] = Counter()

    def expected(self) -> CallSignature | None:
        """Predicts the next call from the calls of this step, or else from the last call."""
        if self.next is None and self.last is not None:
            return self._following.get(self.last.caller)
        return self.next

    def add(self, signature: CallSignature) -> None:
        """Records a call that all ranks have made."""
        last, following, place = self.last, self._following, self._place
        if len(following) > self.most:
            following.clear()
        following[place] = signature
        if last is not None:
            following[last.caller] = signature
            if last.is_backward and not signature.is_backward:
                place = 0  # a step begins
        self.last, self._place = signature, hash((place, signature.caller))
        self.next = following.get(self._place)
        self.calls += 1
        self.recent.append((self.calls, signature))
        self.number = self.calls % (ops.WORD - 1) + 1

    def numbered(self, name: str, owner: object, kind: str) -> str:
        """Appends "#2" or higher to ``name`` if ``owner`` is not the first of this ``kind`` to make a call."""
        number: int | None = self._numbers.get(owner)
        if number is None:
            self._callers[kind] += 1
            number = self._numbers[owner] = self._callers[kind]
        return f"{name} #{number}" if number > 1 else name

    def record_of(self, device_type: str) -> FaultRecord | None:
        """Returns the fault record for ops on ``device_type``; None for tensors without values."""
        if device_type not in self._records and device_type != "meta":
            self._records[device_type] = FaultRecord(device_type, self.recent)
        return self._records.get(device_type)


# Keyed by group, or by communicator if it has no group; by identity, because communicators may define equality.
_histories = WeakIdKeyDictionary()


def history_in(communicator: Communicator) -> CallHistory:
    """Returns the history of the group of ``communicator``."""
    group = getattr(communicator, "group", communicator)
    history: CallHistory | None = _histories.get(group)
    if history is None:
        history = _histories[group] = CallHistory(communicator.size)
    return history


def _fail_after_fork() -> None:
    """Marks all groups as failed in a forked child, which lacks their backends' threads."""
    for history in _histories.values():
        history.failure, history.pending = FORKED, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fail_after_fork)
