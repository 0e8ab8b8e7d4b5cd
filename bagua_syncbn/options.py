"""Options of a call.

Layers store them as attributes, ranks compare all except the activation, and cache keys contain
them. A new option is a field here, an attribute and argument of the layer, and an argument of
:func:`~bagua_syncbn.sync_batch_norm`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

# Input, weight, bias and residual of a call.
Tensors: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]

# mask and zero_masked of a call; or a function that returns the checked masking for an input.
GivenMask: TypeAlias = tuple[Tensor | None, bool] | Callable[[Tensor], Any]

NO_MASK: GivenMask = None, False


class Options(NamedTuple):
    """Options except tensors, see :func:`~bagua_syncbn.sync_batch_norm`."""

    eps: float = 1e-5
    momentum: float | None = 0.1
    eps_mode: str = "plus"
    skip_nonfinite: bool = False
    activation: Any = None  # an Activation once the call is checked
