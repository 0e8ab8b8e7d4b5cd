"""What the ranks of a group have said to each other, from which each knows what its peers expect next."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from ..communicators import Communicator
from ..torch_internals import group_named
from .identity import Identity, Terms, note_text, text_of, word_of

if TYPE_CHECKING:
    from .agreement import Raised

# What a group remembers; all its ranks forget at the same call.
_MOST_NODES = 2**14


class _Node:
    """What was said in a group since the first forward after a backward."""

    __slots__ = ("after", "expected", "following")

    following: _Node  # where what is expected leads

    def __init__(self) -> None:
        self.after: dict[tuple[int, int], _Node] = {}
        self.expected: Identity | None = None  # what was said next, the last time


class Conversation:
    """What the ranks of one group have said to each other: the same on all of them, but for what failed."""

    def __init__(self) -> None:
        self.calls = 0
        self.compiled: set[int] = set()  # kinds whose calls here were compiled, of which no more is known than terms
        self.device: torch.device | None = None  # of the messages; None before the first one
        self.failure: str | None = None  # the call after which this rank does not know what others expect
        self.raised: Raised | None = None  # in case that is an error of its own, which others may have raised too
        self.node = self._root = _Node()
        self._nodes = 0
        self._after: dict[tuple[int, int], Identity] = {}
        self.last: Identity | None = None
        self._numbers: dict[int, tuple[ref[Any], int]] = {}
        self._callers: Counter[str] = Counter()

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

    def expected(self) -> Identity | None:
        """What comes next: what did after the same calls of this step, else after the same last call."""
        if self.node.expected is not None or self.last is None:
            return self.node.expected
        return self._after.get(self.last.key)

    def learn(self, identity: Identity) -> None:
        """Has ``identity`` be what is expected next, and all that is known to come after it follow."""
        node = self.node
        if node.expected is not None and node.expected.key == identity.key:
            return
        last, start = self.last, node
        if last is not None and last.message[0] and not identity.message[0]:
            start = self._root
        following = start.after.get(identity.key)
        if following is None:
            if self._nodes == _MOST_NODES:
                start = self._root = _Node()
                self._nodes = 0
                self._after.clear()
            following = start.after[identity.key] = _Node()
            self._nodes += 1
        if last is not None:
            self._after[last.key] = identity
        node.expected, node.following = identity, following


_conversations: dict[int, tuple[Any, Conversation]] = {}
_compiled_unnamed: set[int] = set()


def conversation_in(communicator: Communicator) -> Conversation:
    return _conversation_of(getattr(communicator, "group", communicator))


def note_compilation(group_name: str | None, kind: str, *terms: Any) -> None:
    """Notes that a call of these terms is compiled, by a layer of this kind, in the group of that name.

    Without a name it says so of all groups that have none.
    """
    word = word_of(kind)
    note_text((word, Terms(*terms).word(0)), f"compiled forward of a layer of {kind} ({text_of(Terms(*terms))})")
    compiled = _compiled_unnamed if group_name is None else _conversation_of(group_named(group_name)).compiled
    compiled.add(word)


# Run when it is traced, and not traced: a checkpointed region that is compiled must not change what is outside of it.
note_compilation._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _conversation_of(group: Any) -> Conversation:
    number = id(group)
    known = _conversations.get(number)
    if known is None:

        def forget(_: Any) -> None:
            _conversations.pop(number, None)

        try:
            held: Any = ref(group, forget)
        except TypeError:
            held = group
        conversation = Conversation()
        if not hasattr(group, "group_name"):
            conversation.compiled = _compiled_unnamed
        known = _conversations[number] = held, conversation
    return known[1]
