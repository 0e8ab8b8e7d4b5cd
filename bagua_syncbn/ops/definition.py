"""How the ops of ``torch.ops.bagua_syncbn`` are defined, each by schema, shapes and plain torch in a file of its own.

The names are ATen's. The schemas live in Python so that a pure-Python install has the same ops; native kernels register
themselves behind them.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of inputs, in the order of ``csrc/dtypes.h``."""

HALF_DTYPES = DTYPES[:2]
"""Dtypes of inputs that torch takes beside parameters in float32."""

_library = torch.library.Library("bagua_syncbn", "DEF")
SCHEMAS: dict[str, str] = {}
"""The schema of each op, by its name."""


def defines(schema: str, shapes: Callable[..., object]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Declares the op that has ``schema``; what is decorated computes it, on any device.

    ``shapes`` makes results without values, for tracing.
    """
    name = schema.partition("(")[0]
    SCHEMAS[name] = schema
    # Flexible: torch.compile may lay out tensors in other ways than traced, as for convolutions, without copies.
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    torch.library.register_fake(f"bagua_syncbn::{name}", shapes, lib=_library)

    def register(definition: Callable[_P, _R]) -> Callable[_P, _R]:
        _library.impl(name, definition, "CompositeExplicitAutograd")
        return definition

    return register


def implement(name: str, kernel: Callable[..., object], key: str) -> None:
    """Has ``kernel`` compute the op ``name`` on tensors of the dispatch key ``key``."""
    _library.impl(name, kernel, key)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which statistics of ``dtype`` values are computed and sent."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reduced_dims(input: Tensor) -> list[int]:
    """Returns the dimensions over which the values of a channel of ``input`` (N, C, \\*) run."""
    return [0, *range(2, input.dim())]


def per_channel(values: Tensor, input: Tensor) -> Tensor:
    """Views ``values`` (C) so that it broadcasts along dimension 1 of ``input``."""
    return values.view(1, -1, *[1] * (input.dim() - 2))


def like_input(input: Tensor, values: Tensor) -> Tensor:
    """Returns ``values`` in the dtype and memory format of ``input``."""
    return torch.empty_like(input).copy_(values)


def laid_out_as(input: Tensor, grad_output: Tensor) -> Tensor:
    """Returns ``grad_output`` in the memory format of ``input``, so that no two ops make the same copy."""
    strides = zip(input.size(), input.stride(), grad_output.stride(), strict=True)
    if all(size == 1 or expected == stride for size, expected, stride in strides):
        return grad_output
    return torch.empty_like(input).copy_(grad_output)
