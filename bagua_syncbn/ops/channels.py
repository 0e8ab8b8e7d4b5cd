"""Dimension 1 among the others."""

from torch import Tensor


def reduced_dims(input: Tensor) -> list[int]:
    """Returns the dimensions over which the values of a channel of ``input`` (N, C, \\*) run."""
    return [0, *range(2, input.dim())]


def per_channel(values: Tensor, input: Tensor) -> Tensor:
    """Views ``values`` (C) so that it broadcasts along dimension 1 of ``input``."""
    return values.view(1, -1, *[1] * (input.dim() - 2))
