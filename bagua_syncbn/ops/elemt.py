"""``batch_norm_elemt``: the normalization, and what follows it."""

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
    """Returns ``z``, what an activation is given, in the dtype that it is computed in."""
    scale = invstd if weight is None else invstd * weight
    # Subtract first: (x * scale) + (bias - mean * scale) cancels badly where the mean is large beside the deviation.
    z = (input - per_channel(mean, input)).mul_(per_channel(scale, input))
    z = z if bias is None else z.add_(per_channel(bias, input))
    return z if residual is None else z.add_(residual)


def _shapes(input: Tensor, *_: object) -> Tensor:
    return torch.empty_like(input)


@defines(
    "batch_norm_elemt(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, "
    "Tensor? residual=None, int activation=0, float parameter=0.) -> Tensor",
    _shapes,
)
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
