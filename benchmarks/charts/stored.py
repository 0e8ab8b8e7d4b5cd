"""Bytes stored for the backward pass, of each network: plain, with fused activations and with recomputed outputs."""

from typing import Any

from ..core.cases import of_section
from ..core.machine import where
from .picture import Picture

_VARIANTS = {
    "plain": ("torch's layers", "muted"),
    "fused": ("fuse_activations", "sky"),
    "recomputed": ("recompute_outputs too", "blue"),
}


def draw(results: dict[str, Any]) -> Picture | None:
    cases = [case for case in of_section(results, "stored") if "bytes" in case]
    if not cases:
        return None
    picture = Picture("Stored for the backward pass", where(results))
    picture.legend([(style, name) for name, style in _VARIANTS.values()])
    for case in cases:
        stored = case["bytes"]
        shares = {variant: stored[variant] / stored["plain"] for variant in _VARIANTS}
        values = [(style, shares[variant], f"{shares[variant]:.0%}") for variant, (_, style) in _VARIANTS.items()]
        picture.bars(case["network"], values, 1)
    return picture
