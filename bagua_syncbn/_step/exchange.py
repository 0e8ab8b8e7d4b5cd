"""The messages that a call exchanges between ranks."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from .._groups import Communicator
from .._ops import Received

Pass: TypeAlias = Literal["forward", "backward", "derivative"]


class Exchange:
    """Sends the messages of a layer's calls between the ranks of a communicator. This class assumes that all ranks make
    the same calls.
    """

    summed: bool = False
    """True in large groups, where ranks sum their statistics instead of gathering rows."""

    __slots__ = ("communicator",)

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def open(self) -> tuple[int, int | None, int]:
        """Begins a forward. Returns the number of its message in the group (0 if ranks do not count messages), and the
        arguments ``caller`` and ``number`` of ``batch_norm_stats``."""
        return 0, None, 0

    def send(self, packed: Tensor, which: Pass = "forward", number: int = 0) -> Received:
        """Sends ``packed``, and may overwrite it. Returns all ranks' rows in forward (unless ``summed``), else sums.

        ``number`` is the number of the forward's message. Call :meth:`check` after the op that reads the result.
        """
        if which == "forward" and not self.summed:
            return Received(self.communicator.all_gather(packed))
        return Received(self.communicator.all_reduce(packed), self.communicator.size)

    def fingerprint(self, number: int) -> int | None:
        """Returns the fingerprint for ``batch_norm_backward_reduce``. ``number`` is that of the forward."""
        return None

    def check(self, number: int, rows: Tensor | None = None) -> None:
        """Raises RuntimeError if the last op found different headers: in ``rows``, or in sums if ``rows`` is None."""

    def total(self, values: Tensor, number: int) -> Tensor:
        """Returns the sum over ranks of ``values`` (n), for derivatives of any order of the forward ``number``."""
        return self.communicator.all_reduce(values)
