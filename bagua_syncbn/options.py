"""Options of a call, in one record.

A layer holds its options as attributes, ranks compare all but the activation, and cached calls have them in their key.
A new option is a field here, an attribute and an argument of the layer, and an argument of
:func:`~bagua_syncbn.sync_batch_norm`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

# Input, weight, bias and residual of a call.
Tensors: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]

# mask, lengths and zero_masked of a call; or a function that returns the checked masking for an input.
Masks: TypeAlias = tuple[Tensor | None, Tensor | None, bool]
GivenMasks: TypeAlias = Masks | Callable[[Tensor], Any]

NO_MASKS: Masks = None, None, False


class Options(NamedTuple):
    """Options of a call, beside its tensors. :func:`~bagua_syncbn.sync_batch_norm` explains each."""

    eps: float = 1e-5
    momentum: float | None = 0.1
    eps_mode: str = "plus"
    skip_nonfinite: bool = False
    activation: Any = None  # an Activation after the checks of a call; before them, a name or module for one


EPS_MODES = ("plus", "clamp")

# The activation has a name of its own, since a converted layer may have a module named "activation".
ATTRIBUTES = ("eps", "momentum", "eps_mode", "skip_nonfinite", "fused_activation")
"""Names of the attributes of a layer that hold its options, in the order of the fields."""
