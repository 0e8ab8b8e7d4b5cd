"""Strategies other than ``RankSync``: one rank, given statistics, a compiled graph.

A strategy gathers the statistics of all ranks and adds up their sums. Masks, layouts and ops are the step's.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .. import ops
from ..communicators import LOCAL, Communicator
from ..options import Options
from .faults import RECORDS, differ_text, record_of
from .history import history_in, note_compilation
from .protocol import RankSync
from .signatures import (
    CallSignature,
    SharedOptions,
    adds_up_stats,
    as_number,
    checksum,
    exact_bits,
    kind_of,
    shared_options,
    signature_of,
    word_of,
    word_of_options,
)


class LocalSync:
    """World size 1: no communication. Its methods are those of :class:`RankSync`."""

    communicator: Communicator = LOCAL
    is_traced = False  # by torch.compile
    elementwise: Any = ops

    def header(self) -> tuple[int | None, int]:
        return None, 0

    def gather(self, packed: Tensor, number: int, counter: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return packed.unsqueeze(0), None

    def fingerprint(self, number: int) -> int | None:
        return None

    def all_reduce(self, sums: Tensor, number: int) -> tuple[Any, ...]:
        return (sums,)

    def check(self, number: int, gathered: Tensor | None = None, counter: Tensor | None = None) -> None:
        pass

    def total(self, packed: Tensor, number: int) -> Tensor:
        return packed


class CompiledLocalSync(LocalSync):
    """World size 1 in a call that torch.compile traces.

    The compiler gets elementwise operations of torch, which it fuses with neighbouring ones, and lays out gradients
    by itself.
    """

    is_traced = True
    elementwise = ops.reference


class CompiledSync(CompiledLocalSync):
    """Several ranks in a call that torch.compile traces: no sizes are agreed upon, and headers are constants."""

    def __init__(self, communicator: Communicator, kind: str, shared: SharedOptions, input: Tensor) -> None:
        name = getattr(communicator, "name", None)
        note_compilation(name, kind, input.device.type, *shared)
        self.communicator, self._record = communicator, RECORDS.get((name or "", input.device.type))
        self._adds_up = adds_up_stats(input, communicator)
        caller = word_of(kind) * ops.WORD
        self._caller = caller + word_of_options(shared, 0)
        self._fingerprint = checksum(caller + word_of_options(shared, 1), 0, 0) & exact_bits(communicator.size)

    def header(self) -> tuple[int | None, int]:
        return self._caller, 0

    def gather(self, packed: Tensor, number: int, counter: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        fault = None if self._record is None else self._record.tensor
        if self._adds_up:
            return ops.add_up_stats(packed, self.communicator.size, self.communicator.all_reduce), fault
        return self.communicator.all_gather(packed), fault

    def fingerprint(self, number: int) -> int | None:
        return self._fingerprint

    def all_reduce(self, sums: Tensor, number: int) -> tuple[Any, ...]:
        # Sums of other calls become NaN, with no note of it: a graph that keeps for backward what each forward may
        # write to could not run two forwards before the backward of the first.
        return self.communicator.all_reduce(sums), self.communicator.size

    def total(self, packed: Tensor, number: int) -> Tensor:
        return self.communicator.all_reduce(packed)


LOCAL_SYNC = LocalSync()
COMPILED_LOCAL_SYNC = CompiledLocalSync()
FIXED_STATISTICS = LocalSync()
"""Statistics that are constants: no gradient passes through them."""

Sync: TypeAlias = RankSync | LocalSync


def sync_of(
    layer: nn.Module | None, input: Tensor, options: Options, buffers: ops.Buffers, communicator: Communicator
) -> Sync:
    """Returns the strategy of a training call of ``layer`` with the ranks of ``communicator``."""
    if communicator.size == 1:
        if not torch.compiler.is_compiling():
            return LOCAL_SYNC
        as_number(input.size(1))  # the graph is for this number of channels: no symbol for it reaches backward
        return COMPILED_LOCAL_SYNC
    if torch.compiler.is_compiling():
        shared = shared_options(layer, input, options, buffers)
        return CompiledSync(communicator, kind_of(layer), shared, input)
    history = history_in(communicator)
    signature = signature_of(layer, input, options, buffers, communicator, history.number_of)
    # A tensor without values has no record.
    record = record_of(history.name, input.device.type) if type(input) is Tensor else None
    return RankSync(signature, record, communicator, history)


def sum_over_ranks(packed: Tensor, communicator: Communicator, what: str, module: nn.Module, details: str) -> Tensor:
    """Returns the sum of ``packed`` (n), in float64, over the ranks of ``communicator``: the same bits on all of them.

    It belongs to no layer. Ranks compare and name this message like the messages of layers.

    Args:
        packed: on the device of this rank's messages.
        communicator: the ranks, which all make the call.
        what: what it is for, and ``module``, for which model: what errors call it.
        details: what else must be the same on all ranks.

    Raises:
        RuntimeError: the ranks make other calls, or with other models or details; or the collective failed.
    """
    if communicator.size == 1:
        return packed
    history = history_in(communicator)
    number = history.number_of(module, f"{what} of {type(module).__name__}")
    model = f"{type(module).__name__} #{number}" if number > 1 else type(module).__name__
    counted, text = torch.cat([packed, packed.new_ones(1)]), f"{what} of {model} ({details})"
    kind, message = word_of(f"{what} of {model}"), (True, counted.numel() + ops.PARTS, torch.float64)
    signature = CallSignature((kind, word_of(text)), kind, text, message, False)
    total = RankSync(signature, None, communicator, history).total(counted, history.number)
    total, ranks = total.tensor_split([-1])
    if ranks.item() != communicator.size:  # where nothing waited for the comparison of headers, as on CUDA
        raise RuntimeError(differ_text([f"this rank: {what} of {model}", "another rank: another call"]))
    return total
