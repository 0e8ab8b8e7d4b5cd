"""The state that other modules attach to a layer, in one record."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from .groups import EVERYONE, GroupSpec
from .names import Origin
from .options import Options
from .step.call import Call
from .step.exchange import Exchange

# Wraps the calls of a layer. Takes the next function, which is ``batch_norm`` in the end, and the call to pass to it.
Attachment: TypeAlias = Callable[[Callable[[Call], Tensor], Call], Tensor]

_T = TypeVar("_T")


class Frozen(NamedTuple):
    """State of a frozen layer that :func:`~bagua_syncbn.unfreeze_statistics` restores."""

    training: bool
    """Mode that was last requested."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters that required gradients."""


class CallCache(NamedTuple):
    """Results of the checks of a call. Calls with the same key have passed all checks except those of values."""

    key: tuple[Any, ...] | None
    options: Options
    exchange: Callable[[], Exchange] | None
    """Makes the exchange of a call with batch statistics; None for a call with running statistics."""
    is_local: bool = False
    """True for batch statistics in a group of one."""


@dataclass(slots=True)
class LayerState:
    """State that other modules attach to a layer. Copies and files keep the first three fields."""

    group: GroupSpec = EVERYONE
    """Ranks to synchronize with."""
    origin: Origin | None = None
    """Place of the layer in a converted model, for messages."""
    frozen: Frozen | None = None
    """Set by freeze_statistics: the layer stays in evaluation, whatever sets its mode."""
    attachments: tuple[Attachment, ...] = ()
    """Wrappers of each call. The last one is the outermost."""
    caches: dict[bool, CallCache] = field(default_factory=dict)
    """Checked calls, by whether they synchronize. Replicas of a layer share them."""

    def attached(self, kind: type[_T]) -> _T | None:
        """Returns the attachment of class ``kind``; None without one."""
        return next((attachment for attachment in self.attachments if isinstance(attachment, kind)), None)

    def attach(self, kind: type[Any], new: Any) -> None:
        """Replaces the attachment of class ``kind`` by ``new``, as the outermost one; None only removes it."""
        others = tuple(attachment for attachment in self.attachments if not isinstance(attachment, kind))
        self.attachments = others if new is None else (*others, new)

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerState, (self.group, self.origin, self.frozen)
