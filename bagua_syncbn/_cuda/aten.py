"""Implements the ops with ATen's batch norm kernels, for CUDA tensors without native kernels.

Four of the five ops use these kernels, as ``torch.nn.SyncBatchNorm`` does. The reference computes all other cases:
masks, activations, residuals, empty inputs, and inputs of 2**31 values or more, since ATen's kernels count in 32 bits.
For planar half inputs, ATen rounds each product in the backward sums to half.

The reference also merges ranks' statistics, because ATen's merge returns NaN if the first rank is empty, recovers a
rank's variance from its inverse deviation (which loses variances that are small compared to ``eps``), divides by 0 for
one value per channel, and takes the momentum from the host.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops import reference
from .._ops.backward_elemt import means_of_sums
from .._ops.definition import DTYPES, laid_out_as
from .._ops.headers import WORD, fill, header_of, header_sums_of
from .._ops.reference import batch_norm_gather_stats
from .._ops.stats import summed_stats


def _takes(options: Sequence[Any], input: Tensor, *values: Tensor | None) -> bool:
    """Returns whether ATen's kernels support a call with ``input`` (N, C, \\*).

    Each of ``values`` must be None, of size (C), or like ``input``; each of ``options`` must be None or 0. For other
    sizes, ATen may read out of bounds, whereas the reference raises an error.
    """
    if input.dtype not in DTYPES or not 0 < input.numel() < 2**31:
        return False
    if any(isinstance(option, Tensor) or option for option in options):
        return False
    fits = (tuple(input.shape), input.dtype)
    return all(v is None or v.shape == input.shape[1:2] or (tuple(v.shape), v.dtype) == fits for v in values)


def _per_channel(like: Tensor, *values: Tensor | None) -> list[Any]:
    """Returns ``values`` (C), contiguous and in the dtype of ``like``: ATen requires this dtype or the input's."""
    return [None if each is None else each.to(like.dtype).contiguous() for each in values]


def _tensor_of(numbers: Sequence[int], like: Tensor) -> Tensor:
    values = like.new_empty(len(numbers))
    fill(values, numbers)
    return values


def batch_norm_stats(
    input: Tensor, identity: int | None = None, number: int = 0, mask: Tensor | None = None, summed: bool = False
) -> Tensor:
    if not _takes([mask], input):
        return reference.batch_norm_stats(input, identity, number, mask, summed)
    if summed:
        return summed_stats(batch_norm_stats(input), identity)
    input = input.detach()
    # Runs the same kernels as torch.batch_norm_stats, but returns the variance. Updates no buffers, because none are
    # passed.
    mean, var = torch.batch_norm_update_stats(input, None, None, 0.0)
    count = input.numel() // input.size(1)
    numbers = [count % WORD, count // WORD, *header_of(identity, number)]
    return torch.cat([mean, var, _tensor_of(numbers, mean)])


def batch_norm_elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, *options: Any
) -> Tensor:
    if not _takes(options, input, weight, bias, mean, invstd):
        return reference.batch_norm_elemt(input, weight, bias, mean, invstd, *options)
    weight, bias, mean, invstd = _per_channel(mean, weight, bias, mean, invstd)
    return torch.batch_norm_elemt(input, weight, bias, mean, invstd, 0.0)  # eps is not used


def batch_norm_backward_reduce(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    fingerprint: int | None = None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _takes(options, input, grad_output, mean, invstd):
        return reference.batch_norm_backward_reduce(grad_output, input, mean, invstd, weight, fingerprint, *options)
    mean, invstd = _per_channel(mean, mean, invstd)
    sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(
        grad_output, input, mean, invstd, None, True, False, False
    )
    sums = torch.cat([sum_dy, sum_dy_xmu, _tensor_of(header_sums_of(fingerprint), mean)])
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
    number: int = 0,
    *options: Any,
    grad_input: Tensor | None = None,
) -> Tensor:
    if not _takes(options, input, grad_output, weight, mean, invstd):
        arguments = grad_output, input, weight, mean, invstd, sums, count, ranks, fault, number, *options
        return reference.batch_norm_backward_elemt(*arguments, grad_input=grad_input)
    means = means_of_sums(sums, input.size(1), count, ranks, fault, number)
    # ATen divides sums by a 32-bit count, which the values of all ranks may exceed: pass means, and 1.
    one = torch.ones(1, dtype=torch.int32, device=input.device)
    mean, invstd, weight = _per_channel(mean, mean, invstd, weight)
    dx = torch.batch_norm_backward_elemt(grad_output, input, mean, invstd, weight, *means, one)
    if grad_input is None:
        return laid_out_as(input, dx)
    grad_input.copy_(dx)
    return dx.new_empty(0)
