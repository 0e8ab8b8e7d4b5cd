"""Signatures: what a call must have in common on all ranks, as integers for messages and as a text for people.

``ops/words.py`` has the layout of the words.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import ops
from ..communicators.c10d import is_large
from ..groups import Communicator
from ..names import kind_of, name_of, origin_of
from ..options import Options
from ..step.call import Call
from ..torch_internals.autograd import as_number, untraced

# Values that all ranks have in common in a call: number of channels, whether it is in float64, what becomes of the
# running statistics (a key of _TRACKING), and the options but the activation. Flat, as torch.compile hands values to a
# function that it does not trace.
SharedOptions: TypeAlias = tuple[Any, ...]

# In place of the options: a rank that makes no call, because it has raised an error.
RAISED = 0

# Keys: what becomes of running statistics in a call. Values: the words for it in messages.
_TRACKING = {"moves": (), "untracked": ("untracked",), "accumulates": ("in accumulate_statistics",)}

_DIRECTIONS = ("forward", "backward", "double backward")
_MOST_SIGNATURES = 2**14


_PRIME = 2**61 - 1
_POINT = 0x1F3D5B79A2C4E687  # random digits


@untraced
def checksum(first: int, second: int, third: int) -> int:
    """Returns a number below 2**61 for three: the polynomial that has them as coefficients, at one point.

    Python's own ``hash`` is defined by no specification, and the same for -1 and -2.
    """
    return ((first * _POINT + second) * _POINT + third) % _PRIME


@untraced
def word_of(text: str) -> int:
    """Returns a word for ``text``, above 0."""
    return zlib.crc32(text.encode()) % (ops.WORD - 1) + 1


ALL_BITS = 2**36 - 1  # a whole fingerprint: float64 leaves the sums of its words exact in any job


def exact_bits(ranks: int) -> int:
    """Returns the bits of a fingerprint, three parts of 12, that float32 leaves exact in sums over ``ranks``."""
    bits = (24 - (ranks - 1).bit_length()) // 2
    return ((1 << bits) - 1) * (1 + 2**12 + 2**24)


def shared_options(call: Call, options: Options) -> SharedOptions:
    """Returns the options of ``call`` that all ranks share. Their activations may differ."""
    moves = "untracked" if call.buffers.running_mean is None else "moves"
    tracking = moves if call.accumulate is None else "accumulates"
    eps, momentum, *others, _ = options
    # The forward of a layer's class may give each batch another weight, where the layer averages over all of them.
    if getattr(call.layer, "momentum", 0) is None:
        momentum = None
    channels = call.input.size(1)
    if torch.compiler.is_compiling():
        channels, eps, momentum = as_number(channels), as_number(eps), as_number(momentum)
    return channels, call.input.dtype == torch.float64, tracking, eps, momentum, *others


@untraced
def word_of_options(shared: SharedOptions, direction: int) -> int:
    """Returns the word for options in a header: equal for equal values, such as 0, False and -0.0."""
    values = (value if value is None or isinstance(value, str) else (float(value) + 0.0).hex() for value in shared)
    return word_of(f"{direction} {' '.join(map(str, values))}")


def text_of_options(shared: SharedOptions) -> str:
    channels, is_double, tracking, *options = shared
    values = [f"{channels} channels", "float64" if is_double else "float32"]
    usual = Options(eps=math.nan, momentum=math.nan)[:-1]  # nothing equals NaN: these two are always said
    named = zip(Options._fields[:-1], options, usual, strict=True)
    values += [f"{name}={value}" for name, value, default in named if value != default]
    return ", ".join([*values, *_TRACKING[tracking]])


class CallSignature:
    """A call as all ranks must make it.

    Attributes:
        key: words for the layer, 0 where the call has none, and for the options.
        kind: word for the class of the model, or of a layer by itself.
        text: the call for people, different wherever the key is.
        message: whether its message is a sum, else it is gathered; its size and dtype.
        is_backward: whether it is a pass that follows a forward.
        caller: both words of the key in one number.
        compiled_caller: what compiled code says in place of the caller, which does not know the layer.
        backward, derivative: the calls that follow from it.
    """

    def __init__(
        self, key: tuple[int, int], kind: int, text: str, message: tuple[bool, int, torch.dtype], is_backward: bool
    ) -> None:
        self.key, self.kind, self.text, self.message, self.is_backward = key, kind, text, message, is_backward
        self.caller = key[0] * ops.WORD + key[1]
        self.compiled_caller = kind * ops.WORD + key[1]
        self.backward: CallSignature = self
        self.derivative: CallSignature = self


# By all that a signature is made of; and the texts of all calls of this rank, by key.
_signatures: dict[Any, CallSignature] = {}
_texts: dict[tuple[int, int], str] = {}


def signature_of(
    call: Call, options: Options, communicator: Communicator, number_of: Callable[[object, str], int]
) -> CallSignature:
    """Returns the signature of a forward call. ``number_of`` numbers models and layers of one kind."""
    layer, input = call.layer, call.input
    name, model = origin_of(layer) or (None, None)
    kind = kind_of(layer)
    number = 0 if layer is None else number_of(model or layer, kind)
    shared, adds_up = shared_options(call, options), uses_sums(input, communicator)
    key = number, None if model is None else kind, name, type(layer), shared, adds_up
    signature = _signatures.get(key)
    if signature is None:
        if len(_signatures) == _MOST_SIGNATURES:  # options that change with every step
            _signatures.clear()
            _texts.clear()
        caller_name = name_of(layer) if model is None else f"{name_of(layer)} of {kind}"
        caller_name = f"{caller_name} #{number}" if number > 1 else caller_name
        word, numel = 0 if layer is None else word_of(caller_name), 2 * input.size(1)
        gathered = False, numel + 2 + ops.WORDS, torch.float64 if input.dtype == torch.float64 else torch.float32
        forward = (True, numel + 1 + ops.PARTS, torch.float64) if adds_up else gathered
        sums = True, numel + ops.PARTS, gathered[2]
        signature, backward, derivative = (
            CallSignature((word, word_of_options(shared, way)), word_of(kind), text, sums if way else forward, way > 0)
            for way, text in enumerate(f"{what} of {caller_name} ({text_of_options(shared)})" for what in _DIRECTIONS)
        )
        signature.backward = derivative.backward = backward
        signature.derivative = backward.derivative = derivative
        _texts.update((one.key, one.text) for one in (signature, backward, derivative))
        _signatures[key] = signature
    return signature


def uses_sums(input: Tensor, communicator: Communicator) -> bool:
    """Whether the statistics of a call are added up and not gathered; the same on all ranks, compiled or not.

    That takes a dtype which is wider than theirs.
    """
    is_narrow = input.dtype != torch.float64 and input.device.type != "mps"  # which has no float64
    return is_narrow and is_large(communicator.size) and getattr(communicator, "adds_float64", True)


def describe_compiled(kind_word: int, kind: str, shared: SharedOptions) -> None:
    """Has :func:`describe` know a call of compiled code."""
    _texts[kind_word, word_of_options(shared, 0)] = f"compiled forward of a layer of {kind} ({text_of_options(shared)})"


def describe(header: Sequence[float]) -> str:
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
