"""Options of a call.

Layers store options as attributes, ranks compare all options except the activation, and cache keys contain them. A new
option is a field here, an attribute and argument of the layer, and an argument of
:func:`~bagua_syncbn.sync_batch_norm`.
"""

from typing import Any, NamedTuple


class Options(NamedTuple):
    """Options except tensors, see :func:`~bagua_syncbn.sync_batch_norm`."""

    eps: float = 1e-5
    momentum: float | None = 0.1
    eps_mode: str = "plus"
    skip_nonfinite: bool = False
    activation: Any = None  # an Activation once the call is checked
