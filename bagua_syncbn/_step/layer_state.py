"""State that other modules attach to a layer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from .._groups import EVERYONE, GroupSpec
from .._names import Origin
from .call import Call
from .steps import Step

# Wraps a layer's calls: called with the next function in the chain (``batch_norm`` is last) and its argument.
Attachment: TypeAlias = Callable[[Callable[[Call], Tensor], Call], Tensor]

_T = TypeVar("_T")


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
    steps: dict[tuple[bool, int], Step] = field(default_factory=dict)
    """Steps of the last calls: synchronized or not, by number of channels. Replicas share them."""

    def find(self, kind: type[_T]) -> _T | None:
        """Returns an attachment of class ``kind``, or None."""
        return next((attachment for attachment in self.attachments if isinstance(attachment, kind)), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerState, (self.group, self.origin, self.frozen_mode)
