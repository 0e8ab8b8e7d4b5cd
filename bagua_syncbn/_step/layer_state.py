"""State that other modules attach to a layer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from .._groups import EVERYONE, GroupSpec, spec_in_file
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

    def __post_init__(self) -> None:
        if isinstance(self.group, dict):  # plain data from a file
            self.group = spec_in_file(self.group)
        if type(self.origin) is tuple:
            self.origin = Origin(*self.origin)

    def plain(self) -> dict[str, Any]:
        """Returns the arguments of a copy; pickled, they are plain data."""
        origin = None if self.origin is None else tuple(self.origin)
        return {"group": self.group, "origin": origin, "frozen_mode": self.frozen_mode}

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerState, tuple(self.plain().values())
