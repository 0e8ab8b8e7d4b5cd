"""Exchanges that compare the ranks: of eager calls, and of a graph of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..groups import Communicator
from ..names import kind_of
from ..options import Options
from ..step.exchange import Exchange
from .faults import RECORDS, record_of
from .history import history_in, note_compilation
from .protocol import Agreement, RankExchange
from .signatures import (
    ALL_BITS,
    adds_up_stats,
    checksum,
    exact_bits,
    shared_options,
    signature_of,
    word_of,
    word_of_options,
)


class CompiledExchange(Exchange):
    """Exchange in a graph of torch.compile: no sizes are agreed upon, and headers are constants."""

    def __init__(
        self, communicator: Communicator, layer: nn.Module | None, input: Tensor, options: Options, buffers: ops.Buffers
    ) -> None:
        super().__init__(communicator, True)
        kind, shared = kind_of(layer), shared_options(layer, input, options, buffers)
        history = note_compilation(getattr(communicator, "name", None), kind, input.device.type, *shared)
        record = RECORDS.get((history, input.device.type))
        self._fault = None if record is None else record.tensor
        self.adds_up = adds_up_stats(input, communicator)
        kind_word = word_of(kind) * ops.WORD
        self._caller = kind_word + word_of_options(shared, 0)
        self.header = checksum(self._caller, 0, 0) & ALL_BITS if self.adds_up else self._caller, 0
        self._fingerprint = checksum(kind_word + word_of_options(shared, 1), 0, 0) & exact_bits(communicator.size)

    def gather(self, row: Tensor, counter: Tensor | None = None) -> tuple[Any, ...]:
        if self.adds_up:
            return self.communicator.all_reduce(row), self.communicator.size, self._fault, -self._caller
        return self.communicator.all_gather(row), 1, self._fault

    def fingerprint(self) -> int:
        return self._fingerprint

    def sum(self, sums: Tensor) -> tuple[Any, ...]:
        # Sums of other calls become NaN, with no note of it: a graph that keeps for backward what each forward may
        # write to could not run two forwards before the backward of the first.
        return self.communicator.all_reduce(sums), self.communicator.size


def compared_exchange(
    layer: nn.Module | None, input: Tensor, options: Options, buffers: ops.Buffers, communicator: Communicator
) -> Callable[[], Exchange]:
    """Returns what makes the exchange of a training call, and of each later one with the same facts."""
    if torch.compiler.is_compiling():
        exchange = CompiledExchange(communicator, layer, input, options, buffers)
        return lambda: exchange
    history = history_in(communicator)
    signature = signature_of(layer, input, options, buffers, communicator, history.number_of)
    # A tensor without values has no record.
    record = record_of(history.name, input.device.type) if type(input) is Tensor else None
    return partial(RankExchange, Agreement(signature, record, communicator, history, exact_bits(communicator.size)))
