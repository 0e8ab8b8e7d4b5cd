"""The ops with an activation on CUDA: by the kernels without, and torch's activations.

The native library has such kernels for CPU. Here what is activated is a tensor while the op runs, in the dtype of the
input, and nothing more is stored between forward and backward.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import activations
from .schemas import library

_ops = torch.ops.bagua_syncbn


def batch_norm_act_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    residual: Tensor | None,
    activation: int,
    parameter: float,
) -> Tensor:
    z = _ops.batch_norm_elemt(input, weight, bias, mean, invstd)
    output = activations.value(z if residual is None else z.add_(residual), activation, parameter)
    return _laid_out_as(input, output)


def batch_norm_act_backward_reduce(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
    parameter: float,
    words: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z = batch_norm_act_elemt(input, weight, bias, mean, invstd, residual, 0, 0.0)
    grad = _laid_out_as(input, activations.gradient(grad_output, z, activation, parameter))
    return *_ops.batch_norm_backward_reduce(grad, input, mean, invstd, weight, words), grad


def _laid_out_as(input: Tensor, result: Tensor) -> Tensor:
    expected = torch.empty_like(input, device="meta").stride()
    return result if result.stride() == expected else torch.empty_like(input).copy_(result)


for _kernel in (batch_norm_act_elemt, batch_norm_act_backward_reduce):
    library.impl(_kernel.__name__, _kernel, "CUDA")
