"""``batch_norm_elemt``: normalization, residual and activation."""

import torch
from torch import Tensor

from . import activations
from .definition import defines, like_input, per_channel


def normalized(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    """Returns the activation's input, in the dtype of ``mean`` (float32 for half ``input``)."""
    scale = invstd if weight is None else invstd * weight
    # Subtract first: (x * scale) + (bias - mean * scale) cancels badly if the mean is large compared to the deviation.
    z = (input - per_channel(mean, input)).mul_(per_channel(scale, input))
    z = z if bias is None else z.add_(per_channel(bias, input))
    return z if residual is None else z.add_(residual)


@defines(lambda input, *_: torch.empty_like(input))
def batch_norm_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    residual: Tensor | None = None,
    activation: int = 0,
    parameter: float = 0.0,
) -> Tensor:
    output = normalized(input, weight, bias, mean, invstd, residual)
    if activation:
        output = activations.value(output, activation, parameter)
    return like_input(input, output)
