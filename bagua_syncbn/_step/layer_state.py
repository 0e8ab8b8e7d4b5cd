"""State that other modules attach to a layer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from .._groups import EVERYONE, GroupSpec
from .._names import Origin
from .._ops.options import Options
from .call import Call
from .exchange import Exchange

# Wraps a layer's calls: called with the next function in the chain (``batch_norm`` is last) and its argument.
Attachment: TypeAlias = Callable[[Callable[[Call], Tensor], Call], Tensor]

_T = TypeVar("_T")


class CallCache(NamedTuple):
    """Results of call checks. Calls with the same key pass all checks except value checks."""

    key: tuple[Any, ...] | None
    options: Options
    exchange: Exchange | None
    """The exchange if the call uses batch statistics; None for running statistics."""
    single_rank: bool = False
    """True for batch statistics in a single-rank group."""


@dataclass(slots=True)
class LayerState:
    """State that other modules attach to a layer. Copies and files keep the first three fields."""

    group: GroupSpec = EVERYONE
    """Ranks to synchronize with."""
    origin: Origin | None = None
    """Place of the layer in a converted model."""
    frozen_mode: bool | None = None
    """Last requested mode of a layer that freeze_statistics keeps in evaluation; None for other layers."""
    attachments: tuple[Attachment, ...] = ()
    """Wrappers of each call, outermost last."""
    caches: dict[tuple[bool, int], CallCache] = field(default_factory=dict)
    """Cached calls: synchronized or not, by number of channels. Replicas share them."""

    def attached(self, kind: type[_T]) -> _T | None:
        """Returns an attachment of class ``kind``, or None."""
        return next((attachment for attachment in self.attachments if isinstance(attachment, kind)), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerState, (self.group, self.origin, self.frozen_mode)
