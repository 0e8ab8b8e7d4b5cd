"""``batch_norm_backward_reduce``: the message in backward, and the gradients of weight and bias."""

from torch import Tensor

from . import activations
from .definition import defines, per_channel, reduced_dims
from .elemt import normalized
from .headers import HEADER_SUMS_SIZE, fill, header_sums_of


def _fake(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    fingerprint: int | None = None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    channels, size = input.size(1), 0 if fingerprint is None else HEADER_SUMS_SIZE
    like = mean if weight is None else weight
    return mean.new_empty(2 * channels + size), like.new_empty(channels), like.new_empty(channels)


@defines(_fake, mutates=("grad",))
def batch_norm_backward_reduce(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    fingerprint: int | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    parameter: float = 0.0,
    grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    sums, grad_weight, grad_bias = _fake(grad_output, input, mean, invstd, weight, fingerprint)
    channels, dims, values = input.size(1), reduced_dims(input), header_sums_of(fingerprint)
    sum_dy, sum_dy_xmu, header_sums = sums.split([channels, channels, len(values)])
    fill(header_sums, values)
    dy = grad_output.to(mean.dtype)
    if activation:
        dy = activations.gradient(dy, normalized(input, weight, bias, mean, invstd, residual), activation, parameter)
    if grad is not None:
        grad.copy_(dy)
    sum_dy.copy_(dy.sum(dims))
    sum_dy_xmu.copy_((dy * (input - per_channel(mean, input))).sum(dims))
    # Copies: the gradients must not share memory with the sums, which are reduced in place.
    return sums, grad_weight.copy_(sum_dy_xmu * invstd), grad_bias.copy_(sum_dy)
