"""Exchanges beside that of eager ranks: one rank, and a graph of torch.compile; and which one a call has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import ops
from ..communicators import LOCAL, Communicator
from ..options import Options
from .faults import RECORDS, record_of
from .history import history_in, note_compilation
from .protocol import Agreement, RankExchange
from .signatures import (
    ALL_BITS,
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


class Exchange(Protocol):
    """Messages of one call of a layer, and what the ops need to compare the ranks by."""

    @property
    def communicator(self) -> Communicator:
        """The ranks."""

    @property
    def is_traced(self) -> bool:
        """Whether torch.compile traces the call."""

    @property
    def header(self) -> tuple[int | None, int]:
        """Caller and number of the call, which ``batch_norm_stats`` writes into the row."""

    @property
    def adds_up(self) -> bool:
        """Whether ranks send what adds up, as in large groups; the caller is then a fingerprint of both."""

    def gather(self, row: Tensor, counter: Tensor | None = None) -> tuple[Any, ...]:
        """Returns the rows of all ranks, or their sum, and the arguments by which ``merge_stats`` compares the ranks.

        ``counter`` must be equal on all ranks too.
        """

    def fingerprint(self) -> int | None:
        """Returns the number that ``batch_norm_backward_reduce`` writes into the sums."""

    def sum(self, sums: Tensor) -> tuple[Any, ...]:
        """Returns the sums of all ranks, and the arguments by which ``batch_norm_backward_elemt`` compares them."""

    def check(self, rows: Tensor | None = None, counter: Tensor | None = None) -> None:
        """Raises RuntimeError if the op before it has found that the ranks differ, in ``rows`` or else in sums."""

    def total(self, values: Tensor) -> Tensor:
        """Returns the sum over ranks of ``values`` (n): for derivatives of any order."""


class LocalExchange:
    """The exchange of a group of one: its rows and sums are this rank's."""

    communicator: Communicator = LOCAL
    is_traced = False
    header: tuple[int | None, int] = (None, 0)
    adds_up = False

    def gather(self, row: Tensor, counter: Tensor | None = None) -> tuple[Any, ...]:
        return (row.unsqueeze(0),)

    def fingerprint(self) -> int | None:
        return None

    def sum(self, sums: Tensor) -> tuple[Any, ...]:
        return (sums,)

    def check(self, rows: Tensor | None = None, counter: Tensor | None = None) -> None:
        pass

    def total(self, values: Tensor) -> Tensor:
        return values


class CompiledExchange(LocalExchange):
    """Exchange in a graph of torch.compile: no sizes are agreed upon, and headers are constants."""

    is_traced = True

    def __init__(
        self, communicator: Communicator, layer: nn.Module | None, input: Tensor, options: Options, buffers: ops.Buffers
    ) -> None:
        self.communicator = communicator
        if communicator.size == 1:
            as_number(input.size(1))  # the graph is for this number of channels: no symbol for it reaches backward
            return
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
        if self.communicator.size == 1:
            return super().gather(row)
        if self.adds_up:
            return self.communicator.all_reduce(row), self.communicator.size, self._fault, -self._caller
        return self.communicator.all_gather(row), 1, self._fault

    def fingerprint(self) -> int | None:
        return None if self.communicator.size == 1 else self._fingerprint

    def sum(self, sums: Tensor) -> tuple[Any, ...]:
        # Sums of other calls become NaN, with no note of it: a graph that keeps for backward what each forward may
        # write to could not run two forwards before the backward of the first.
        return self.communicator.all_reduce(sums), self.communicator.size

    def total(self, values: Tensor) -> Tensor:
        return self.communicator.all_reduce(values)


LOCAL_EXCHANGE = LocalExchange()


def exchange_of(
    layer: nn.Module | None, input: Tensor, options: Options, buffers: ops.Buffers, communicator: Communicator
) -> Callable[[], Exchange]:
    """Returns what makes the exchange of a training call, and of each later one with the same facts."""
    if torch.compiler.is_compiling():
        exchange = CompiledExchange(communicator, layer, input, options, buffers)
        return lambda: exchange
    if communicator.size == 1:
        return lambda: LOCAL_EXCHANGE
    history = history_in(communicator)
    signature = signature_of(layer, input, options, buffers, communicator, history.number_of)
    # A tensor without values has no record.
    record = record_of(history.name, input.device.type) if type(input) is Tensor else None
    return partial(RankExchange, Agreement(signature, record, communicator, history, exact_bits(communicator.size)))
