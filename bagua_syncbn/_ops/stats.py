"""``batch_norm_stats``: a rank's message in forward."""

import torch
from torch import Tensor

from .definition import accumulate_dtype, defines, library, per_channel, reduced_dims
from .headers import HEADER_SIZE, HEADER_SUMS_SIZE, WORD, fill, header_of, header_sums_of
from .moments import Moments


def _fake(
    input: Tensor, identity: int | None = None, number: int = 0, mask: Tensor | None = None, summed: bool = False
) -> Tensor:
    if summed:
        return input.new_empty(2 * input.size(1) + 1 + HEADER_SUMS_SIZE, dtype=torch.float64)
    header = 0 if identity is None else HEADER_SIZE
    return input.new_empty(2 * input.size(1) + 2 + header, dtype=accumulate_dtype(input.dtype))


def summed_stats(row: Tensor, fingerprint: int | None) -> Tensor:
    """Converts a ``row`` of statistics (without a header) to a message that ranks sum."""
    header_sums = row.new_empty(HEADER_SUMS_SIZE, dtype=torch.float64)
    fill(header_sums, header_sums_of(fingerprint or 0))
    return torch.cat([Moments.of_row(row.double()).as_sums(), header_sums])


@defines(_fake)
def batch_norm_stats(
    input: Tensor, identity: int | None = None, number: int = 0, mask: Tensor | None = None, summed: bool = False
) -> Tensor:
    if summed:
        return summed_stats(batch_norm_stats(input, mask=mask), identity)
    input = input.detach()
    row, channels = _fake(input, identity).zero_(), input.size(1)
    values = input.to(row.dtype)
    count: int | Tensor = input.numel() // max(channels, 1)
    if mask is not None:
        var, mean, count = _masked_moments(values, mask.unsqueeze(1))
        row[: 2 * channels] = torch.cat([mean, var])
    elif count:
        # var_mean uses Welford's algorithm, which is exact even for a mean much larger than the deviation.
        var, mean = torch.var_mean(values, reduced_dims(input), correction=0)
        row[: 2 * channels] = torch.cat([mean, var])
    fill(row[2 * channels :], [count % WORD, count // WORD, *header_of(identity, number)])
    return row


# Statistics are outside of the autograd graph. This skips the lookup of a derivative in each call.
library.impl("batch_norm_stats", torch.library.fallthrough_kernel, "Autograd")


def _masked_moments(input: Tensor, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the variance and mean (C) of the positions ``inside``, and their number."""
    count = inside.sum()
    divisor, dims = count.clamp(min=1).to(input.dtype), reduced_dims(input)
    center = input.where(inside, 0).sum(dims) / divisor
    deviation = (input - per_channel(center, input)).where(inside, 0)
    shift = deviation.sum(dims) / divisor  # the rounding error of center
    return deviation.square().sum(dims) / divisor - shift.square(), center + shift, count
