r"""Declares the five ops of ``torch.ops.bagua_syncbn``: the schema of each, and the shapes that tracing needs.

Shapes and dtypes. ``input`` is (N, C, \*) in float16, bfloat16, float32 or float64. The *accumulate dtype* is float64
for float64 input and float32 for all others; ``mean``, ``invstd`` and everything that crosses ranks have it.

==============================  =====================================================================================
``batch_norm_stats``            ``input`` to one contiguous tensor of 2C + 2 values,
                                ``[mean (C) | var (C) | low | high]``: mean and biased variance of each channel, and the
                                number of values per channel, ``count = low + high * 2**24``, in two words because a
                                float32 stops counting at ``2**24``
``batch_norm_gather_stats``     ``gathered`` (W, 2C + 2), one row per rank, to ``mean`` (C), ``invstd`` (C) and
                                ``count`` (int64 scalar) of all ranks together; updates the running statistics in place
``batch_norm_elemt``            ``(input - mean) * invstd * weight + bias``, in the dtype and memory format of ``input``
``batch_norm_backward_reduce``  to ``sums`` of 2C values, ``[sum_dy (C) | sum_dy_xmu (C)]``, where ``dy`` is
                                ``grad_output`` and ``xmu`` is ``input - mean``; ``grad_weight`` (C) and ``grad_bias``
                                (C) of this rank, in the dtype of ``weight`` if there is one, else in the accumulate
                                dtype
``batch_norm_backward_elemt``   to the gradient of ``input``, given the ``sums`` and ``count`` of all ranks
==============================  =====================================================================================

The names are ATen's. The schemas live in Python so that a pure-Python install has the same ops; native kernels register
themselves behind them.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

_Shapes = TypeVar("_Shapes", bound=Callable[..., object])

library = torch.library.Library("bagua_syncbn", "DEF")
SCHEMAS: list[str] = []


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which statistics of ``dtype`` values are computed and sent."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _op(schema: str) -> Callable[[_Shapes], _Shapes]:
    """Declares an op that has ``schema``; what is decorated gives the shapes of its results."""
    SCHEMAS.append(schema)
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    shapes: Callable[[_Shapes], _Shapes] = torch.library.register_fake(
        f"bagua_syncbn::{schema.partition('(')[0]}", lib=library
    )
    return shapes


@_op("batch_norm_stats(Tensor input) -> Tensor")
def _(input: Tensor) -> Tensor:
    return input.new_empty(2 * input.size(1) + 2, dtype=accumulate_dtype(input.dtype))


@_op(
    "batch_norm_gather_stats(Tensor gathered, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor(c!)? num_batches_tracked, float? momentum, float eps) -> (Tensor mean, Tensor invstd, Tensor count)"
)
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


@_op("batch_norm_elemt(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd) -> Tensor")
def _(input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    return torch.empty_like(input)


@_op(
    "batch_norm_backward_reduce(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight) "
    "-> (Tensor sums, Tensor grad_weight, Tensor grad_bias)"
)
def _(
    grad_output: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    channels = input.size(1)
    parameter = mean if weight is None else weight
    return mean.new_empty(2 * channels), parameter.new_empty(channels), parameter.new_empty(channels)


@_op(
    "batch_norm_backward_elemt(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, Tensor invstd, "
    "Tensor sums, Tensor count) -> Tensor"
)
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
