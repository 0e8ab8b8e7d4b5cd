"""Exchanges: the messages of a call, and the seam between the step and the ways in which ranks communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..groups import Communicator
from ..options import Options
from ..torch_internals.autograd import as_number


class Exchange:
    """Messages of one call over the ranks of a communicator, which are trusted to make the same call.

    Args:
        communicator: the ranks.
        is_traced: whether torch.compile traces the call.
    """

    # Caller and number of the call, which batch_norm_stats writes into the row.
    header: tuple[int | None, int] = (None, 0)

    # Whether ranks send what adds up, as in large groups; the caller is then a fingerprint of both.
    adds_up: bool = False

    __slots__ = ("communicator", "is_traced")

    def __init__(self, communicator: Communicator, is_traced: bool = False) -> None:
        self.communicator = communicator
        self.is_traced = is_traced

    def gather(self, row: Tensor, counter: Tensor | None = None) -> tuple[Any, ...]:
        """Returns the rows of all ranks, or their sum, and the arguments by which ``merge_stats`` compares the ranks.

        ``counter`` must be equal on all ranks too. :meth:`check` goes after the op.
        """
        return (self.communicator.all_gather(row),)

    def fingerprint(self) -> int | None:
        """Returns the number that ``batch_norm_backward_reduce`` writes into the sums."""
        return None

    def sum(self, sums: Tensor) -> tuple[Any, ...]:
        """Returns the sums of all ranks, and the arguments by which ``batch_norm_backward_elemt`` compares them.

        :meth:`check` goes after the op.
        """
        return (self.communicator.all_reduce(sums),)

    def check(self, rows: Tensor | None = None, counter: Tensor | None = None) -> None:
        """Raises RuntimeError if the op before it has found that the ranks differ, in ``rows`` or else in sums."""

    def total(self, values: Tensor) -> Tensor:
        """Returns the sum over ranks of ``values`` (n): for derivatives of any order."""
        return self.communicator.all_reduce(values)


# Makers of exchanges that do more, set by others. Each takes what exchange_of does, and returns None for a call that it
# does not serve.
EXCHANGES: list[Callable[..., Callable[[], Exchange] | None]] = []


def exchange_of(
    layer: nn.Module | None, input: Tensor, options: Options, buffers: ops.Buffers, communicator: Communicator
) -> Callable[[], Exchange]:
    """Returns what makes the exchange of a training call, and of each later one with the same facts."""
    if communicator.size > 1:
        for make in EXCHANGES:
            found = make(layer, input, options, buffers, communicator)
            if found is not None:
                return found
    is_traced = torch.compiler.is_compiling()
    if is_traced:
        as_number(input.size(1))  # the graph is for this number of channels: no symbol for it reaches backward
    exchange = Exchange(communicator, is_traced)
    return lambda: exchange
