"""What goes between ranks in a step, and that no two ranks ever send messages of different kinds or sizes.

Backends end the process, or give values of no meaning, where sizes or kinds of collectives differ between ranks. So a
rank sends only what its peers expect. All that was said in a group is known to all its ranks, and from that
each expects the same next message: what followed the last time. A rank that comes with a call of another message sends
one of the expected kind and size in its place, which holds only the words of its call. If all ranks came with that
call, all know it now and its message goes next; else all know that they differ. In a loop that repeats its calls
nothing is unexpected after the first round, and not one collective is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from .. import ops
from ..communicators import Communicator
from .agreement import Question, by_text, can_ask, codes_of, resume
from .conversation import Conversation, conversation_in, note_compilation
from .faults import ON_CPU, Fault, differ, fault_for, fault_on, found, number_of_sum, raise_if_found
from .identity import (
    WORD,
    Identity,
    Terms,
    describe,
    exact_bits,
    hash_of,
    identity_of,
    kind_of,
    terms_of,
    word_of,
)


def _stats(input: Tensor, masking: ops.Masking | None, *words: int) -> Tensor:
    """Returns the statistics of ``input``, with ``masking`` of the positions that count."""
    if masking is None:
        return ops.batch_norm_stats(input, *words)  # type: ignore[no-any-return]
    return ops.batch_norm_masked_stats(input, masking.positions, *words)  # type: ignore[no-any-return]


class Line(NamedTuple):
    """What calls have in common that all ranks make alike."""

    identity: Identity
    communicator: Communicator
    conversation: Conversation
    exact_bits: int  # of fingerprints


class Exchange:
    """The messages of one call of a layer, forward and backward, over several ranks."""

    elementwise: Any = ops  # where the ops without sums are
    lays_out = True  # gradients like the input; a compiler lays out tensors by itself
    masking: ops.Masking | None = None
    zeroed: Tensor | None = None  # of the masking

    _stats: Any = ops.batch_norm_stats
    _backward_elemt: Any = ops.batch_norm_backward_elemt

    __slots__ = ("_communicator", "_conversation", "_exact_bits", "_fault", "_identity", "_is_compiled", "_number")

    def __init__(self, line: Line) -> None:
        self._identity, self._communicator, self._conversation, self._exact_bits = line
        self._fault: Fault | None = None
        self._number = 0
        # Its peers may be in compiled code: as that does, it says no more than its terms, and nothing is predicted.
        self._is_compiled = self._identity.kind in self._conversation.compiled

    def gather(self, input: Tensor, options: ops.MergeOptions) -> ops.MergedStats:
        """Returns the statistics of all ranks' inputs.

        Raises:
            RuntimeError: the ranks make different calls, or the collective failed; on CPU no buffer has changed.
        """
        identity = self._identity
        speaker, call = self._words(identity)
        gathered = self._send(self._communicator.all_gather, self._stats(input, speaker, call), identity)
        self._number = call
        fault = self._fault = fault_for(gathered)
        merged = ops.merge_stats(gathered, options, None if fault is None else fault.tensor)
        if fault is ON_CPU and fault.kind.value:
            self._raise_found(identity, gathered[:, -ops.WORDS :].tolist())
        return merged

    def fingerprint(self, identity: Identity | None = None) -> int:
        """Returns the fingerprint that goes with the sums of the backward pass, or with those of ``identity``."""
        speaker, call = self._words(identity or self._identity.backward)
        return hash((speaker, call, self._number)) & self._exact_bits

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
        op: Any = None,
    ) -> Tensor:
        """Calls the op that takes the sums of all ranks apart; raises, on CPU, if it found that the ranks differ.

        The ``op`` may be another one that does.
        """
        identity, fault, ranks = self._identity.backward, self._fault, self._communicator.size
        record = None if fault is None else fault.tensor
        # On CPU it needs no number: this raises at once.
        number = () if fault is None or fault is ON_CPU else (number_of_sum(identity),)
        op = op or self._backward_elemt
        grad_input: Tensor = op(grad, input, weight, mean, invstd, sums, count, ranks, record, *number)
        if fault is ON_CPU and fault.kind.value:
            self._raise_found(identity)
        return grad_input

    def total(self, packed: Tensor) -> Tensor:
        """Returns the sum over ranks of ``packed``: for derivatives of any order."""
        identity = self._identity.derivative
        words = ops.parts_of(self.fingerprint(identity))
        packed = torch.cat([packed, packed.new_tensor(words)])
        total, said = self._send(self._communicator.all_reduce, packed, identity).tensor_split([-ops.PARTS])
        expected = [self._communicator.size * word for word in words]
        if packed.device.type != "cpu" or type(packed) is not Tensor:
            return total.where((said == packed.new_tensor(expected)).all(), torch.nan)
        if said.tolist() != expected:
            self._disagree(identity, self._conversation.calls, packed.device)
        return total

    def _words(self, identity: Identity) -> tuple[int, int]:
        """Returns who speaks, and in what call."""
        conversation = self._conversation
        if conversation.failure is not None:
            resume(conversation)
        raise_if_found()
        if self._is_compiled:
            return identity.kind * WORD + identity.key[1], 0
        return identity.speaker, (conversation.calls + 1) % WORD

    def _send(self, collective: Callable[[Tensor], Tensor], packed: Tensor, identity: Identity) -> Tensor:
        """Returns what ``collective`` makes of the message ``packed``, once all ranks are known to have the same."""
        conversation = self._conversation
        if self._is_compiled:
            try:
                return collective(packed)
            except BaseException as error:
                self._fail(identity, error)
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
        if not is_expected and type(packed) is Tensor and can_ask(packed.device):
            self._ask(expected, identity, packed.device)

    def _ask(self, expected: Identity | None, identity: Identity, device: torch.device) -> None:
        """Finds out, by a message as all ranks expect it, whether they all come with ``identity``."""
        call = self._conversation.calls + 1
        question = Question(expected, *self._words(identity), self._communicator, device)
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

    def _raise_found(self, identity: Identity, rows: Sequence[Sequence[float]] = ()) -> NoReturn:
        """Raises for what an op on CPU has found."""
        record, call = ON_CPU.take(), self._conversation.calls
        if record[0] == 2:
            self._conversation.failure = self._say(identity, call)
            raise RuntimeError(found(record))
        self._disagree(identity, call, torch.device("cpu"), rows)

    def _disagree(
        self, identity: Identity, call: int, device: torch.device, rows: Sequence[Sequence[float]] = ()
    ) -> NoReturn:
        """Raises for ranks that make different calls.

        On CPU all ranks know and come here, but for those in compiled code; elsewhere some may not.
        """
        own = self._conversation.failure = self._say(identity, call)
        all_come = all(row[-1] for row in rows) if rows else not self._conversation.compiled
        if device.type == "cpu" and all_come:
            said = by_text(self._communicator.all_gather(codes_of(own)))
        elif rows:
            said = [f"rank {rank}: {describe(row)}" for rank, row in enumerate(rows)]
            said[self._communicator.rank] = f"rank {self._communicator.rank}: {own}"
        else:
            said = ["this rank: " + own, "another rank: another call"]
        raise RuntimeError(differ(said))

    def _say(self, identity: Identity, call: int) -> str:
        """Returns what this rank does in a call, for people."""
        if self._is_compiled:
            return f"{identity.text}, of a model that was compiled"
        of_forward = f", of the forward in call {self._number}" if identity.message[0] else ""
        return f"{identity.text}, call {call}{of_forward}"


class MaskedExchange(Exchange):
    """Those of a call in which not all positions count."""

    masking: ops.Masking

    __slots__ = ("masking", "zeroed")

    def __init__(self, line: Line, masking: ops.Masking) -> None:
        super().__init__(line)
        self.masking, self.zeroed = masking, masking.zeroed()

    def _stats(self, input: Tensor, *words: int) -> Tensor:
        return _stats(input, self.masking, *words)

    def _backward_elemt(self, *arguments: Any) -> Tensor:
        tensors, last = arguments[:7], arguments[7:]
        positions, zeroes = self.masking
        return ops.batch_norm_masked_backward_elemt(*tensors, positions, zeroes, *last)  # type: ignore[no-any-return]


class InGraph:
    """The messages of a call that torch.compile traces: no sizes are agreed upon, and the words are constants."""

    # Operations of torch, which the compiler fuses with what is around them. The sums over values stay ops of ours.
    elementwise: Any = ops.reference
    lays_out = False

    def __init__(self, kind: str, terms: Terms, communicator: Communicator, masking: ops.Masking | None) -> None:
        note_compilation(getattr(communicator, "name", None), kind, *terms)
        self.masking, self.zeroed = masking, None if masking is None else masking.zeroed()
        self._terms = terms
        self._kind = word_of(kind)
        self._communicator = communicator

    def gather(self, input: Tensor, options: ops.MergeOptions) -> ops.MergedStats:
        packed = _stats(input, self.masking, self._kind * WORD + self._terms.word(0), 0)
        gathered = self._communicator.all_gather(packed)
        # Apart from the buffers: what a graph repeats in backward must not depend on what changed in forward.
        merged = ops.merge_stats(gathered, options.without_buffers())
        fault = fault_on(input.device)
        ops.merge_stats(gathered, options, None if fault is None else fault.tensor)
        return merged

    def fingerprint(self) -> int:
        return hash_of(self._kind * WORD + self._terms.word(1), 0, 0) & exact_bits(self._communicator.size)

    def all_reduce(self, sums: Tensor) -> Tensor:
        return self._communicator.all_reduce(sums)

    def backward_elemt(self, *arguments: Any) -> Tensor:
        # Sums of other calls become NaN, with no note of it: a graph that keeps for backward what each forward may
        # write to could not run two forwards before the backward of the first.
        size = self._communicator.size
        if self.masking is not None:
            positions, zeroes = self.masking
            return self.elementwise.batch_norm_masked_backward_elemt(*arguments, positions, zeroes, size)  # type: ignore[no-any-return]
        return self.elementwise.batch_norm_backward_elemt(*arguments, size)  # type: ignore[no-any-return]

    def total(self, packed: Tensor) -> Tensor:
        return self._communicator.all_reduce(packed)


class Alone:
    """A group of one: nothing to say."""

    elementwise: Any = ops
    lays_out = True

    def __init__(self, masking: ops.Masking | None = None) -> None:
        self.masking, self.zeroed = masking, None if masking is None else masking.zeroed()

    def gather(self, input: Tensor, options: ops.MergeOptions) -> ops.MergedStats:
        return ops.merge_stats(_stats(input, self.masking).unsqueeze(0), options)

    def fingerprint(self) -> None:
        return None

    def all_reduce(self, sums: Tensor) -> Tensor:
        return sums

    def backward_elemt(self, *arguments: Any, op: Any = None) -> Tensor:
        if self.masking is not None:
            positions, zeroes = self.masking
            return self.elementwise.batch_norm_masked_backward_elemt(*arguments, positions, zeroes)  # type: ignore[no-any-return]
        return (op or self.elementwise.batch_norm_backward_elemt)(*arguments)  # type: ignore[no-any-return]

    def total(self, packed: Tensor) -> Tensor:
        return packed


class AloneInGraph(Alone):
    """A group of one in a call that torch.compile traces."""

    elementwise = ops.reference
    lays_out = False


class Given(Alone):
    """Statistics that do not depend on the input: nothing passes through them."""


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
        return InGraph(kind_of(layer), terms_of(layer, input, options), communicator, masking)
    if communicator.size == 1:
        return _ALONE if masking is None else Alone(masking)
    line = line_of(layer, input, options, communicator)
    return Exchange(line) if masking is None else MaskedExchange(line, masking)


def line_of(layer: nn.Module | None, input: Tensor, options: ops.MergeOptions, communicator: Communicator) -> Line:
    """Returns what a call has in common with those of the other ranks of ``communicator``, of which there are some."""
    conversation = conversation_in(communicator)
    identity = identity_of(layer, input, options, conversation)
    return Line(identity, communicator, conversation, exact_bits(communicator.size))
