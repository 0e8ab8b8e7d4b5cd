"""A value of every option, for tests of all options."""

from typing import Any

from bagua_syncbn._ops.options import Options

OTHER = Options(
    eps=0.5,
    momentum=0.3,
    eps_mode="clamp",
    skip_nonfinite=True,
    activation=("leaky_relu", 0.2),
)
"""Differs from the default in every option."""

UNLIKE_TORCH = {
    name: value for name, value in OTHER._asdict().items() if name not in ("eps", "momentum", "skip_nonfinite")
}


def attributes(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a layer for arguments of its class."""
    return {"fused_activation" if name == "activation" else name: value for name, value in options.items()}
