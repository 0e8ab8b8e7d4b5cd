"""The protocol between ranks: no two of them ever send messages of different kinds or sizes without knowing it.

Backends end the process, or give values of no meaning, where sizes or kinds of collectives differ between ranks. So a
rank sends only what its peers expect. The history of calls in a group is the same on all its ranks, and from that each
predicts the same next message: what followed the last time. A rank that comes with a call of another message sends
a probe in its place, of the expected kind and size, which holds only the header of its call. If all ranks came with
that call, all know it now and its message goes next; else all know that they differ. In a loop that repeats its calls
nothing is unexpected after the first round, and not one collective is added.

Each message says who sends it. What is gathered ends in a header of three small integers, which every rank that makes
the same call has alike: the layer, by what errors call it; the options; and the number of the call in its group. In a
sum headers would mix: there a fingerprint of them goes in three parts, each with its square. The ranks agree if and
only if the mean of the squares is the square of the mean. In groups of many ranks statistics are a sum too, with the
header in such parts.
"""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from .. import ops
from ..communicators import AsyncCollective, Communicator, TorchCommunicator, is_large, spec_of
from ..options import Options
from ..torch_internals import group_named, is_capturing, unseen_by_selective_checkpointing
from .faults import ON_CPU, RECORDS, FaultRecord, record_for

# Each integer of a header fits float32, which holds every integer up to 2**24.
WORD = 2**24

# In place of the options: a rank that makes no call, because it has raised an error.
RAISED = 0

_DIRECTIONS = ("forward", "backward", "double backward")
_MOST_SIGNATURES = 2**14
_TEXT = 480  # bytes in which a rank says what it does


# Signatures


class SharedOptions(NamedTuple):
    """Options, sizes and dtype that a call must have in common on all ranks."""

    channels: int
    is_double: bool
    accumulates: bool
    options: Options

    def word(self, direction: int) -> int:
        """Returns what stands for them in a header."""
        return hash_of(direction, *self.constants()) % (WORD - 1) + 1

    def constants(self) -> tuple[float | str | None, ...]:
        """Returns all without nesting, as torch.compile hands values to a function that it does not trace."""
        *options, activation = self.options
        return *self[:3], *options, *(activation or ())

    @classmethod
    def of_constants(cls, channels: int, is_double: bool, accumulates: bool, *options: Any) -> SharedOptions:
        """The inverse of :meth:`constants`."""
        last = len(Options._fields) - 1
        activation = ops.Activation(*options[last:]) if options[last:] else None
        return cls(channels, is_double, accumulates, Options._make((*options[:last], activation)))

    def text(self) -> str:
        values = [f"{self.channels} channels", "float64" if self.is_double else "float32"]
        usual = Options(eps=-1, momentum=-1)  # these two are always said
        options = zip(Options._fields, self.options, usual, strict=True)
        values += [f"{name}={value}" for name, value, default in options if value != default]
        return ", ".join([*values, "in accumulate_statistics"] if self.accumulates else values)


class CallSignature:
    """A call as all ranks must make it.

    Attributes:
        key: words for the layer, 0 where the call has none, and for the options.
        speaker: both in one number.
        kind: word for the class of the model, or of a layer by itself.
        is_backward: whether it is a pass that follows a forward.
        message: whether its message is a sum, else it is gathered; its size and dtype.
        text: the call for people, different wherever the key is.
        backward, derivative: the calls that follow from it.
    """

    __slots__ = ("backward", "derivative", "is_backward", "key", "kind", "message", "speaker", "text")

    backward: CallSignature
    derivative: CallSignature

    def __init__(self, layer: int, name: str, kind: str, options: SharedOptions, adds_up: bool, direction: int) -> None:
        self.is_backward = direction > 0
        moments, dtype = 2 * options.channels, torch.float64 if options.is_double else torch.float32
        if self.is_backward:
            self.message = True, moments + ops.PARTS, dtype
        elif adds_up:
            self.message = True, moments + ops.SUMMED_REST, torch.float64
        else:
            self.message = False, moments + 2 + ops.WORDS, dtype
        self.key = layer, options.word(direction)
        self.speaker = layer * WORD + self.key[1]
        self.kind = word_of(kind)
        self.text = f"{_DIRECTIONS[direction]} of {name} ({options.text()})"
        _texts[self.key] = self.text


# By all that a signature is made of; and the texts of all calls of this rank, by key.
_signatures: dict[Any, CallSignature] = {}
_texts: dict[tuple[int, int], str] = {}


def hash_of(*values: float | str | None) -> int:
    """Returns a hash that is the same in each process."""
    return hash(tuple(zlib.crc32(value.encode()) if isinstance(value, str) else value or 0 for value in values))


def word_of(text: str) -> int:
    """Returns a word for ``text``, above 0."""
    return zlib.crc32(text.encode()) % (WORD - 1) + 1


def _common(layer: nn.Module | None, options: Options) -> Options:
    """Returns the options that all ranks have in common in a call of ``layer``."""
    # The forward of a layer's class may give each batch another weight, where the layer averages over all of them.
    averages = getattr(layer, "momentum", 0) is None
    return options._replace(momentum=None) if averages else options


def shared_options(layer: nn.Module | None, input: Tensor, options: Options, accumulates: bool) -> SharedOptions:
    """Returns what a call of ``layer`` with ``input`` has in common on all ranks."""
    options = _common(layer, options)
    # As they are: torch.compile may have symbols for them, but only numbers in a set.
    eps, momentum = next(iter({options.eps})), next(iter({options.momentum}))
    options = options._replace(eps=eps, momentum=momentum)
    return SharedOptions(next(iter({input.size(1)})), input.dtype == torch.float64, accumulates, options)


def kind_of(layer: nn.Module | None) -> str:
    """Returns the class of the model that a layer is in, or that of a layer by itself."""
    model = getattr(layer, "converted_model", None)
    kind: str = type(layer).__name__ if model is None else model.name
    return "sync_batch_norm" if layer is None else kind


def name_of(layer: nn.Module | None) -> str:
    """Returns what to call a layer, or a call without one, in a text for people."""
    name = getattr(layer, "name_in_model", None)
    return kind_of(layer) if name is None else f"{type(layer).__name__} {name!r}"


def adds_up_stats(input: Tensor, communicator: Communicator) -> bool:
    """Whether the statistics of a call are added up and not gathered: alike on all ranks, compiled or not.

    That takes a dtype which is wider than theirs.
    """
    is_narrow = input.dtype != torch.float64 and input.device.type != "mps"  # which has no float64
    return is_narrow and is_large(communicator.size) and getattr(communicator, "adds_float64", True)


def _signature_of(
    layer: nn.Module | None,
    input: Tensor,
    options: Options,
    accumulates: bool,
    communicator: Communicator,
    history: CallHistory,
) -> CallSignature:
    """Returns the signature of a forward call."""
    name, model, kind = getattr(layer, "name_in_model", None), getattr(layer, "converted_model", None), kind_of(layer)
    number = 0 if layer is None else history.number_of(model or layer, kind)
    caller = number, None if model is None else kind, name, type(layer)
    adds_up = adds_up_stats(input, communicator)
    call = caller, input.size(1), input.dtype, _common(layer, options), accumulates, adds_up
    signature = _signatures.get(call)
    if signature is None:
        if len(_signatures) == _MOST_SIGNATURES:  # options that change with every step
            _signatures.clear()
            _texts.clear()
        speaker = name_of(layer) if model is None else f"{name_of(layer)} of {kind}"
        speaker = f"{speaker} #{number}" if number > 1 else speaker
        word, shared = 0 if layer is None else word_of(speaker), shared_options(layer, input, options, accumulates)
        signature, backward, derivative = (CallSignature(word, speaker, kind, shared, adds_up, way) for way in range(3))
        signature.backward = derivative.backward = backward
        signature.derivative = backward.derivative = derivative
        _signatures[call] = signature
    return signature


def _describe(header: Sequence[float]) -> str:
    """Returns for people what a rank said in a header."""
    layer, options, call = map(int, header)
    text = _texts.get((layer, options))
    if not call:
        return text or "a compiled call that this rank has not compiled"
    if options == RAISED:
        text = "an error of its own, which it shows"
    if text is None:
        same = [text for (other, _), text in _texts.items() if other == layer != 0]
        text = f"a call with other options than {same[0]}" if same else "a call that this rank does not know"
    counted = "call and num_batches_tracked, together" if "momentum=None" in text else "call"
    return f"{text}, {counted} {call}"


# History


class CallHistory:
    """The calls of one group, from which each rank knows what its peers expect next: the same on all of them.

    A step begins with the first forward after a backward.
    """

    most = 2**14  # predictions; all ranks forget them at the same call

    def __init__(self, compiled: set[int] | None = None) -> None:
        self.calls = 0
        self.device: torch.device | None = None  # of the messages; None before the first one
        self.failure: str | None = None  # the call after which this rank does not know what others expect
        self.pending: PendingError | None = (
            None  # in case that is an error of its own, which others may have raised too
        )
        # Kinds whose calls here were compiled. As compiled code does, they say no more than their options.
        self.compiled: set[int] = set() if compiled is None else compiled
        self.last: CallSignature | None = None
        self.step = 0  # hash of the calls of this step
        self.after_step: dict[int, tuple[CallSignature, int]] = {}  # the next call, and the hash with it
        self._after_call: dict[tuple[int, int], CallSignature] = {}
        self._numbers: dict[int, tuple[ref[Any], int]] = {}
        self._callers: Counter[str] = Counter()

    def expected(self) -> CallSignature | None:
        """Returns what comes next: what did after the same calls of this step, else after the same last call."""
        known = self.after_step.get(self.step)
        if known is not None:
            return known[0]
        return None if self.last is None else self._after_call.get(self.last.key)

    def add(self, signature: CallSignature) -> None:
        """Adds a call that all ranks have made, and expects it next in this place of a step."""
        known = self.after_step.get(self.step)
        if known is None or (known[0] is not signature and known[0].key != signature.key):
            known = self._learn(signature)
        self.step = known[1]
        self.last = signature
        self.calls += 1

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
        history = CallHistory(None if hasattr(group, "group_name") else _compiled_unnamed)
        known = _histories[number] = held, history
    return known[1]


# Compiled calls


def note_compilation(group_name: str | None, kind: str, *constants: Any) -> None:
    """Notes that a call with these shared options is compiled, by a layer of this kind, in the group of that name.

    Without a name it says so of all groups that have none.
    """
    word, shared = word_of(kind), SharedOptions.of_constants(*constants)
    _texts[word, shared.word(0)] = f"compiled forward of a layer of {kind} ({shared.text()})"
    compiled = _compiled_unnamed if group_name is None else _history_of(group_named(group_name)).compiled
    compiled.add(word)


def compiled_words(kind: str, options: SharedOptions, ranks: int) -> tuple[int, int]:
    """Returns what says in compiled code who speaks: forward a header, of call 0, and backward a fingerprint."""
    kind_word = word_of(kind) * WORD
    return kind_word + options.word(0), hash_of(kind_word + options.word(1), 0, 0) & exact_bits(ranks)


# Run when they are traced, and not traced: torch 2.10 cannot trace hashes, and a checkpointed region that is compiled
# must not change what is outside of it. As by torch.compiler.assume_constant_result, which would have every process
# import the compiler.
_run_in_traces: tuple[Any, ...] = (hash_of, word_of, note_compilation)
for _function in _run_in_traces:
    _function._dynamo_marked_constant = True


# Probes and errors


def exact_bits(ranks: int) -> int:
    """Returns the bits of a fingerprint, three parts of 12, that leave the sums of its words over ``ranks`` exact."""
    bits = (24 - (ranks - 1).bit_length()) // 2
    return ((1 << bits) - 1) * (1 + 2**12 + 2**24)


def _can_probe(device: torch.device) -> bool:
    return not (device.type == "cuda" and is_capturing())


class Probe:
    """A message as all ranks of a group expect it, that holds only the header of what this rank comes with."""

    def __init__(
        self, expected: CallSignature | None, speaker: int, call: int, communicator: Communicator, device: torch.device
    ) -> None:
        self._is_sum, numel, dtype = (False, ops.WORDS, torch.float32) if expected is None else expected.message
        self._size = communicator.size
        fingerprint = hash((speaker, call, 0)) & exact_bits(self._size)
        self._said = ops.parts_of(fingerprint) if self._is_sum else ops.words_of_row(speaker, call)
        packed = torch.zeros(numel, dtype=dtype, device="cpu")
        packed[-len(self._said) :] = torch.tensor(self._said, dtype=dtype, device="cpu")
        self.packed = packed.to(device)
        self.collective = communicator.all_reduce if self._is_sum else communicator.all_gather

    def headers_in(self, answer: Tensor) -> list[list[float]]:
        """Returns the header of each rank, where they can be told apart."""
        return [] if self._is_sum else answer[:, -ops.WORDS :].tolist()

    def is_unanimous(self, answer: Tensor) -> bool:
        """Whether all ranks came with the same header."""
        if self._is_sum:
            return bool(answer[-ops.PARTS :].tolist() == [self._size * word for word in self._said])
        return all(header == self._said for header in self.headers_in(answer))

    def begin(self, communicator: TorchCommunicator) -> AsyncCollective:
        """Sends it without waiting for the other ranks."""
        begin = communicator.begin_all_reduce if self._is_sum else communicator.begin_all_gather
        return begin(self.packed)


class PendingError(NamedTuple):
    """A probe that this rank has sent in place of a call in which it raised an error."""

    probe: Probe
    answer: AsyncCollective
    texts: AsyncCollective | None  # on CPU, where all ranks send them as soon as they differ


def tell_peers(process_group: Any, layer: nn.Module | None, error: Exception) -> None:
    """Tells the ranks of ``process_group`` that this one raises ``error``, in place of the message that they expect.

    It waits for none of them. At its next call, each rank goes on if all of them have raised, else it raises too. Does
    nothing where no rank can be known to expect a message: before the first one, and where something traces.
    """
    if torch.compiler.is_compiling() or is_tracing():
        return
    # Nothing may take the place of the error.
    with suppress(Exception), torch.no_grad(), unseen_by_selective_checkpointing():
        communicator = spec_of(process_group).found()
        if isinstance(communicator, TorchCommunicator):
            history = history_in(communicator)
            if word_of(kind_of(layer)) not in history.compiled:
                _tell(communicator, history, f"{type(error).__name__} in {name_of(layer)}", str(error))


def _tell(communicator: TorchCommunicator, history: CallHistory, what: str, why: str) -> None:
    device, call = history.device, history.calls + 1
    if device is None or history.failure is not None or not _can_probe(device):
        return
    probe = Probe(history.expected(), RAISED, call % WORD, communicator, device)
    answer = probe.begin(communicator)
    on_cpu = device.type == "cpu"
    texts = communicator.begin_all_gather(_codes_of(f"{what}, call {call}: {why}")) if on_cpu else None
    history.failure, history.pending = f"{what}, call {call}", PendingError(probe, answer, texts)


def _resume(history: CallHistory) -> None:
    """Raises, unless this rank has raised an error in its last call and all others have done so too."""
    pending, history.pending = history.pending, None
    if pending is None:
        raise RuntimeError(
            f"process_group: expected one that works, got one that failed before, in the {history.failure}; "
            "its ranks do not agree on what comes next any more: end the job, or convert the model again on all ranks, "
            "with a group that torch.distributed.new_group() has made since"
        )
    answer = pending.answer.wait()
    said = [_describe(header) for header in pending.probe.headers_in(answer)]
    if pending.texts is not None:
        said = _by_text(pending.texts.wait())
    if not pending.probe.is_unanimous(answer):
        raise RuntimeError(_differ(said))
    history.failure = None


def _codes_of(text: str) -> Tensor:
    said = text.encode("ascii", "replace").ljust(_TEXT)
    if len(said) > _TEXT:  # what a long one ends in tells calls apart too
        said = said[: _TEXT // 2 - 5] + b" ... " + said[-_TEXT // 2 :]
    return torch.tensor(list(said), dtype=torch.float32, device="cpu")


def _by_text(gathered: Tensor) -> list[str]:
    """Returns what the ranks say, each text with the ranks that say it."""
    ranks: dict[str, list[str]] = {}
    for rank, row in enumerate(gathered.to(torch.uint8).tolist()):
        ranks.setdefault(bytes(row).decode().rstrip(), []).append(str(rank))
    return [f"rank{'s' * (len(which) > 1)} {', '.join(which)}: {said}" for said, which in ranks.items()]


def _differ(calls: Sequence[str]) -> str:
    """Returns the message for ranks that made different ``calls``."""
    return (
        "sync_batch_norm: expected all ranks of a group to call the same layers in the same order with the same "
        f"options, got {'; '.join(calls)}"
    )


# The messages of a call


class CallSite(NamedTuple):
    """The parts of a call that all ranks have alike, and that its next calls share."""

    signature: CallSignature
    communicator: Communicator
    history: CallHistory
    exact_bits: int  # of fingerprints
    record: FaultRecord | None


def call_site(
    layer: nn.Module | None, input: Tensor, options: Options, accumulates: bool, communicator: Communicator
) -> CallSite:
    """Returns what a call has in common with those of the other ranks of ``communicator``, of which there are some."""
    history = history_in(communicator)
    signature = _signature_of(layer, input, options, accumulates, communicator, history)
    return CallSite(signature, communicator, history, exact_bits(communicator.size), record_for(input))


class RankSync:
    """The messages of one call of a layer, forward and backward, over several ranks.

    Attributes:
        communicator: whom it talks to.
        record: for the ops that take messages apart, to note there that ranks differ; None where they cannot.
    """

    __slots__ = ("_exact_bits", "_history", "_is_compiled", "_number", "_signature", "communicator", "record")

    def __init__(self, site: CallSite) -> None:
        self._signature, self.communicator, self._history, self._exact_bits, self.record = site
        self._number = 0  # of the forward
        # Its peers may be in compiled code.
        self._is_compiled = self._signature.kind in self._history.compiled

    def header(self, signature: CallSignature | None = None) -> tuple[int, int]:
        """Returns who speaks, and in what call: as ``batch_norm_stats`` takes it, or of another call that follows."""
        signature, history = signature or self._signature, self._history
        if history.failure is not None:
            _resume(history)
        for record in RECORDS.values():
            if record.kind.value:
                _raise_if_found()
        if self._is_compiled:
            return signature.kind * WORD + signature.key[1], 0
        return signature.speaker, (history.calls + 1) % WORD

    def gather(self, packed: Tensor, counter: Tensor | None = None) -> Tensor:
        """Returns the rows of all ranks, each as ``packed`` with its header, for an op. :meth:`check` after it.

        In a large group one row as of all ranks together, see :func:`~bagua_syncbn.ops.add_up_stats`.

        Raises:
            RuntimeError: the ranks make different calls, or the collective failed.
        """
        history = self._history
        if counter is not None and not self._is_compiled:  # to be alike on all ranks too; compared on the device
            packed[-1:].add_(counter)
        if self._signature.message[0]:
            gathered = ops.add_up_stats(packed, self.communicator.size, self._add_up)
        else:
            gathered = self._send(self.communicator.all_gather, packed, self._signature)
        self._number = 0 if self._is_compiled else history.calls
        return gathered

    def _add_up(self, stats: Tensor) -> Tensor:
        return self._send(self.communicator.all_reduce, stats, self._signature)

    def check(self, gathered: Tensor, counter: Tensor | None = None) -> None:
        """Raises RuntimeError if an op on CPU has found that the ranks differ in ``gathered``."""
        if self.record is ON_CPU and ON_CPU.kind.value:
            also = "" if counter is None else f", num_batches_tracked={counter.item():.0f}"
            headers = () if self._signature.message[0] else gathered[:, -ops.WORDS :].tolist()
            self._raise_found(self._signature, headers, also)

    def fingerprint(self, signature: CallSignature | None = None) -> int:
        """Returns the fingerprint that goes with the sums of the backward pass, or of another call that follows."""
        speaker, call = self.header(signature or self._signature.backward)
        return hash((speaker, call, self._number)) & self._exact_bits

    def all_reduce(self, sums: Tensor) -> Tensor:
        """Returns the sums of all ranks, and of their words, for an op. :meth:`check_sums` after it."""
        return self._send(self.communicator.all_reduce, sums, self._signature.backward)

    def of_sums(self) -> tuple[Any, ...]:
        """Returns what that op is to check sums by: ranks, record, and the number by which it is to note these."""
        size, record = self.communicator.size, self.record
        if record is None:
            return (size,)
        if record is ON_CPU:  # needs no number: it is looked at at once
            return size, record.tensor
        number = next(_numbers)
        _sums.append((number, self._signature.backward))
        return size, record.tensor, number

    def check_sums(self) -> None:
        """Raises RuntimeError if an op on CPU has found that the ranks differ in their sums."""
        if self.record is ON_CPU and ON_CPU.kind.value:
            self._raise_found(self._signature.backward)

    def total(self, packed: Tensor) -> Tensor:
        """Returns the sum over ranks of ``packed``: for derivatives of any order."""
        signature = self._signature.derivative
        words = ops.parts_of(self.fingerprint(signature))
        packed = torch.cat([packed, packed.new_tensor(words)])
        total, said = self._send(self.communicator.all_reduce, packed, signature).tensor_split([-ops.PARTS])
        expected = [self.communicator.size * word for word in words]
        if packed.device.type != "cpu" or type(packed) is not Tensor:
            return total.where((said == packed.new_tensor(expected)).all(), torch.nan)
        if said.tolist() != expected:
            self._disagree(signature, self._history.calls, packed.device)
        return total

    def _send(self, collective: Callable[[Tensor], Tensor], packed: Tensor, signature: CallSignature) -> Tensor:
        """Returns what ``collective`` makes of the message ``packed``, once all ranks are known to have the same."""
        history, is_compiled = self._history, self._is_compiled
        known = history.after_step.get(history.step)
        is_next = known is not None and known[0] is signature
        if not is_next and not is_compiled:
            self._agree_on(signature, packed)
        try:
            result = collective(packed)
        except BaseException as error:
            self._fail(signature, error)
        if is_compiled:
            return result
        if known is not None and is_next:  # as history.add, in most calls
            history.step, history.last = known[1], signature
            history.calls += 1
        else:
            history.add(signature)
        return result

    def _agree_on(self, signature: CallSignature, packed: Tensor) -> None:
        """Sees to it that all ranks have the message ``packed``, where it is not known to be what they expect."""
        expected = self._history.expected()
        is_expected = expected is not None and expected.message == signature.message
        if not is_expected and type(packed) is Tensor and _can_probe(packed.device):
            self._probe(expected, signature, packed.device)

    def _probe(self, expected: CallSignature | None, signature: CallSignature, device: torch.device) -> None:
        """Finds out, by a message as all ranks expect it, whether they all come with ``signature``."""
        call = self._history.calls + 1
        probe = Probe(expected, *self.header(signature), self.communicator, device)
        try:
            answer = probe.collective(probe.packed)
        except BaseException as error:
            self._fail(signature, error)
        if not probe.is_unanimous(answer):
            self._disagree(signature, call, device, probe.headers_in(answer))
        self._history.device = device

    def _fail(self, signature: CallSignature, error: BaseException) -> NoReturn:
        """Raises for a collective that raised ``error``."""
        history, communicator = self._history, self.communicator
        history.failure = self._say(signature, history.calls + 1)
        if not isinstance(error, RuntimeError):
            raise error
        raise RuntimeError(
            f"sync_batch_norm: collective failed in the {history.failure}, on rank {communicator.rank} of "
            f"{communicator.size}: {type(error).__name__}: {error}. Another rank has ended, raised an error, is in "
            "other code until the time-out, or was late; the group can no longer be used"
        ) from error

    def _raise_found(
        self, signature: CallSignature, headers: Sequence[Sequence[float]] = (), also: str = ""
    ) -> NoReturn:
        """Raises for what an op on CPU has found."""
        record, call = ON_CPU.take(), self._history.calls
        if record[0] == 2 and record[-1] >= 0:
            self._history.failure = self._say(signature, call)
            raise RuntimeError(_found(record))
        self._disagree(signature, call, torch.device("cpu"), headers, also)

    def _disagree(
        self,
        signature: CallSignature,
        call: int,
        device: torch.device,
        headers: Sequence[Sequence[float]] = (),
        also: str = "",
    ) -> NoReturn:
        """Raises for ranks that make different calls.

        On CPU all ranks know and come here, but for those in compiled code; elsewhere some may not.
        """
        own = self._history.failure = self._say(signature, call) + also
        all_come = all(header[-1] for header in headers) if headers else not self._history.compiled
        if device.type == "cpu" and all_come:
            said = _by_text(self.communicator.all_gather(_codes_of(own)))
        elif headers:
            said = [f"rank {rank}: {_describe(header)}" for rank, header in enumerate(headers)]
            said[self.communicator.rank] = f"rank {self.communicator.rank}: {own}"
        else:
            said = ["this rank: " + own, "another rank: another call"]
        raise RuntimeError(_differ(said))

    def _say(self, signature: CallSignature, call: int) -> str:
        """Returns what this rank does in a call, for people."""
        if self._is_compiled:
            return f"{signature.text}, of a model that was compiled"
        of_forward = f", of the forward in call {self._number}" if signature.is_backward else ""
        return f"{signature.text}, call {call}{of_forward}"


# Faults

# Sums of this rank by their number in this process, for those that turn out to be wrong some time later.
_sums: deque[tuple[int, CallSignature]] = deque(maxlen=1024)
_numbers = itertools.count()


def check_ranks() -> None:
    """Waits for the devices, and raises if ranks made different calls without an error so far.

    In eager mode on CPU they raise at once. On CUDA no host waits: where ranks differ the output or gradient is NaN,
    running statistics stay as they are, and the first call that finds out raises. This one finds out for certain, for
    example at the end of an epoch. So it does for compiled calls on CPU; those on CUDA give NaN and are not named.

    Raises:
        RuntimeError: ranks made different calls. It names them.

    Example::

        >>> bagua_syncbn.check_ranks()
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    _raise_if_found()


def check() -> None:
    """:func:`check_ranks` by its former name, which goes with the next release."""
    warnings.warn("bagua_syncbn.check: renamed; call bagua_syncbn.check_ranks", DeprecationWarning, stacklevel=2)
    check_ranks()


def _raise_if_found() -> None:
    """Raises for what ops are known to have found wrong. Waits for no device."""
    for record in RECORDS.values():
        if record.kind.value:
            raise RuntimeError(_found(record.take()))


def _found(record: Sequence[int]) -> str:
    """Returns the message for what an op wrote to a record."""
    kind, where, *headers = record
    if kind == 3:
        own = [signature.text for number, signature in _sums if number == where]
        return _differ([f"this rank: {own[0] if own else 'backward, compiled'}", "another rank: another call"])
    if headers[-1] < 0:  # in statistics that were added up
        *caller, call = headers[3:]
        return _differ([f"this rank: {_describe((*caller, -1 - call))}", "another rank: another call"])
    said = [f"rank 0: {_describe(headers[:3])}", f"rank {where}: {_describe(headers[3:])}"]
    if kind == 1:
        return _differ(said)
    return f"sync_batch_norm: expected from each rank a count of values, from 0 to 2**53, got no such from {said[1]}"
