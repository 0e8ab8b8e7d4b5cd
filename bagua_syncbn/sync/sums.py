"""Sums over ranks that belong to no layer: one message of any size, which ranks compare and name as they do calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..communicators import Communicator
from .faults import differ_text
from .history import history_in
from .protocol import RankSync
from .signatures import CallSignature, word_of


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
    counted, text = torch.cat([packed, packed.new_ones(1)]), f"{what} of {model} ({details})"
    kind, message = word_of(f"{what} of {model}"), (True, counted.numel() + ops.PARTS, torch.float64)
    sync = RankSync(CallSignature((kind, word_of(text)), kind, text, message, False), None, communicator)
    total, ranks = sync.total(counted, history.number).tensor_split([-1])
    if ranks.item() != communicator.size:  # on devices for whose results no host waits elsewhere
        raise RuntimeError(differ_text([f"this rank: {what} of {model}", "another rank: another call"]))
    return total
