"""The messages that a call exchanges between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

from torch import Tensor

from .._groups import Communicator
from .._ops import Received

Pass: TypeAlias = Literal["forward", "backward", "derivative"]
_Result = TypeVar("_Result")


class Exchange:
    """Sends the messages of a layer's calls between the ranks of a communicator. This class assumes that all ranks make
    the same calls.
    """

    summed: bool = False
    """True in large groups, where ranks sum their statistics instead of gathering rows."""

    __slots__ = ("communicator",)

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def open(self) -> tuple[int | None, int]:
        """Begins a forward. Returns the arguments ``identity`` and ``number`` of ``batch_norm_stats``.

        ``number`` is also the forward's number in the group; 0 if ranks do not count their messages.
        """
        return None, 0

    def fingerprint(self, number: int) -> int | None:
        """Returns the fingerprint for ``batch_norm_backward_reduce``. ``number`` is that of the forward."""
        return None

    def share(self, packed: Tensor, which: Pass, number: int, read: Callable[..., _Result], *args: Any) -> _Result:
        """Sends ``packed``, which may be overwritten, and returns ``read(received, *args)``.

        Ranks receive all rows in forward (unless ``summed``), otherwise sums. ``number`` is that of the forward.

        Raises:
            RuntimeError: ranks sent different messages, or a rank did not send any.
        """
        if which == "forward" and not self.summed:
            return read(Received(self.communicator.all_gather(packed)), *args)
        return read(Received(self.communicator.all_reduce(packed), self.communicator.size), *args)

    def total(self, values: Tensor, number: int) -> Tensor:
        """Returns the sum over ranks of ``values`` (n). ``number`` is that of the forward whose derivative this is."""
        return self.communicator.all_reduce(values)
