"""Message history of a group, from which all ranks predict the same next message."""

from __future__ import annotations

import os
from collections import Counter, deque
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .. import _ops as ops
from .._groups import FORKED, Communicator
from .faults import FaultRecord
from .signatures import Signature, exact_bits


class Place:
    """A node in the graph of a group's message sequences. Links to the next place for each message sent here."""

    __slots__ = ("identity", "is_backward", "places", "predicted")

    def __init__(self, identity: int | None = None, is_backward: bool = False) -> None:
        self.identity = identity  # identity of the message that leads here
        self.is_backward = is_backward  # whether a backward sent it
        self.predicted: Signature | None = None  # the latest message sent here
        self.places: dict[int, Place] = {}  # by identity of the message that leads there


class History:
    """Messages of a group, and predictions that are equal on all ranks. An iteration starts at a forward after a
    backward.
    """

    most = 2**14  # maximum number of links; all ranks forget them at the same message

    def __init__(self, ranks: int) -> None:
        self.exact_bits = exact_bits(ranks)
        self.messages = 0  # excluding probes and messages of compiled code
        self.probes = 0
        # By kind, the forwards of compiled layers. Eager messages of these kinds also have compiled headers.
        self.compiled: dict[int, set[Signature]] = {}
        self.device: torch.device | None = None  # device of probes; None before the first message
        self.failure: str | None = None  # failed message, after which ranks do not agree on the next
        self.sending: Signature | None = None  # unfinished message, in any thread
        self.pending: Any = None  # the Probe for this rank's error, until the peers' answers are read
        self.recent: deque[tuple[int, Signature]] = deque(maxlen=2**12)  # numbers and signatures of messages
        self._records: dict[str, FaultRecord] = {}  # by type of device
        self.place = self._start = Place()
        self._links = 0
        # By identity of a message: the last message after it that was not predicted.
        self._followed: dict[int | None, Signature] = {}
        self._numbers = WeakIdKeyDictionary()
        self._owners: Counter[str] = Counter()

    @property
    def number(self) -> int:
        """Number of the next message in headers. It is never 0, which stands for messages of compiled code."""
        return self.messages % (ops.WORD - 1) + 1

    def expected(self) -> Signature | None:
        """Predicts the next message from the messages of this iteration, or else from the last message."""
        return self.place.predicted or self._followed.get(self.place.identity)

    def learn(self, signature: Signature) -> None:
        """Stores ``signature`` as the prediction for this place, where all ranks are about to send it.

        The result depends only on identities, which are equal on all ranks, and not on the Signature objects, which
        caches may recreate.
        """
        place, identity = self.place, signature.identity
        if place.predicted is not None and place.predicted.identity == identity:
            place.predicted = signature
            return
        if self._links >= self.most:
            self._links, self._start, self._followed = 0, Place(), {}
            self.place = place = Place(place.identity, place.is_backward)
        place.predicted = self._followed[place.identity] = signature
        if identity not in place.places:
            begins = place.is_backward and not signature.is_backward
            origin = self._start if begins else place
            place.places[identity] = origin.places.setdefault(identity, Place(identity, signature.is_backward))
            self._links += 1

    def numbered(self, name: str, owner: object, kind: str) -> str:
        """Appends "#2" or higher to ``name`` if ``owner`` is not the first of this ``kind`` to make a call."""
        number: int | None = self._numbers.get(owner)
        if number is None:
            self._owners[kind] += 1
            number = self._numbers[owner] = self._owners[kind]
        return f"{name} #{number}" if number > 1 else name

    def record_of(self, device_type: str) -> FaultRecord:
        """Returns the fault record for ops on ``device_type``."""
        if device_type not in self._records:
            self._records[device_type] = FaultRecord(device_type, self.recent)
        return self._records[device_type]


# Keyed by group, or by communicator if it has no group; by identity, because communicators may define equality.
_histories = WeakIdKeyDictionary()


def history_in(communicator: Communicator) -> History:
    """Returns the history of the communicator's group."""
    group = getattr(communicator, "group", communicator)
    history: History | None = _histories.get(group)
    if history is None:
        history = _histories[group] = History(communicator.size)
    return history


def _fail_after_fork() -> None:
    """Marks all groups as failed in a forked child, which lacks their backends' threads."""
    for history in _histories.values():
        history.failure, history.pending = FORKED, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fail_after_fork)
