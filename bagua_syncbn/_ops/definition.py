"""Defines the ops of ``torch.ops.bagua_syncbn``: schema, fake kernel, and plain torch for any device.

The op names match ATen's. Schemas are defined in Python, so that the ops also exist without the native library.
"""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from .._torch.autograd import on_mutation_of_saved_tensors

_P = ParamSpec("_P")
_R = TypeVar("_R")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of inputs, in the order of ``csrc/dtypes.h``."""

HALF_DTYPES = DTYPES[:2]
"""Input dtypes that torch combines with float32 parameters."""

library = torch.library.Library("bagua_syncbn", "DEF")
SCHEMAS: dict[str, str] = {}
"""Schemas of the ops, by name."""


def defines(fake: Callable[..., object], mutates: Sequence[str] = ()) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator that defines the op with the function's name; the function also runs on devices without native kernels.

    Args:
        fake: returns empty results, for tracing.
        mutates: the arguments that the op writes to.
    """

    def define(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = function.__name__
        # Python ints become SymInts, which the ops do not take.
        inferred = torch.library.infer_schema(function, mutates_args=mutates).replace("SymInt", "int")
        SCHEMAS[name] = name + inferred
        # The tag lets torch.compile pass inputs in other layouts than the traced one, instead of copying them.
        library.define(SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
        torch.library.register_fake(f"bagua_syncbn::{name}", fake, lib=library)
        library.impl(name, function, "CompositeExplicitAutograd")
        if mutates:
            on_mutation_of_saved_tensors(f"bagua_syncbn::{name}", library)
        return function

    return define


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which statistics of ``dtype`` values are computed and sent."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reduced_dims(input: Tensor) -> list[int]:
    """Returns the dimensions of ``input`` (N, C, \\*) other than the channels."""
    return [0, *range(2, input.dim())]


def per_channel(values: Tensor, input: Tensor) -> Tensor:
    """Views ``values`` (C) so that they broadcast along dimension 1 of ``input``."""
    return values.view(1, -1, *[1] * (input.dim() - 2))


def like_input(input: Tensor, values: Tensor) -> Tensor:
    """Returns ``values`` in the dtype and memory format of ``input``."""
    return torch.empty_like(input).copy_(values)


def laid_out_as(input: Tensor, grad_output: Tensor) -> Tensor:
    """Returns ``grad_output`` in the memory format of ``input``, so that two ops do not both copy it."""
    strides = zip(input.size(), input.stride(), grad_output.stride(), strict=True)
    if all(size == 1 or expected == stride for size, expected, stride in strides):
        return grad_output
    return like_input(input, grad_output)
