"""What goes between ranks in a step, and that no two ranks ever send messages of different kinds or sizes.

Backends end the process, or give values of no meaning, where sizes or kinds of collectives differ between ranks. So a
rank never sends what the others do not expect. All that was said in a group is known to all its ranks, and from that
each expects the same next message: what followed the last time. A rank that comes with a call of another message sends
one of the expected kind and size in its place, which holds only the words of its call. If all ranks came with that
call, all know it now and its message goes next; else all know that they differ. In a loop that repeats its calls
nothing is unexpected after the first round, and not one collective is added.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn

from .. import ops
from ..communicators import Communicator
from .faults import differ, fault_for, fault_on, found, number_of_sum, raise_if_found, take_fault_on_cpu
from .identity import PARTS, WORD, WORDS, Identity, Terms, describe, identity_of, parts_of, terms_of
from .torch_private import is_capturing

# What a group remembers; all its ranks forget at the same call.
_MOST_NODES = 2**14

_TEXT = 320  # bytes in which a rank says what it does


class _Node:
    """What was said in a group since the first forward after a backward."""

    __slots__ = ("after", "expected")

    def __init__(self) -> None:
        self.expected: Identity | None = None  # what was said next, the last time
        self.after: dict[tuple[int, int], _Node] = {}


class _Conversation:
    """What the ranks of one group have said to each other: the same on all of them."""

    def __init__(self) -> None:
        self.calls = 0
        self.failure: str | None = None
        self._root = self._node = _Node()
        self._nodes = 0
        self._after: dict[tuple[int, int], Identity] = {}
        self._last: Identity | None = None

    def expected(self) -> Identity | None:
        """What comes next: what did after the same calls of this step, else after the same last call."""
        if self._node.expected is not None or self._last is None:
            return self._node.expected
        return self._after.get(self._last.key)

    def add(self, identity: Identity) -> None:
        """Notes that all ranks have said ``identity``."""
        last, self._last = self._last, identity
        self.calls += 1
        self._node.expected = identity
        if last is not None:
            self._after[last.key] = identity
            if last.message[0] and not identity.message[0]:
                self._node = self._root
        node = self._node.after.get(identity.key)
        if node is None:
            if self._nodes == _MOST_NODES:
                self._root, self._nodes = _Node(), 0
                self._node = self._root
            node = self._node.after[identity.key] = _Node()
            self._nodes += 1
        self._node = node


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


class Exchange:
    """The messages of one call of a layer, forward and backward, over several ranks."""

    def __init__(self, identity: Identity, communicator: Communicator) -> None:
        self._identity = identity
        self._communicator = communicator
        self._conversation = _conversation_in(communicator)
        self._number = 0

    def gather(self, input: Tensor, options: ops.MergeOptions) -> ops.MergedStats:
        """Returns the statistics of all ranks' inputs.

        Raises:
            RuntimeError: the ranks make different calls, or the collective failed; on CPU no buffer has changed.
        """
        identity = self._identity
        words = self._words(identity)
        packed = ops.batch_norm_stats(input, words)
        gathered = self._send(self._communicator.all_gather, packed, identity)
        self._number = words[2]
        merged = ops.merge_stats(gathered, options, WORDS, fault_for(gathered))
        self._check(identity, input.device)
        return merged

    def words_of_sums(self) -> list[int]:
        """Returns the words that the sums of the backward pass end in."""
        return self._words_of_sum(self._identity.backward)

    def all_reduce(self, sums: Tensor) -> Tensor:
        """Returns the sums of all ranks, and of their words: for the op that takes them apart."""
        return self._send(self._communicator.all_reduce, sums, self._identity.backward)

    def backward_elemt(self, *arguments: Any, act: tuple[Any, ...] = ()) -> Tensor:
        """Calls the op that takes the sums of all ranks apart; raises, on CPU, if it found that the ranks differ.

        With ``act``, bias, code and parameter of an activation, it is the op that has one.
        """
        identity, fault = self._identity.backward, fault_for(arguments[0])
        call = number_of_sum(identity)
        op = ops.batch_norm_act_backward_elemt if act else ops.batch_norm_backward_elemt
        grad_input: Tensor = op(*arguments, self._communicator.size, call, fault, *act)
        self._check(identity, grad_input.device)
        return grad_input

    def total(self, packed: Tensor) -> Tensor:
        """Returns the sum over ranks of ``packed``: for derivatives of any order."""
        identity = self._identity.derivative
        words = self._words_of_sum(identity)
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
            raise RuntimeError(
                f"process_group: expected one that works, got one that failed before, in the {conversation.failure}; "
                "its ranks do not agree on what comes next any more: end the job, or make a new group"
            )
        raise_if_found()
        place, terms = identity.key
        return [0, terms, 0] if _process.compiles else [place, terms, (conversation.calls + 1) % WORD]

    def _words_of_sum(self, identity: Identity) -> list[int]:
        number = 0 if _process.compiles else self._number
        return parts_of(self._words(identity), number, self._communicator.size)

    def _send(self, collective: Callable[[Tensor], Tensor], packed: Tensor, identity: Identity) -> Tensor:
        """Returns what ``collective`` makes of the message ``packed``, once all ranks are known to have the same."""
        conversation = self._conversation
        expected = conversation.expected()
        is_expected = expected is identity or (expected is not None and expected.message == identity.message)
        can_ask = type(packed) is Tensor and not _process.compiles and not (packed.is_cuda and is_capturing())
        if can_ask and not is_expected:
            self._ask(expected, identity, packed.device)
        result = self._named(collective, packed, identity)
        conversation.add(identity)
        return result

    def _ask(self, expected: Identity | None, identity: Identity, device: torch.device) -> None:
        """Finds out, by a message as all ranks expect it, whether they all come with ``identity``."""
        is_sum, numel, dtype = (False, WORDS, torch.float32) if expected is None else expected.message
        words, call = self._words(identity), self._conversation.calls + 1
        said = parts_of(words, 0, self._communicator.size) if is_sum else words
        packed = torch.zeros(numel, dtype=dtype)
        packed[-len(said) :] = torch.tensor(said, dtype=dtype)
        if is_sum:
            total = self._named(self._communicator.all_reduce, packed.to(device), identity)
            if total[-PARTS:].tolist() != [self._communicator.size * word for word in said]:
                self._disagree(identity, call, device)
        else:
            rows = self._named(self._communicator.all_gather, packed.to(device), identity)[:, -WORDS:].tolist()
            if any(row != words for row in rows):
                self._disagree(identity, call, device, rows)

    def _named(self, collective: Callable[[Tensor], Tensor], packed: Tensor, identity: Identity) -> Tensor:
        try:
            return collective(packed)
        except BaseException as error:
            conversation, communicator = self._conversation, self._communicator
            conversation.failure = f"{identity.text}, call {conversation.calls + 1}"
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(
                f"sync_batch_norm: expected the {communicator.size} ranks of a group to meet in the "
                f"{conversation.failure}, got on rank {communicator.rank} of it {type(error).__name__}: {error}. "
                "Another rank has ended, raised an error, is in other code until the time-out, or was late; the group "
                "cannot be used any more"
            ) from error

    def _check(self, identity: Identity, device: torch.device) -> None:
        record = take_fault_on_cpu() if device.type == "cpu" else None
        if record is not None:
            if record[0] == 2:
                self._conversation.failure = f"{identity.text}, call {self._conversation.calls}"
                raise RuntimeError(found(record))
            self._disagree(identity, self._conversation.calls, device)

    def _disagree(
        self, identity: Identity, call: int, device: torch.device, rows: Sequence[Sequence[float]] = ()
    ) -> NoReturn:
        """Raises for ranks that make different calls. On CPU all ranks know and come here; elsewhere some may not."""
        own = self._conversation.failure = f"{identity.text}, call {call}"
        if device.type == "cpu":
            said = _exchange_texts(own, self._communicator)
        else:
            said = [describe(row) for row in rows] or [f"{own} on this rank", "another on another"]
        raise RuntimeError(differ(said))


class InGraph:
    """The messages of a call that torch.compile traces: no sizes are agreed upon, and the words are constants."""

    def __init__(self, terms: Terms, communicator: Communicator) -> None:
        _note_compilation()
        self._terms = terms
        self._communicator = communicator

    def gather(self, input: Tensor, options: ops.MergeOptions) -> ops.MergedStats:
        packed = ops.batch_norm_stats(input, [0, self._terms.word(0), 0])
        gathered = self._communicator.all_gather(packed)
        # Apart from the buffers: what a graph repeats in backward must not depend on what changed in forward.
        merged = ops.merge_stats(gathered, options.without_buffers(), WORDS)
        ops.merge_stats(gathered, options, WORDS, fault_on(input.device))
        return merged

    def words_of_sums(self) -> list[int]:
        return parts_of([0, self._terms.word(1), 0], 0, self._communicator.size)

    def all_reduce(self, sums: Tensor) -> Tensor:
        return self._communicator.all_reduce(sums)

    def backward_elemt(self, *arguments: Any, act: tuple[Any, ...] = ()) -> Tensor:
        if act:
            rest = self._communicator.size, 0, None, *act
            return ops.reference.batch_norm_act_backward_elemt(*arguments, *rest)
        # Sums of other calls become NaN, with no note of it: a graph that keeps for backward what each forward may
        # write to could not run two forwards before the backward of the first.
        grad_input: Tensor = ops.backward_elemt_in_graph(*arguments, self._communicator.size)
        return grad_input

    def total(self, packed: Tensor) -> Tensor:
        return self._communicator.all_reduce(packed)


class Alone:
    """A group of one: nothing to say."""

    def gather(self, input: Tensor, options: ops.MergeOptions) -> ops.MergedStats:
        return ops.merge_stats(ops.batch_norm_stats(input).unsqueeze(0), options)

    def words_of_sums(self) -> list[int]:
        return []

    def all_reduce(self, sums: Tensor) -> Tensor:
        return sums

    def backward_elemt(self, *arguments: Any, act: tuple[Any, ...] = ()) -> Tensor:
        if act:
            kernels: Any = ops.reference if torch.compiler.is_compiling() else ops
            return kernels.batch_norm_act_backward_elemt(*arguments, 1, 0, None, *act)  # type: ignore[no-any-return]
        if torch.compiler.is_compiling():
            return ops.backward_elemt_in_graph(*arguments, 1)  # type: ignore[no-any-return]
        return ops.batch_norm_backward_elemt(*arguments)  # type: ignore[no-any-return]

    def total(self, packed: Tensor) -> Tensor:
        return packed


class Given(Alone):
    """Statistics that do not depend on the input: nothing passes through them."""

    def all_reduce(self, sums: Tensor) -> Tensor:
        return torch.zeros_like(sums)

    def total(self, packed: Tensor) -> Tensor:
        return torch.zeros_like(packed)


_ALONE = Alone()

AnyExchange = Exchange | InGraph | Alone


def exchange_of(
    layer: nn.Module | None, input: Tensor, options: ops.MergeOptions, communicator: Communicator
) -> AnyExchange:
    """Returns by what means a call of ``layer`` talks to the ranks of ``communicator``."""
    if communicator.size == 1:
        return _ALONE
    if torch.compiler.is_compiling():
        return InGraph(terms_of(input, options), communicator)
    return Exchange(identity_of(layer, input, options), communicator)


def _exchange_texts(text: str, communicator: Communicator) -> list[str]:
    """Returns what each rank says, with the ranks that say it."""
    codes = text.encode("ascii", "replace")[:_TEXT].ljust(_TEXT)
    rows = communicator.all_gather(torch.tensor(list(codes), dtype=torch.float32)).to(torch.uint8)
    ranks: dict[str, list[str]] = {}
    for rank, row in enumerate(rows.tolist()):
        ranks.setdefault(bytes(row).decode().rstrip(), []).append(str(rank))
    return [f"rank{'s' * (len(which) > 1)} {', '.join(which)}: {said}" for said, which in ranks.items()]
