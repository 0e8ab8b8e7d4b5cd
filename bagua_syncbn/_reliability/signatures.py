"""Signatures: the properties of a message that must be equal on all ranks.

They are integers in headers, whose layout ``_ops/headers.py`` describes, and text in errors.
"""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _ops as ops
from .._groups import Communicator
from .._ops.options import Options
from .._step.call import Call
from .._torch.autograd import as_number, is_recorded, untraced
from ..communicators.c10d import sums_statistics

RAISED = 0  # identity in the header of a rank that raised an error


@untraced
def word_of(text: str) -> int:
    """Returns a hash of ``text`` that fits a header, never 0."""
    return zlib.crc32(text.encode()) % (ops.WORD - 1) + 1


def exact_bits(ranks: int) -> int:
    """Returns a mask that shortens a fingerprint's three parts, so that float32 sums over ``ranks`` are exact.

    Fingerprints are hashes of tuples of integers, which are equal in all processes.
    """
    bits = (24 - (ranks - 1).bit_length()) // 2
    return ((1 << bits) - 1) * (1 + 2**12 + 2**24)


@dataclass(eq=False)
class Signature:
    """The properties of a message that must be equal on all ranks."""

    identity: int  # two hashes in one number: the layer; direction and options
    kind: int  # hash of the model's class, or of the class of a layer outside of a model
    text: str  # for errors
    summed: bool  # whether messages are summed, instead of gathered
    numel: int  # message size
    dtype: torch.dtype  # message dtype
    is_backward: bool = False

    def __post_init__(self) -> None:
        # Compiled code identifies a layer by the class of its model.
        self.compiled_identity = self.kind * ops.WORD + self.identity % ops.WORD
        # The messages of one forward; signature_of replaces two of them.
        self.forward = self.backward = self.derivative = self


def shared_options(call: Call, options: Options) -> tuple[Any, ...]:
    """Returns values that must be equal on all ranks: the number of channels, whether the input is float64, how running
    statistics are updated ("" by default), and all options except the activation.

    The result is a plain tuple, because torch.compile passes only plain values to untraced functions.
    """
    updates = "untracked" if call.buffers[0] is None else ""
    if call.accumulate is not None:
        updates = "in accumulate_statistics"
    channels, eps, momentum = call.input.size(1), options.eps, options.momentum
    if getattr(call.layer, "momentum", 0) is None:
        momentum = None  # the layer may pass a different momentum for each batch
    if is_recorded():
        channels, eps, momentum = as_number(channels), as_number(eps), as_number(momentum)
    shared = options._replace(eps=eps, momentum=momentum, activation=None)
    return channels, call.input.dtype == torch.float64, updates, *shared


@functools.lru_cache(2**14)  # options may change in every step
def signature_of(name: str, kind: str, shared: tuple[Any, ...], summed: bool) -> Signature:
    """Returns the signature of a forward of layer ``name``. If ``summed``, ranks sum statistics."""
    channels, is_double, updates, *options = shared
    details = f"{channels} channels, {'float64' if is_double else 'float32'}"
    defaults = Options(eps=math.nan, momentum=math.nan)  # NaN equals nothing, so these two are always listed
    for field, value, default in zip(Options._fields, options, defaults, strict=True):
        details += f", {field}={value}" if value != default else ""
    details += f", {updates}" if updates else ""

    def signature(direction: str, summed: bool, numel: int, dtype: torch.dtype) -> Signature:
        identity = word_of(name) * ops.WORD + word_of(f"{direction} ({details})")
        text = f"{direction} of {name} ({details})"
        return Signature(identity, word_of(kind), text, summed, numel, dtype, direction != "forward")

    dtype = torch.float64 if is_double else torch.float32
    size = 2 * channels + ops.HEADER_SUMS_SIZE
    if summed:
        forward = signature("forward", True, size + 1, torch.float64)
    else:
        forward = signature("forward", False, 2 * channels + 2 + ops.HEADER_SIZE, dtype)
    forward.backward = signature("backward", True, size, dtype)
    forward.derivative = signature("double backward", True, size, dtype)
    return forward


def is_summed(input: Tensor, communicator: Communicator) -> bool:
    """Returns whether ranks sum their statistics instead of gathering rows. All ranks agree, compiled or not."""
    # Sums need a wider dtype than the statistics; "mps" has no float64.
    is_narrow = input.dtype != torch.float64 and input.device.type != "mps"
    return is_narrow and sums_statistics(communicator.size) and getattr(communicator, "sums_float64", True)
