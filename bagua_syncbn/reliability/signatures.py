"""Signatures: what a call must have in common on all ranks, as integers for headers and as a text for errors.

The layout of headers is in ``ops/headers.py``.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import ops
from ..communicators.c10d import is_large
from ..groups import Communicator
from ..names import kind_of, name_of, origin_of
from ..options import Options
from ..step.call import Call
from ..torch_internals.autograd import as_number, untraced

# Values that a call must have in common on all ranks: number of channels, whether it is in float64, what happens to the
# running statistics (a key of _TRACKING), and the options without the activation. Flat, because torch.compile passes
# only plain values to functions that it does not trace.
SharedOptions: TypeAlias = tuple[Any, ...]

# Stands for the options of a rank that raised an error instead of making a call.
RAISED = 0

# Updates of running statistics in a call, and their description in errors.
_TRACKING = {"moves": (), "untracked": ("untracked",), "accumulates": ("in accumulate_statistics",)}

_DIRECTIONS = ("forward", "backward", "double backward")
_MOST = 2**14  # options may change with every step

_PRIME = 2**61 - 1
_POINT = 0x1F3D5B79A2C4E687  # random digits


@untraced
def checksum(first: int, second: int, third: int) -> int:
    """Returns a number below 2**61: the polynomial with these coefficients, at one point.

    Python's ``hash`` has no specification, and ``hash(-1) == hash(-2)``.
    """
    return ((first * _POINT + second) * _POINT + third) % _PRIME


@untraced
def word_of(text: str) -> int:
    """Returns a hash of ``text`` that fits a header, never 0."""
    return zlib.crc32(text.encode()) % (ops.WORD - 1) + 1


ALL_BITS = 2**36 - 1  # a whole fingerprint: its header sums are exact in float64, in any job


def exact_bits(ranks: int) -> int:
    """Returns the bits of a fingerprint whose header sums over ``ranks`` are exact in float32, in three parts of 12."""
    bits = (24 - (ranks - 1).bit_length()) // 2
    return ((1 << bits) - 1) * (1 + 2**12 + 2**24)


def shared_options(call: Call, options: Options) -> SharedOptions:
    """Returns the options of ``call`` that all ranks share. Their activations may differ."""
    moves = "untracked" if call.buffers.running_mean is None else "moves"
    tracking = moves if call.accumulate is None else "accumulates"
    eps, momentum, *others, _ = options
    # A layer that averages over all batches may pass a different momentum for each of them.
    if getattr(call.layer, "momentum", 0) is None:
        momentum = None
    channels = call.input.size(1)
    if torch.compiler.is_compiling():
        channels, eps, momentum = as_number(channels), as_number(eps), as_number(momentum)
    return channels, call.input.dtype == torch.float64, tracking, eps, momentum, *others


@untraced
def word_of_options(shared: SharedOptions, direction: int) -> int:
    """Returns the hash of options for a header: equal for equal values, such as 0, False and -0.0."""
    values = (value if value is None or isinstance(value, str) else (float(value) + 0.0).hex() for value in shared)
    return word_of(f"{direction} {' '.join(map(str, values))}")


class CallText(NamedTuple):
    """The description of a call in errors, formatted only when it is needed."""

    what: str
    shared: SharedOptions | str

    def __str__(self) -> str:
        if isinstance(self.shared, str):
            return f"{self.what} ({self.shared})"
        channels, is_double, tracking, *options = self.shared
        values = [f"{channels} channels", "float64" if is_double else "float32"]
        defaults = Options(eps=math.nan, momentum=math.nan)[:-1]  # nothing equals NaN: these two are always listed
        named = zip(Options._fields[:-1], options, defaults, strict=True)
        values += [f"{name}={value}" for name, value, default in named if value != default]
        return f"{self.what} ({', '.join([*values, *_TRACKING[tracking]])})"


class CallSignature:
    """A call as all ranks must make it.

    Attributes:
        caller: hashes of the layer (0 for calls without one) and of the options, in one number.
        kind: hash of the class of the model, or of a layer outside of a model.
        text: describes the call in errors.
        message: whether its message is a sum or else gathered; its size and dtype.
        is_backward: whether the call follows a forward.
        compiled_caller: the caller for compiled code, which does not know the layer.
        backward, derivative: signatures of the passes that follow.
    """

    def __init__(
        self, caller: int, kind: int, text: CallText, message: tuple[bool, int, torch.dtype], is_backward: bool
    ) -> None:
        self.caller, self.kind, self.text, self.message, self.is_backward = caller, kind, text, message, is_backward
        self.compiled_caller = kind * ops.WORD + caller % ops.WORD
        self.backward: CallSignature = self
        self.derivative: CallSignature = self


_texts: dict[int, CallText] = {}  # texts for the calls of this rank, by caller


def signature_of(
    call: Call, options: Options, communicator: Communicator, number_of: Callable[[object, str], int]
) -> CallSignature:
    """Returns the signature of a forward call. ``number_of`` numbers models and layers of one kind."""
    layer, kind, name = call.layer, kind_of(call.layer), name_of(call.layer)
    origin = origin_of(layer)
    number = 0 if layer is None else number_of(layer if origin is None else origin.model, kind)
    name = name if origin is None else f"{name} of {kind}"
    name = f"{name} #{number}" if number > 1 else name
    word = 0 if layer is None else word_of(name)
    return _signature_of(name, word, kind, shared_options(call, options), uses_sums(call.input, communicator))


@functools.lru_cache(_MOST)
def _signature_of(name: str, word: int, kind: str, shared: SharedOptions, summable: bool) -> CallSignature:
    if len(_texts) > 3 * _MOST:
        _texts.clear()
    numel, dtype = 2 * shared[0], torch.float64 if shared[1] else torch.float32
    gathered = False, numel + 2 + ops.HEADER_SIZE, dtype
    forward = (True, numel + 1 + ops.HEADER_SUMS_SIZE, torch.float64) if summable else gathered
    sums = True, numel + ops.HEADER_SUMS_SIZE, dtype
    signatures = []
    for direction, what in enumerate(_DIRECTIONS):
        caller, text = word * ops.WORD + word_of_options(shared, direction), CallText(f"{what} of {name}", shared)
        _texts[caller] = text
        signatures.append(CallSignature(caller, word_of(kind), text, sums if direction else forward, direction > 0))
    signature, backward, derivative = signatures
    signature.backward = derivative.backward = backward
    signature.derivative = backward.derivative = derivative
    return signature


def uses_sums(input: Tensor, communicator: Communicator) -> bool:
    """Whether ranks send sums of statistics instead of gathering them; the same on all ranks, compiled or not.

    This needs a wider dtype than that of the statistics.
    """
    is_narrow = input.dtype != torch.float64 and input.device.type != "mps"  # which has no float64
    return is_narrow and is_large(communicator.size) and getattr(communicator, "adds_float64", True)


def describe_compiled(kind: str, shared: SharedOptions) -> None:
    """Makes a call in compiled code known to :func:`describe`."""
    _texts[word_of(kind) * ops.WORD + word_of_options(shared, 0)] = CallText(
        f"compiled forward of a layer of {kind}", shared
    )


def describe(header: Sequence[float]) -> str:
    """Returns a description of the call with this header."""
    layer, options, call = map(int, header)
    text = str(_texts.get(layer * ops.WORD + options, ""))
    if not call:
        return text or "a compiled call that this rank has not compiled"
    if options == RAISED:
        text = "an error, which that rank reports"
    if not text:
        same = [text for caller, text in _texts.items() if caller // ops.WORD == layer != 0]
        text = f"a call with other options than {same[0]}" if same else "a call that this rank does not know"
    counted = "call and num_batches_tracked, together" if "momentum=None" in text else "call"
    return f"{text}, {counted} {call}"
