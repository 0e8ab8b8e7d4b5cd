"""Options of a call.

Layers store options as attributes, ranks compare all options except the activation, and keys of steps contain them. A
new option is a field here, read in :func:`options_of`; an attribute and argument of the layer; and an argument of
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


DEFAULTS = {"fused_activation" if name == "activation" else name: value for name, value in Options()._asdict().items()}
"""Default of each option, by attribute of a layer."""


# Those that F.batch_norm lacks and that change evaluation.
_BEYOND_TORCH = {name: value for name, value in DEFAULTS.items() if name not in ("eps", "momentum", "skip_nonfinite")}


def options_of(layer: Any) -> Options:
    """Returns the options of ``layer`` for a call, not checked."""
    return Options(
        eps=layer.eps,
        momentum=layer.momentum,
        eps_mode=layer.eps_mode,
        skip_nonfinite=layer.skip_nonfinite,
        activation=layer.fused_activation,  # converted classes may have a module named activation
    )


def unlike_torch(layer: Any) -> dict[str, Any]:
    """Returns the options of ``layer`` that F.batch_norm lacks and that change evaluation, by attribute."""
    return {name: value for name, default in _BEYOND_TORCH.items() if (value := getattr(layer, name)) != default}
