"""The messages that a call exchanges between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from .._groups import Communicator
from .._ops.options import Options
from .._registry import Registry
from .._torch.autograd import as_number

if TYPE_CHECKING:
    from .call import Call

Pass: TypeAlias = Literal["forward", "backward", "derivative"]

# The message (one row per rank, or the sum over ranks), and the next op's arguments for comparing headers: number of
# ranks in a sum, fault record (see :mod:`bagua_syncbn._ops`), call number.
Received: TypeAlias = tuple[Tensor, int, Tensor | None, int]


class Exchange:
    """Sends the messages of a call between the ranks of a communicator. This class assumes that all ranks make the same
    call.

    Args:
        communicator: the ranks.
        is_traced: whether torch.compile traces the call.
    """

    # Caller and number of the call, which batch_norm_stats writes into the row.
    header: tuple[int | None, int] = (None, 0)

    # True in large groups, where ranks send summable statistics. In that case, the caller is a fingerprint of the whole
    # header.
    summable: bool = False

    __slots__ = ("communicator", "is_traced")

    def __init__(self, communicator: Communicator, is_traced: bool = False) -> None:
        self.communicator = communicator
        self.is_traced = is_traced

    def send(self, packed: Tensor, which: Pass = "forward") -> Received:
        """Returns all ranks' rows in a forward that is not ``summable``; otherwise the sum. May overwrite ``packed``.

        Call :meth:`check` after the op that reads the result.
        """
        if which == "forward" and not self.summable:
            return self.communicator.all_gather(packed), 1, None, 0
        return self.communicator.all_reduce(packed), self.communicator.size, None, 0

    def fingerprint(self) -> int | None:
        """Returns the fingerprint that ``batch_norm_backward_reduce`` writes into the sums."""
        return None

    def check(self, rows: Tensor | None = None) -> None:
        """Raises RuntimeError if the last op found different headers, in ``rows`` or else in sums."""

    def total(self, values: Tensor) -> Tensor:
        """Returns the sum over ranks of ``values`` (n), for derivatives of any order."""
        return self.communicator.all_reduce(values)


exchange_makers: Registry[Callable[[Call, Options, Communicator], Callable[[], Exchange]]] = Registry()
"""Functions like :func:`exchange_of`. The last one serves all groups of several ranks."""


def exchange_of(call: Call, options: Options, communicator: Communicator) -> Callable[[], Exchange]:
    """Returns a function that creates the exchange for ``call``, and for later calls with the same cache key."""
    if communicator.size > 1 and exchange_makers:
        return exchange_makers[-1](call, options, communicator)
    is_traced = torch.compiler.is_compiling()
    if is_traced:
        as_number(call.input.size(1))  # makes the size a constant: backward cannot take a symbolic size
    exchange = Exchange(communicator, is_traced)
    return lambda: exchange
