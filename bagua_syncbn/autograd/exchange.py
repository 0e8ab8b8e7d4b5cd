"""What goes between ranks in a step, and that no two ranks ever send messages of different kinds or sizes.

Backends end the process, or give values of no meaning, where sizes or kinds of collectives differ between ranks. So a
rank never sends what the others do not expect. All that was said in a group is known to all its ranks, and from that
each expects the same next message: what followed the last time. A rank that comes with a call of another message sends
one of the expected kind and size in its place, which holds only the words of its call. If all ranks came with that
call, all know it now and its message goes next; else all know that they differ. In a loop that repeats its calls
nothing is unexpected after the first round, and not one collective is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from .. import ops
from ..communicators import Begun, Communicator, TorchCommunicator, peers_of
from .faults import FAULTS, ON_CPU, Fault, differ, fault_for, fault_on, found, number_of_sum, raise_if_found
from .identity import (
    PARTS,
    RAISED,
    WORD,
    WORDS,
    Identity,
    Terms,
    describe,
    identity_of,
    parts_of,
    speaker_of,
    terms_of,
)
from .torch_private import is_capturing, unseen_by_selective_checkpointing

# What a group remembers; all its ranks forget at the same call.
_MOST_NODES = 2**14

_TEXT = 320  # bytes in which a rank says what it does


class _Node:
    """What was said in a group since the first forward after a backward."""

    __slots__ = ("after", "expected", "following")

    following: _Node  # where what is expected leads

    def __init__(self) -> None:
        self.after: dict[tuple[int, int], _Node] = {}
        self.expected: Identity | None = None  # what was said next, the last time


class _Conversation:
    """What the ranks of one group have said to each other: the same on all of them, but for what failed."""

    def __init__(self) -> None:
        self.calls = 0
        self.device: torch.device | None = None  # of the messages; None before the first one
        self.failure: str | None = None  # the call after which this rank does not know what others expect
        self.raised: _Raised | None = None  # in case that is an error of its own, which others may have raised too
        self.node = self._root = _Node()
        self._nodes = 0
        self._after: dict[tuple[int, int], Identity] = {}
        self.last: Identity | None = None

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


_conversations: dict[int, tuple[Any, _Conversation]] = {}


def _conversation_in(communicator: Communicator) -> _Conversation:
    group = getattr(communicator, "group", communicator)
    number = id(group)
    known = _conversations.get(number)
    if known is None:

        def forget(_: Any) -> None:
            _conversations.pop(number, None)

        try:
            held: Any = ref(group, forget)
        except TypeError:
            held = group
        known = _conversations[number] = held, _Conversation()
    return known[1]


class _Process:
    """Of this process."""

    compiles = False  # it has run a compiled call, of which the other ranks learn no more than its terms


_process = _Process()


def _note_compilation() -> None:
    _process.compiles = True


# Run when it is traced, and not traced: a checkpointed region that is compiled must not change what is outside of it.
# As by torch.compiler.assume_constant_result, which would have every process import the compiler.
_note_compilation._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _stats(input: Tensor, masking: ops.Masking | None, words: Sequence[int] = ()) -> Tensor:
    """Returns the statistics of ``input``, with ``masking`` of the positions that count."""
    if masking is None:
        return ops.batch_norm_stats(input, words)  # type: ignore[no-any-return]
    return ops.batch_norm_masked_stats(input, masking.positions, words)  # type: ignore[no-any-return]


def _zeroed(masking: ops.Masking | None) -> Tensor | None:
    """Returns the mask of an output that is 0 where positions do not count; None for any other output."""
    return masking.positions if masking is not None and masking.zeroes else None


class Line(NamedTuple):
    """What calls have in common that all ranks make alike."""

    identity: Identity
    communicator: Communicator
    conversation: _Conversation


class Exchange:
    """The messages of one call of a layer, forward and backward, over several ranks."""

    elementwise: Any = ops  # where the ops without sums are

    __slots__ = ("_communicator", "_conversation", "_fault", "_identity", "_number", "masking", "zeroed")

    def __init__(self, line: Line, masking: ops.Masking | None = None) -> None:
        self._identity, self._communicator, self._conversation = line
        self.masking, self.zeroed = masking, None if masking is None else _zeroed(masking)
        self._fault: Fault | None = None
        self._number = 0

    def gather(self, input: Tensor, options: ops.MergeOptions) -> ops.MergedStats:
        """Returns the statistics of all ranks' inputs.

        Raises:
            RuntimeError: the ranks make different calls, or the collective failed; on CPU no buffer has changed.
        """
        identity = self._identity
        words = self._words(identity)
        packed = ops.batch_norm_stats(input, words) if self.masking is None else _stats(input, self.masking, words)
        gathered = self._send(self._communicator.all_gather, packed, identity)
        self._number = words[2]
        fault = self._fault = ON_CPU if gathered.is_cpu and type(gathered) is Tensor else fault_for(gathered)
        merged = ops.merge_stats(gathered, options, WORDS, None if fault is None else fault.tensor)
        if fault is ON_CPU and fault.kind.value:
            self._raise_found(identity)
        return merged

    def words_of_sums(self, identity: Identity | None = None) -> list[int]:
        """Returns the words that the sums of the backward pass end in, or those of ``identity``."""
        number = 0 if _process.compiles else self._number
        return parts_of(self._words(identity or self._identity.backward), number, self._communicator.size)

    def all_reduce(self, sums: Tensor) -> Tensor:
        """Returns the sums of all ranks, and of their words: for the op that takes them apart."""
        return self._send(self._communicator.all_reduce, sums, self._identity.backward)

    def backward_elemt(
        self,
        grad: Tensor,
        input: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        sums: Tensor,
        count: Tensor,
        op: Any = ops.batch_norm_backward_elemt,
    ) -> Tensor:
        """Calls the op that takes the sums of all ranks apart; raises, on CPU, if it found that the ranks differ.

        The ``op`` may be another one that does.
        """
        identity, fault, ranks = self._identity.backward, self._fault, self._communicator.size
        call = 0 if fault is None or fault is ON_CPU else number_of_sum(identity)
        record = None if fault is None else fault.tensor
        grad_input: Tensor
        if self.masking is None:
            grad_input = op(grad, input, weight, mean, invstd, sums, count, ranks, call, record)
        else:
            positions, zeroes = self.masking
            op = ops.batch_norm_masked_backward_elemt
            grad_input = op(grad, input, weight, mean, invstd, sums, count, positions, ranks, call, record, zeroes)
        if fault is ON_CPU and fault.kind.value:
            self._raise_found(identity)
        return grad_input

    def total(self, packed: Tensor) -> Tensor:
        """Returns the sum over ranks of ``packed``: for derivatives of any order."""
        identity = self._identity.derivative
        words = self.words_of_sums(identity)
        packed = torch.cat([packed, packed.new_tensor(words)])
        total, said = self._send(self._communicator.all_reduce, packed, identity).tensor_split([-PARTS])
        expected = [self._communicator.size * word for word in words]
        if packed.device.type != "cpu" or type(packed) is not Tensor:
            return total.where((said == packed.new_tensor(expected)).all(), torch.nan)
        if said.tolist() != expected:
            self._disagree(identity, self._conversation.calls, packed.device)
        return total

    def _words(self, identity: Identity) -> list[int]:
        conversation = self._conversation
        if conversation.failure is not None:
            _resume(conversation)
        for fault in FAULTS.values():
            if fault.kind.value:
                raise_if_found()
        place, terms = identity.key
        return [0, terms, 0] if _process.compiles else [place, terms, (conversation.calls + 1) % WORD]

    def _send(self, collective: Callable[[Tensor], Tensor], packed: Tensor, identity: Identity) -> Tensor:
        """Returns what ``collective`` makes of the message ``packed``, once all ranks are known to have the same."""
        conversation = self._conversation
        if conversation.node.expected is not identity:
            self._agree_on(identity, packed)
        try:
            result = collective(packed)
        except BaseException as error:
            self._fail(identity, error)
        if conversation.node.expected is not identity:
            conversation.learn(identity)
        conversation.node, conversation.last = conversation.node.following, identity
        conversation.calls += 1
        return result

    def _agree_on(self, identity: Identity, packed: Tensor) -> None:
        """Sees to it that all ranks have the message ``packed``, where it is not known to be what they expect."""
        expected = self._conversation.expected()
        is_expected = expected is not None and expected.message == identity.message
        if not is_expected and type(packed) is Tensor and _can_ask(packed.device):
            self._ask(expected, identity, packed.device)

    def _ask(self, expected: Identity | None, identity: Identity, device: torch.device) -> None:
        """Finds out, by a message as all ranks expect it, whether they all come with ``identity``."""
        words, call = self._words(identity), self._conversation.calls + 1
        question = _Question(expected, words, self._communicator, device)
        try:
            answer = question.collective(question.packed)
        except BaseException as error:
            self._fail(identity, error)
        if not question.is_unanimous(answer):
            self._disagree(identity, call, device, question.rows_of(answer))
        self._conversation.device = device

    def _fail(self, identity: Identity, error: BaseException) -> NoReturn:
        """Raises for a collective that raised ``error``."""
        conversation, communicator = self._conversation, self._communicator
        conversation.failure = self._say(identity, conversation.calls + 1)
        if not isinstance(error, RuntimeError):
            raise error
        raise RuntimeError(
            f"sync_batch_norm: expected the {communicator.size} ranks of a group to meet in the "
            f"{conversation.failure}, got on rank {communicator.rank} of it {type(error).__name__}: {error}. "
            "Another rank has ended, raised an error, is in other code until the time-out, or was late; the group "
            "cannot be used any more"
        ) from error

    def _raise_found(self, identity: Identity) -> NoReturn:
        """Raises for what an op on CPU has found."""
        record, call = ON_CPU.take(), self._conversation.calls
        if record[0] == 2:
            self._conversation.failure = self._say(identity, call)
            raise RuntimeError(found(record))
        self._disagree(identity, call, torch.device("cpu"))

    def _disagree(
        self, identity: Identity, call: int, device: torch.device, rows: Sequence[Sequence[float]] = ()
    ) -> NoReturn:
        """Raises for ranks that make different calls. On CPU all ranks know and come here; elsewhere some may not."""
        own = self._conversation.failure = self._say(identity, call)
        if device.type == "cpu":
            said = _by_text(self._communicator.all_gather(_codes_of(own)))
        else:
            said = [describe(row) for row in rows] or [f"{own} on this rank", "another on another"]
        raise RuntimeError(differ(said))

    def _say(self, identity: Identity, call: int) -> str:
        """Returns what this rank does in a call, for people."""
        of_forward = f", of the forward in call {self._number}" if identity.message[0] else ""
        return f"{identity.text}, call {call}{of_forward}"


def _can_ask(device: torch.device) -> bool:
    return not _process.compiles and not (device.type == "cuda" and is_capturing())


class _Question:
    """A message as all ranks of a group expect it, that holds only the words of what this rank comes with."""

    def __init__(
        self, expected: Identity | None, words: list[int], communicator: Communicator, device: torch.device
    ) -> None:
        self._is_sum, numel, dtype = (False, WORDS, torch.float32) if expected is None else expected.message
        self._size = communicator.size
        self._said = parts_of(words, 0, self._size) if self._is_sum else words
        packed = torch.zeros(numel, dtype=dtype)
        packed[-len(self._said) :] = torch.tensor(self._said, dtype=dtype)
        self.packed = packed.to(device)
        self.collective = communicator.all_reduce if self._is_sum else communicator.all_gather

    def rows_of(self, answer: Tensor) -> list[list[float]]:
        """Returns the words of each rank, where they can be told apart."""
        return [] if self._is_sum else answer[:, -WORDS:].tolist()

    def is_unanimous(self, answer: Tensor) -> bool:
        """Whether all ranks came with the same words."""
        if self._is_sum:
            return bool(answer[-PARTS:].tolist() == [self._size * word for word in self._said])
        return all(row == self._said for row in self.rows_of(answer))

    def begin(self, communicator: TorchCommunicator) -> Begun:
        begin = communicator.begin_all_reduce if self._is_sum else communicator.begin_all_gather
        return begin(self.packed)


class _Raised(NamedTuple):
    """What this rank has sent in place of a call in which it raised an error."""

    question: _Question
    answer: Begun
    texts: Begun | None  # on CPU, where all ranks tell them as soon as they differ


def tell_peers(process_group: Any, layer: nn.Module | None, error: Exception) -> None:
    """Tells the ranks of ``process_group`` that this one raises ``error``, in place of the message that they expect.

    It waits for none of them. At its next call, each rank goes on if all of them have raised, else it raises too. Does
    nothing where no rank can be known to expect a message: before the first one, and where something traces.
    """
    if torch.compiler.is_compiling() or is_tracing():
        return
    # Nothing may take the place of the error.
    with suppress(Exception), torch.no_grad(), unseen_by_selective_checkpointing():
        communicator = peers_of(process_group).found()
        if isinstance(communicator, TorchCommunicator):
            _tell(communicator, f"{type(error).__name__} in {speaker_of(layer)}", str(error))


def _tell(communicator: TorchCommunicator, what: str, why: str) -> None:
    conversation = _conversation_in(communicator)
    device, call = conversation.device, conversation.calls + 1
    if device is None or conversation.failure is not None or not _can_ask(device):
        return
    question = _Question(conversation.expected(), [0, RAISED, call % WORD], communicator, device)
    answer = question.begin(communicator)
    on_cpu = device.type == "cpu"
    texts = communicator.begin_all_gather(_codes_of(f"{what}, call {call}: {why}")) if on_cpu else None
    conversation.failure, conversation.raised = f"{what}, call {call}", _Raised(question, answer, texts)


def _resume(conversation: _Conversation) -> None:
    """Raises, unless this rank has raised an error in its last call and all others have done so too."""
    raised, conversation.raised = conversation.raised, None
    if raised is None:
        raise RuntimeError(
            f"process_group: expected one that works, got one that failed before, in the {conversation.failure}; "
            "its ranks do not agree on what comes next any more: end the job, or make a new group"
        )
    answer = raised.answer.wait()
    said = [describe(row) for row in raised.question.rows_of(answer)]
    if raised.texts is not None:
        said = _by_text(raised.texts.wait())
    if not raised.question.is_unanimous(answer):
        raise RuntimeError(differ(said))
    conversation.failure = None


class InGraph:
    """The messages of a call that torch.compile traces: no sizes are agreed upon, and the words are constants."""

    # Operations of torch, which the compiler fuses with what is around them. The sums over values stay ops of ours.
    elementwise: Any = ops.reference

    def __init__(self, terms: Terms, communicator: Communicator, masking: ops.Masking | None) -> None:
        _note_compilation()
        self.masking, self.zeroed = masking, _zeroed(masking)
        self._terms = terms
        self._communicator = communicator

    def gather(self, input: Tensor, options: ops.MergeOptions) -> ops.MergedStats:
        packed = _stats(input, self.masking, [0, self._terms.word(0), 0])
        gathered = self._communicator.all_gather(packed)
        # Apart from the buffers: what a graph repeats in backward must not depend on what changed in forward.
        merged = ops.merge_stats(gathered, options.without_buffers(), WORDS)
        fault = fault_on(input.device)
        ops.merge_stats(gathered, options, WORDS, None if fault is None else fault.tensor)
        return merged

    def words_of_sums(self) -> list[int]:
        return parts_of([0, self._terms.word(1), 0], 0, self._communicator.size)

    def all_reduce(self, sums: Tensor) -> Tensor:
        return self._communicator.all_reduce(sums)

    def backward_elemt(self, *arguments: Any) -> Tensor:
        # Sums of other calls become NaN, with no note of it: a graph that keeps for backward what each forward may
        # write to could not run two forwards before the backward of the first.
        size = self._communicator.size
        if self.masking is not None:
            positions, zeroes = self.masking
            return self.elementwise.batch_norm_masked_backward_elemt(*arguments, positions, size, zeroes=zeroes)  # type: ignore[no-any-return]
        return self.elementwise.batch_norm_backward_elemt(*arguments, size)  # type: ignore[no-any-return]

    def total(self, packed: Tensor) -> Tensor:
        return self._communicator.all_reduce(packed)


class Alone:
    """A group of one: nothing to say."""

    elementwise: Any = ops

    def __init__(self, masking: ops.Masking | None = None) -> None:
        self.masking, self.zeroed = masking, _zeroed(masking)

    def gather(self, input: Tensor, options: ops.MergeOptions) -> ops.MergedStats:
        return ops.merge_stats(_stats(input, self.masking).unsqueeze(0), options)

    def words_of_sums(self) -> list[int]:
        return []

    def all_reduce(self, sums: Tensor) -> Tensor:
        return sums

    def backward_elemt(self, *arguments: Any, op: Any = None) -> Tensor:
        if self.masking is not None:
            positions, zeroes = self.masking
            return self.elementwise.batch_norm_masked_backward_elemt(*arguments, positions, zeroes=zeroes)  # type: ignore[no-any-return]
        return (op or self.elementwise.batch_norm_backward_elemt)(*arguments)  # type: ignore[no-any-return]

    def total(self, packed: Tensor) -> Tensor:
        return packed


class AloneInGraph(Alone):
    """A group of one in a call that torch.compile traces."""

    elementwise = ops.reference


class Given(Alone):
    """Statistics that do not depend on the input: nothing passes through them."""

    def all_reduce(self, sums: Tensor) -> Tensor:
        return torch.zeros_like(sums)

    def total(self, packed: Tensor) -> Tensor:
        return torch.zeros_like(packed)


_ALONE = Alone()

AnyExchange = Exchange | InGraph | Alone


def exchange_of(
    layer: nn.Module | None,
    input: Tensor,
    options: ops.MergeOptions,
    communicator: Communicator,
    masking: ops.Masking | None = None,
) -> AnyExchange:
    """Returns by what means a call of ``layer`` talks to the ranks of ``communicator``.

    With ``masking`` the statistics, and what passes through them, are of the positions that count alone.
    """
    if torch.compiler.is_compiling():
        if communicator.size == 1:
            return AloneInGraph(masking)
        return InGraph(terms_of(input, options, options.momentum), communicator, masking)
    if communicator.size == 1:
        return _ALONE if masking is None else Alone(masking)
    return Exchange(line_of(layer, input, options, communicator), masking)


def line_of(layer: nn.Module | None, input: Tensor, options: ops.MergeOptions, communicator: Communicator) -> Line:
    """Returns what a call has in common with those of the other ranks of ``communicator``, of which there are some."""
    return Line(identity_of(layer, input, options), communicator, _conversation_in(communicator))


def _codes_of(text: str) -> Tensor:
    return torch.tensor(list(text.encode("ascii", "replace")[:_TEXT].ljust(_TEXT)), dtype=torch.float32)


def _by_text(gathered: Tensor) -> list[str]:
    """Returns what the ranks say, each text with the ranks that say it."""
    ranks: dict[str, list[str]] = {}
    for rank, row in enumerate(gathered.to(torch.uint8).tolist()):
        ranks.setdefault(bytes(row).decode().rstrip(), []).append(str(rank))
    return [f"rank{'s' * (len(which) > 1)} {', '.join(which)}: {said}" for said, which in ranks.items()]
