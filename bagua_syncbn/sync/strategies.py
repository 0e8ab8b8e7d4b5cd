"""The strategies of a step beside ``RankSync``: one rank, statistics that are given, a compiled graph.

A strategy gathers the statistics of all ranks and adds up their sums. Masks, layouts and ops are the step's.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .. import ops
from ..communicators import LOCAL, Communicator
from ..options import Options
from .faults import FaultRecord, record_on
from .protocol import (
    RankSync,
    SharedOptions,
    adds_up_stats,
    call_site,
    compiled_words,
    kind_of,
    note_compilation,
    shared_options,
)


class LocalSync:
    """World size 1: no communication. The names of its methods are those of :class:`RankSync`."""

    communicator: Communicator = LOCAL
    record: FaultRecord | None = None

    def header(self) -> tuple[int, ...]:
        return ()

    def gather(self, packed: Tensor, counter: Tensor | None = None) -> Tensor:
        return packed.unsqueeze(0)

    def check(self, gathered: Tensor, counter: Tensor | None = None) -> None:
        pass

    def fingerprint(self) -> int | None:
        return None

    def all_reduce(self, sums: Tensor) -> Tensor:
        return sums

    def of_sums(self) -> tuple[Any, ...]:
        return ()

    def check_sums(self) -> None:
        pass

    def total(self, packed: Tensor) -> Tensor:
        return packed


class FixedStatistics(LocalSync):
    """Statistics that are constants: no gradient passes through them."""


class CompiledSync(LocalSync):
    """Several ranks in a call that torch.compile traces: no sizes are agreed upon, and headers are constants."""

    def __init__(self, communicator: Communicator, kind: str, shared: SharedOptions, input: Tensor) -> None:
        note_compilation(getattr(communicator, "name", None), kind, *shared.constants())
        self.communicator, self.record = communicator, record_on(input.device)
        self._adds_up = adds_up_stats(input, communicator)
        self._speaker, self._fingerprint = compiled_words(kind, shared, communicator.size)

    def header(self) -> tuple[int, ...]:
        return self._speaker, 0

    def gather(self, packed: Tensor, counter: Tensor | None = None) -> Tensor:
        if self._adds_up:
            return ops.add_up_stats(packed, self.communicator.size, self.communicator.all_reduce)
        return self.communicator.all_gather(packed)

    def fingerprint(self) -> int | None:
        return self._fingerprint

    def all_reduce(self, sums: Tensor) -> Tensor:
        return self.communicator.all_reduce(sums)

    def of_sums(self) -> tuple[Any, ...]:
        # Sums of other calls become NaN, with no note of it: a graph that keeps for backward what each forward may
        # write to could not run two forwards before the backward of the first.
        return (self.communicator.size,)

    def total(self, packed: Tensor) -> Tensor:
        return self.communicator.all_reduce(packed)


LOCAL_SYNC = LocalSync()
FIXED_STATISTICS = FixedStatistics()

Sync: TypeAlias = RankSync | LocalSync


def sync_of(
    layer: nn.Module | None, input: Tensor, options: Options, accumulates: bool, communicator: Communicator
) -> Sync:
    """Returns the strategy of a training call of ``layer`` with the ranks of ``communicator``."""
    if communicator.size == 1:
        return LOCAL_SYNC
    if torch.compiler.is_compiling():
        shared = shared_options(layer, input, options, accumulates)
        return CompiledSync(communicator, kind_of(layer), shared, input)
    return RankSync(call_site(layer, input, options, accumulates, communicator))
