"""Merges the ranks' statistics, updates running buffers, applies eps.

``"plus"`` is torch's ``sqrt(var + eps)``; ``"clamp"`` is ``sqrt(max(var, eps))``: no gradient passes through a variance
below eps.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .options import Options

_gather_stats = torch.ops.bagua_syncbn.batch_norm_gather_stats.default


class Buffers(NamedTuple):
    """Buffers that a call updates."""

    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    num_batches_tracked: Tensor | None = None


NO_BUFFERS = Buffers()


def merge_stats(
    gathered: Tensor, buffers: Buffers, options: Options, ranks: int = 1, fault: Tensor | None = None, call: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls ``batch_norm_gather_stats`` with the eps mode of ``options`` and a counter of any dtype."""
    running_mean, running_var, counter = buffers
    if counter is not None and counter.dtype != torch.int64:  # cast together with its module
        whole = counter.to(torch.int64)
        merged = merge_stats(gathered, buffers._replace(num_batches_tracked=whole), options, ranks, fault, call)
        counter.copy_(whole)
        return merged
    eps, is_clamp = options.eps, options.eps_mode != "plus"
    arguments = gathered, running_mean, running_var, counter, options.momentum, 0.0 if is_clamp else eps, fault
    # Each argument that is passed takes half a microsecond.
    is_plain = ranks == 1 and not options.skip_nonfinite
    merged = _gather_stats(*arguments) if is_plain else _gather_stats(*arguments, options.skip_nonfinite, ranks, call)
    if not is_clamp or not eps:
        return merged
    mean, invstd, count = merged
    return mean, invstd.clamp(max=eps**-0.5), count


@torch.library.custom_op("bagua_syncbn::updated_buffers", mutates_args=())
def _updated_buffers(
    gathered: Tensor, buffers: list[Tensor], momentum: float | None, skip_nonfinite: bool, ranks: int
) -> list[Tensor]:
    updated = Buffers(*(buffer.clone() for buffer in buffers))
    merge_stats(gathered, updated, Options(momentum=momentum, skip_nonfinite=skip_nonfinite), ranks)
    return [buffer for buffer in updated if buffer is not None]


@_updated_buffers.register_fake
def _(gathered: Tensor, buffers: list[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(buffer) for buffer in buffers]


def update_buffers(gathered: Tensor, buffers: Buffers, options: Options, ranks: int) -> None:
    """Updates ``buffers`` like :func:`merge_stats`, in a torch.compile graph.

    The op does not mutate its arguments: inductor would move earlier reads of the buffers behind such an op.
    """
    given = [buffer for buffer in buffers if buffer is not None]
    updated = _updated_buffers(gathered, given, options.momentum, options.skip_nonfinite, ranks)
    for buffer, new in zip(given, updated, strict=True):
        buffer.copy_(new)


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
