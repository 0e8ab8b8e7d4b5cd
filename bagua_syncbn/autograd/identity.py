"""Who speaks in a message, and of what: the words that travel with the statistics, and the text for people.

The words are small integers, which every rank that makes the same call has alike. Three go with what is gathered: of
the layer, made of what a text for people calls it; of the terms that the call must have in common; and the number of
the call in its group. In a sum words would mix: there a fingerprint of them goes in three parts, each with its square.
The ranks agree if and only if the mean of the squares is the square of the mean.
"""

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops

if TYPE_CHECKING:
    from .conversation import Conversation

# Words fit float32, which holds every integer up to 2**24.
WORD = 2**24

# In place of the terms: a rank that makes no call, because it has raised an error.
RAISED = 0

_DIRECTIONS = ("forward", "backward", "double backward")


class Terms(NamedTuple):
    """What a call must have in common on all ranks. Numbers only, whose hash is the same in each process."""

    channels: int
    eps: float
    momentum: float  # -1 for None
    eps_mode: int
    skip_nonfinite: bool
    is_double: bool
    accumulates: bool

    def word(self, direction: int) -> int:
        return hash_of(direction, *self) % (WORD - 1) + 1


def hash_of(*numbers: float) -> int:
    """Returns what is the same in each process."""
    return hash(numbers)


def word_of(text: str) -> int:
    """Returns a word for ``text``, above 0."""
    return zlib.crc32(text.encode()) % (WORD - 1) + 1


# Run when they are traced, and not traced, which torch 2.10 cannot do. As by torch.compiler.assume_constant_result,
# which would have every process import the compiler.
hash_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
word_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def exact_bits(ranks: int) -> int:
    """Returns the bits of a fingerprint, three parts of 12, that leave the sums of its words over ``ranks`` exact."""
    bits = (24 - (ranks - 1).bit_length()) // 2
    return ((1 << bits) - 1) * (1 + 2**12 + 2**24)


class Identity:
    """A call as all ranks must make it.

    Attributes:
        key: words for the layer, 0 where the call has none, and for the terms.
        speaker: both in one number.
        kind: word for the class of the model, or of a layer by itself.
        message: whether its message is a sum, else it is gathered; its size and dtype.
        text: the same for people.
    """

    __slots__ = ("backward", "derivative", "key", "kind", "message", "speaker", "text")

    backward: "Identity"
    derivative: "Identity"

    def __init__(self, layer: int, name: str, kind: str, terms: Terms, direction: int) -> None:
        numel = 2 * terms.channels + (ops.PARTS if direction else 2 + ops.WORDS)
        self.message = bool(direction), numel, torch.float64 if terms.is_double else torch.float32
        self.key = layer, terms.word(direction)
        self.speaker = layer * WORD + self.key[1]
        self.kind = word_of(kind)
        self.text = f"{_DIRECTIONS[direction]} of {name} ({text_of(terms)})"
        _texts[self.key] = self.text


def text_of(terms: Terms) -> str:
    values = [f"{terms.channels} channels", "float64" if terms.is_double else "float32", f"eps={terms.eps}"]
    values.append(f"momentum={None if terms.momentum == -1 else terms.momentum}")
    if terms.eps_mode:
        values.append(f"eps_mode={ops.EPS_MODES[terms.eps_mode]}")
    if terms.skip_nonfinite:
        values.append("skip_nonfinite")
    if terms.accumulates:
        values.append("in accumulate_statistics")
    return ", ".join(values)


# Of all that this rank has said, by key.
_texts: dict[tuple[int, int], str] = {}


def note_text(key: tuple[int, int], text: str) -> None:
    """Notes what to call a call of these words for layer and terms."""
    _texts[key] = text


def momentum_of(layer: nn.Module | None, options: ops.MergeOptions) -> float | None:
    """Returns the momentum that all ranks have in common in a call of ``layer``."""
    # The forward of a layer's class may give each batch another weight, where the layer averages over all of them.
    return None if getattr(layer, "momentum", 0) is None else options.momentum


def terms_of(layer: nn.Module | None, input: Tensor, options: ops.MergeOptions) -> Terms:
    """Returns the terms of a call of ``layer`` with ``input``."""
    momentum = momentum_of(layer, options)
    # As they are: torch.compile may have symbols for them, but only numbers in a set.
    channels, eps, momentum = (
        next(iter({number})) for number in (input.size(1), options.eps, -1.0 if momentum is None else momentum)
    )
    mode = ops.EPS_MODES.index(options.eps_mode)
    is_double, accumulates = input.dtype == torch.float64, options.kept is not None
    return Terms(int(channels), eps, momentum, mode, options.skip_nonfinite, is_double, accumulates)


def identity_of(
    layer: nn.Module | None, input: Tensor, options: ops.MergeOptions, conversation: "Conversation"
) -> Identity:
    """Returns the identity of a forward call; those of what follows in backward are its attributes."""
    name, model, kind = getattr(layer, "name_in_model", None), getattr(layer, "converted_model", None), kind_of(layer)
    number = 0 if layer is None else conversation.number_of(model or layer, kind)
    caller = number, None if model is None else kind, name, type(layer)
    call = caller, input.size(1), input.dtype, momentum_of(layer, options), options[4:7], options.kept is None
    identity = _identities.get(call)
    if identity is None:
        speaker = speaker_of(layer) if model is None else f"{speaker_of(layer)} of {kind}"
        speaker = f"{speaker} #{number}" if number > 1 else speaker
        word = 0 if layer is None else word_of(speaker)
        identity = _identities[call] = _make_identity(word, speaker, kind, terms_of(layer, input, options))
    return identity


def kind_of(layer: nn.Module | None) -> str:
    """Returns the class of the model that a layer is in, or that of a layer by itself."""
    model = getattr(layer, "converted_model", None)
    kind: str = type(layer).__name__ if model is None else model.name
    return "sync_batch_norm" if layer is None else kind


def speaker_of(layer: nn.Module | None) -> str:
    """Returns what to call a layer, or a call without one, in a text for people."""
    name = getattr(layer, "name_in_model", None)
    return kind_of(layer) if name is None else f"{type(layer).__name__} {name!r}"


# By all that they are made of.
_identities: dict[Any, Identity] = {}


def _make_identity(layer: int, speaker: str, kind: str, terms: Terms) -> Identity:
    if len(_identities) == _MOST_IDENTITIES:  # options that change with every step
        _identities.clear()
        _texts.clear()
    identity, backward, derivative = (Identity(layer, speaker, kind, terms, direction) for direction in range(3))
    identity.backward = derivative.backward = backward
    identity.derivative = backward.derivative = derivative
    return identity


_MOST_IDENTITIES = 2**14


def describe(words: Sequence[float]) -> str:
    """Returns in words for people what another rank said in the three that are gathered."""
    layer, terms, call = map(int, words)
    text = _texts.get((layer, terms))
    if not call:
        return text or "a compiled call that this rank has not compiled"
    if terms == RAISED:
        text = "an error of its own, which it shows"
    if text is None:
        same = [text for (other, _), text in _texts.items() if other == layer != 0]
        text = f"a call with other options than {same[0]}" if same else "a call that this rank does not know"
    return f"{text}, call {call}"
