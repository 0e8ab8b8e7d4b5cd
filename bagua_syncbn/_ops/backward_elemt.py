"""``batch_norm_backward_elemt``: the gradient of the input, from the sums over all ranks."""

import torch
from torch import Tensor

from . import activations
from .definition import defines, like_input, per_channel
from .elemt import normalized
from .headers import headers_differ, record_sums


def means_of_sums(
    sums: Tensor, channels: int, count: Tensor, ranks: int, fault: Tensor | None, number: int
) -> tuple[Tensor, Tensor]:
    """Returns the means of ``dy`` and ``dy * xmu`` (C) over the values of all ranks.

    If the ranks' headers differ, ``fault`` records it and the means are NaN.
    """
    sums, header_sums = sums.tensor_split([2 * channels])
    if header_sums.numel():
        differ = headers_differ(header_sums, ranks)
        sums = sums.masked_fill(differ, torch.nan)
        record_sums(fault, differ, number)
    mean_dy, mean_dy_xmu = (sums / count).chunk(2)
    return mean_dy, mean_dy_xmu


def _fake(grad_output: Tensor, input: Tensor, *_: object, grad_input: Tensor | None = None) -> Tensor:
    return torch.empty_like(input) if grad_input is None else input.new_empty(0)


@defines(_fake, mutates=("fault", "grad_input"))
def batch_norm_backward_elemt(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor,
    count: Tensor,
    ranks: int = 1,
    fault: Tensor | None = None,
    number: int = 0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    activation: int = 0,
    parameter: float = 0.0,
    *,
    grad_input: Tensor | None = None,
) -> Tensor:
    if mask is not None and activation:
        raise RuntimeError("mask: expected None with an activation, got a tensor")
    dy = grad_output
    if activation:
        z = normalized(input, weight, bias, mean, invstd)
        dy = activations.gradient(dy.to(z.dtype), z, activation, parameter)
    mean_dy, mean_dy_xmu = means_of_sums(sums, input.size(1), count, ranks, fault, number)
    scale = per_channel(invstd if weight is None else invstd * weight, input)
    projected = (input - per_channel(mean, input)).mul_(per_channel(invstd.square() * mean_dy_xmu, input))
    dx = (dy - per_channel(mean_dy, input)).sub_(projected).mul_(scale)
    if mask is not None:
        dx = dx.where(mask.unsqueeze(1), dy * scale)
    if grad_input is None:
        return like_input(input, dx)
    grad_input.copy_(dx)
    return input.new_empty(0)
