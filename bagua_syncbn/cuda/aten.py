"""ATen's batch norm kernels, those of ``torch.nn.SyncBatchNorm``, for CUDA tensors that no native kernel computes.

Four ops go over the input by them. The reference does the rest: masks, activations and residuals, inputs without
values, and from 2**31 values on, because ATen's kernels count in 32 bits. The sums that they make of planar half inputs
add up products that were rounded to the dtype of the input.

The merge of ranks is the reference's too. ATen's makes NaN of a first rank without samples, takes the variance of a
rank from its inverse deviation, which loses what is small beside ``eps``, divides by 0 where a batch has one value for
each channel, and wants the momentum on the host.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import reference
from ..ops.backward_elemt import means_of_sums
from ..ops.definition import DTYPES, laid_out_as
from ..ops.reference import batch_norm_gather_stats
from ..ops.stats import added_up
from ..ops.words import WORD, fill, parts_of, words_of_row


def _takes(input: Tensor, *values: Tensor | None) -> bool:
    """Whether ATen's kernels take ``input`` (N, C, \\*) and ``values``, each (C) or the gradient of an output.

    ATen reads beyond the memory of some tensors that have other sizes; the reference raises.
    """
    if input.dtype not in DTYPES or not 0 < input.numel() < 2**31:
        return False
    fits = (tuple(input.shape), input.dtype)
    return all(v is None or v.shape == input.shape[1:2] or (tuple(v.shape), v.dtype) == fits for v in values)


def _has_more(options: Sequence[Any]) -> bool:
    """Whether one of ``options``, the last arguments of an op, is given: a tensor, or a number that is not 0."""
    return any(isinstance(option, Tensor) or option for option in options)


def _parameter(values: Tensor | None, like: Tensor) -> Tensor | None:
    """Returns ``values`` (C) in the dtype of ``like``: ATen takes parameters of this dtype or the input's."""
    return None if values is None else values.to(like.dtype).contiguous()


def _tensor_of(numbers: Sequence[int], like: Tensor) -> Tensor:
    values = like.new_empty(len(numbers))
    fill(values, numbers)
    return values


def batch_norm_stats(
    input: Tensor, caller: int | None = None, call: int = 0, mask: Tensor | None = None, adds_up: bool = False
) -> Tensor:
    if mask is not None or not _takes(input):
        return reference.batch_norm_stats(input, caller, call, mask, adds_up)
    if adds_up:
        return added_up(batch_norm_stats(input), caller)
    input = input.detach()
    # The kernels of torch.batch_norm_stats, which would give the inverse deviation; without buffers it moves none.
    mean, var = torch.batch_norm_update_stats(input, None, None, 0.0)
    count = input.numel() // input.size(1)
    numbers = [count % WORD, count // WORD, *words_of_row(caller, call)]
    return torch.cat([mean, var, _tensor_of(numbers, mean)])


def batch_norm_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    *after: Any,
) -> Tensor:
    if _has_more(after) or not _takes(input, weight, bias, mean, invstd):
        return reference.batch_norm_elemt(input, weight, bias, mean, invstd, *after)
    weight, bias = _parameter(weight, mean), _parameter(bias, mean)
    return torch.batch_norm_elemt(input, weight, bias, mean, invstd, 0.0)  # the last is not used


def batch_norm_backward_reduce(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    fingerprint: int | None = None,
    *through: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if _has_more(through) or not _takes(input, grad_output, mean, invstd):
        return reference.batch_norm_backward_reduce(grad_output, input, mean, invstd, weight, fingerprint, *through)
    sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(
        grad_output, input, mean, invstd, None, True, False, False
    )
    sums = torch.cat([sum_dy, sum_dy_xmu, _tensor_of(parts_of(fingerprint), mean)])
    dtype = mean.dtype if weight is None else weight.dtype
    return sums, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


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
    call: int = 0,
    *through: Any,
    grad_input: Tensor | None = None,
) -> Tensor:
    if _has_more(through) or not _takes(input, grad_output, weight, mean, invstd):
        arguments = grad_output, input, weight, mean, invstd, sums, count, ranks, fault, call, *through
        return reference.batch_norm_backward_elemt(*arguments, grad_input=grad_input)
    means = means_of_sums(sums, input.size(1), count, ranks, fault, call)
    # ATen divides sums by a count of 32 bits, which the values of all ranks may exceed: it gets means, and 1.
    one = torch.ones(1, dtype=torch.int32, device=input.device)
    mean, invstd, weight = mean.contiguous(), invstd.contiguous(), _parameter(weight, mean)
    dx = torch.batch_norm_backward_elemt(grad_output, input, mean, invstd, weight, *means, one)
    if grad_input is None:
        return laid_out_as(input, dx)
    grad_input.copy_(dx)
    return dx.new_empty(0)
