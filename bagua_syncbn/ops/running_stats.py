"""The statistics of all ranks together, and the buffers that they move, with the two ways in which eps bounds them.

``"plus"`` is ``sqrt(var + eps)``, torch's; ``"clamp"`` is ``sqrt(max(var, eps))``, with the derivative of ``max``:
where ``eps`` replaces the variance, no gradient passes through it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..options import Options

_gather_stats = torch.ops.bagua_syncbn.batch_norm_gather_stats.default


class Buffers(NamedTuple):
    """The buffers that a call updates."""

    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    num_batches_tracked: Tensor | None = None


NO_BUFFERS = Buffers()


def merge_stats(
    gathered: Tensor, buffers: Buffers, options: Options, ranks: int = 1, fault: Tensor | None = None, call: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls ``batch_norm_gather_stats``, with the arguments by which it compares the ranks, and adapts its result."""
    running_mean, running_var, counter = buffers
    eps = options.eps
    if counter is not None and counter.dtype != torch.int64:  # as in a module that was cast, buffers included
        whole = counter.to(torch.int64)
        merged = merge_stats(gathered, buffers._replace(num_batches_tracked=whole), options, ranks, fault, call)
        counter.copy_(whole)
        return merged
    is_clamp = options.eps_mode != "plus"
    added = 0.0 if is_clamp else eps
    arguments = gathered, running_mean, running_var, counter, options.momentum, added, fault
    # To be given one more argument takes an op half a microsecond.
    is_plain = ranks == 1 and not options.skip_nonfinite
    merged = _gather_stats(*arguments) if is_plain else _gather_stats(*arguments, options.skip_nonfinite, ranks, call)
    if not is_clamp or not eps:
        return merged  # type: ignore[no-any-return]
    mean, invstd, count = merged
    return mean, invstd.clamp(max=eps**-0.5), count


def inverse_deviation(var: Tensor, options: Options) -> Tensor:
    """Returns the factor (C) by which values with the variance ``var`` (C) are normalized."""
    return (var.clamp(min=options.eps) if options.eps_mode == "clamp" else var + options.eps).rsqrt()


def is_clamped(invstd: Tensor, options: Options) -> Tensor | None:
    """Returns in which channels (C) ``eps`` replaces the variance; None for in none."""
    if options.eps_mode == "plus" or not options.eps:
        return None
    limit: float = options.eps**-0.5
    return invstd >= limit


def clear_clamped(sums: Tensor, invstd: Tensor, options: Options) -> None:
    """Sets ``sum_dy_xmu`` of ``sums`` (2C + K), what passes through the variance, to 0 where ``eps`` replaces that."""
    clamped = is_clamped(invstd, options)
    if clamped is not None:
        sums[clamped.numel() : 2 * clamped.numel()].masked_fill_(clamped, 0)
