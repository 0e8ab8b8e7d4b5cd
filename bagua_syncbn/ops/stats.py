"""``batch_norm_stats``: what a rank sends forward."""

import torch
from torch import Tensor

from .definition import accumulate_dtype, defines, implement, per_channel, reduced_dims
from .headers import HEADER_SIZE, HEADER_SUMS_SIZE, WORD, fill, header_of, header_sums_of
from .masking import of_positions
from .moments import Moments


def _shapes(
    input: Tensor, caller: int | None = None, call: int = 0, mask: Tensor | None = None, summable: bool = False
) -> Tensor:
    if summable:
        return input.new_empty(2 * input.size(1) + 1 + HEADER_SUMS_SIZE, dtype=torch.float64)
    header = 0 if caller is None else HEADER_SIZE
    return input.new_empty(2 * input.size(1) + 2 + header, dtype=accumulate_dtype(input.dtype))


def summable_stats(row: Tensor, fingerprint: int | None) -> Tensor:
    """Returns the summable form of a ``row`` of statistics without a header."""
    header_sums = row.new_empty(HEADER_SUMS_SIZE, dtype=torch.float64)
    fill(header_sums, header_sums_of(fingerprint or 0))
    return torch.cat([Moments.of_row(row.double()).as_sums(), header_sums])


@defines(
    "batch_norm_stats(Tensor input, int? caller=None, int call=0, Tensor? mask=None, bool summable=False) -> Tensor",
    _shapes,
)
def batch_norm_stats(
    input: Tensor, caller: int | None = None, call: int = 0, mask: Tensor | None = None, summable: bool = False
) -> Tensor:
    if summable:
        return summable_stats(batch_norm_stats(input, mask=mask), caller)
    input = input.detach()
    packed, channels = _shapes(input, caller).zero_(), input.size(1)
    mean, var, low, high, header = packed.split([channels, channels, 1, 1, packed.numel() - 2 * channels - 2])
    fill(header, header_of(caller, call))
    if mask is not None:
        _masked_stats(input, mask, mean, var, low, high)
        return packed
    count = input.numel() // channels if channels else 0
    if count:
        # var_mean is Welford's algorithm: it survives a mean that is large beside the deviation.
        moments = torch.var_mean(input.to(packed.dtype), reduced_dims(input), correction=0)
        var.copy_(moments[0])
        mean.copy_(moments[1])
    fill(packed[2 * channels :][:2], [count % WORD, count // WORD])
    return packed


# Statistics take part in no graph: without this, autograd would look for a derivative in each call.
implement("batch_norm_stats", torch.library.fallthrough_kernel, "Autograd")


def _masked_stats(input: Tensor, mask: Tensor, mean: Tensor, var: Tensor, low: Tensor, high: Tensor) -> None:
    inside = of_positions(mask, input)
    count = inside.expand(input.size(0), 1, *input.shape[2:]).sum()
    number = count.clamp(min=1).to(mean.dtype)

    def average(values: Tensor) -> Tensor:
        return values.where(inside, 0).sum(reduced_dims(input)) / number

    wide = input.to(mean.dtype)
    center = average(wide)
    deviation = wide - per_channel(center, input)
    shift = average(deviation)  # what rounding has left
    mean.copy_(center + shift)
    var.copy_(average(deviation.square()) - shift.square())
    low.copy_(count % WORD)
    high.copy_(count // WORD)
