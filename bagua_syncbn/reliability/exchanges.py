"""Makes the exchanges that compare the ranks: for eager calls, and for graphs of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .. import ops
from ..groups import Communicator
from ..names import kind_of
from ..options import Options
from ..step.call import Call
from ..step.exchange import Exchange, Received, exchange_makers
from .faults import RECORDS, record_of
from .history import history_in, note_compilation
from .protocol import RankExchange
from .signatures import (
    ALL_BITS,
    checksum,
    exact_bits,
    shared_options,
    signature_of,
    uses_sums,
    word_of,
    word_of_options,
)


class CompiledExchange(Exchange):
    """Exchange in a graph of torch.compile: without probes, and with constant headers."""

    def __init__(self, call: Call, options: Options, communicator: Communicator) -> None:
        super().__init__(communicator, True)
        kind, shared, device_type = kind_of(call.layer), shared_options(call, options), call.input.device.type
        history = note_compilation(getattr(communicator, "name", None), kind, device_type, *shared)
        record = RECORDS.get((history, device_type))
        self._fault = None if record is None else record.tensor
        self.uses_sums = uses_sums(call.input, communicator)
        kind_word = word_of(kind) * ops.WORD
        self._caller = kind_word + word_of_options(shared, 0)
        self.header = checksum(self._caller, 0, 0) & ALL_BITS if self.uses_sums else self._caller, 0
        self._fingerprint = checksum(kind_word + word_of_options(shared, 1), 0, 0) & exact_bits(communicator.size)

    def gather(self, row: Tensor, counter: Tensor | None = None) -> Received:
        if self.uses_sums:
            return Received(self.communicator.all_reduce(row), self.communicator.size, self._fault, -self._caller)
        return Received(self.communicator.all_gather(row), 1, self._fault)

    def fingerprint(self) -> int:
        return self._fingerprint

    def sum(self, sums: Tensor) -> Received:
        # Mismatched sums become NaN and are not recorded: a graph that saves for backward what each forward may write
        # to could not run two forwards before the backward of the first.
        return Received(self.communicator.all_reduce(sums), self.communicator.size)


@exchange_makers.register
def compared_exchange(call: Call, options: Options, communicator: Communicator) -> Callable[[], Exchange]:
    """Returns a function that makes the exchange of ``call``, and of later calls with the same cache key."""
    if torch.compiler.is_compiling():
        exchange = CompiledExchange(call, options, communicator)
        return lambda: exchange
    history = history_in(communicator)
    signature, input = signature_of(call, options, communicator, history.number_of), call.input
    # A tensor without values has no record.
    record = record_of(history.name, input.device.type, history.recent) if type(input) is Tensor else None
    return partial(RankExchange, signature, record, communicator, history)
