"""Output shapes of the five ops, for tracing: the same tensors as the reference gives, without their values."""

import torch
from torch import Tensor

from .schemas import accumulate_dtype, library


@torch.library.register_fake("bagua_syncbn::batch_norm_stats", lib=library)
def _(input: Tensor) -> Tensor:
    return input.new_empty(2 * input.size(1) + 2, dtype=accumulate_dtype(input.dtype))


@torch.library.register_fake("bagua_syncbn::batch_norm_gather_stats", lib=library)
def _(
    gathered: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    channels = gathered.size(1) // 2 - 1
    return gathered.new_empty(channels), gathered.new_empty(channels), gathered.new_empty((), dtype=torch.int64)


@torch.library.register_fake("bagua_syncbn::batch_norm_elemt", lib=library)
def _(input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    return torch.empty_like(input)


@torch.library.register_fake("bagua_syncbn::batch_norm_backward_reduce", lib=library)
def _(
    grad_output: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    channels = input.size(1)
    parameter = mean if weight is None else weight
    return mean.new_empty(2 * channels), parameter.new_empty(channels), parameter.new_empty(channels)


@torch.library.register_fake("bagua_syncbn::batch_norm_backward_elemt", lib=library)
def _(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor,
    count: Tensor,
) -> Tensor:
    return torch.empty_like(input)
