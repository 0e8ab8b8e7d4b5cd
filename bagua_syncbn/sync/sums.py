"""Sums over ranks that belong to no layer: one message of any size, which ranks compare and name as they do calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..communicators import Communicator
from .faults import differ_text
from .history import history_in
from .protocol import RankSync
from .signatures import WORD, CallSignature, exact_bits, word_of


def sum_over_ranks(packed: Tensor, communicator: Communicator, what: str, module: nn.Module, details: str) -> Tensor:
    """Returns the sum of ``packed`` (n), in float64, over the ranks of ``communicator``: the same bits on all of them.

    Args:
        packed: on the device of this rank's messages.
        communicator: the ranks, which all make the call.
        what: what it is for, and ``module``, for which model: what errors call it.
        details: what all ranks have alike beside it.

    Raises:
        RuntimeError: the ranks make other calls, or with other models or details; or the collective failed.
    """
    if communicator.size == 1:
        return packed
    history = history_in(communicator)
    number = history.number_of(module, f"{what} of {type(module).__name__}")
    model = f"{type(module).__name__} #{number}" if number > 1 else type(module).__name__
    counted = torch.cat([packed, packed.new_ones(1)])
    sync = _SumSync(_SumSignature(f"{what} of {model}", details, counted.numel()), communicator)
    total, ranks = sync.total(counted, history.number).tensor_split([-1])
    if ranks.item() != communicator.size:  # on devices for whose results no host waits elsewhere
        raise RuntimeError(differ_text([f"this rank: {what} of {model}", "another rank: another call"]))
    return total


class _SumSignature(CallSignature):
    __slots__ = ()

    def __init__(self, what: str, details: str, numel: int) -> None:
        self.text = f"{what} ({details})"
        self.is_backward = False
        self.message = True, numel + ops.PARTS, torch.float64
        self.key = word_of(what), word_of(self.text)
        self.speaker = self.compiled_speaker = self.key[0] * WORD + self.key[1]
        self.kind = self.key[0]
        self.backward = self.derivative = self


class _SumSync(RankSync):
    """The messages of a sum. Its options are in its signature, and its faults are seen at once."""

    __slots__ = ()

    def __init__(self, signature: CallSignature, communicator: Communicator) -> None:
        self._history, self._signature, self._record = history_in(communicator), signature, None
        self._exact_bits, self.communicator = exact_bits(communicator.size), communicator
