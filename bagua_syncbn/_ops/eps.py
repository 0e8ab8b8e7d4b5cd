"""Applies eps to variances.

``"plus"`` is torch's ``sqrt(var + eps)``; ``"clamp"`` is ``sqrt(max(var, eps))``: no gradient passes through a variance
below eps.
"""

from torch import Tensor

from .options import Options


def inverse_deviation(var: Tensor, options: Options) -> Tensor:
    """Returns the inverse deviation (C) for the variance ``var`` (C)."""
    return (var.clamp(min=options.eps) if options.eps_mode == "clamp" else var + options.eps).rsqrt()


def is_clamped(invstd: Tensor, options: Options) -> Tensor | None:
    """Returns a mask (C) of the channels where ``eps`` replaces the variance; None if there are none."""
    if options.eps_mode == "plus" or not options.eps:
        return None
    limit: float = options.eps**-0.5
    return invstd >= limit


def clear_clamped(sums: Tensor, invstd: Tensor, options: Options) -> None:
    """Sets ``sum_dy_xmu`` in ``sums`` (2C + K) to 0 where ``eps`` replaces the variance."""
    clamped = is_clamped(invstd, options)
    if clamped is not None:
        sums[clamped.numel() : 2 * clamped.numel()].masked_fill_(clamped, 0)
