r"""Declares the five ops of ``torch.ops.bagua_syncbn``.

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

import torch

library = torch.library.Library("bagua_syncbn", "DEF")

_SCHEMAS = (
    "batch_norm_stats(Tensor input) -> Tensor",
    "batch_norm_gather_stats(Tensor gathered, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor(c!)? num_batches_tracked, float? momentum, float eps) -> (Tensor mean, Tensor invstd, Tensor count)",
    "batch_norm_elemt(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd) -> Tensor",
    "batch_norm_backward_reduce(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight) "
    "-> (Tensor sums, Tensor grad_weight, Tensor grad_bias)",
    "batch_norm_backward_elemt(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, Tensor invstd, "
    "Tensor sums, Tensor count) -> Tensor",
)

for _schema in _SCHEMAS:
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which statistics of ``dtype`` values are computed and sent."""
    return torch.float64 if dtype == torch.float64 else torch.float32
