"""Memory formats."""

import torch
from torch import Tensor


def laid_out_as(input: Tensor, grad_output: Tensor) -> Tensor:
    """Returns ``grad_output`` in the memory format of ``input``, so that no two ops make the same copy."""
    strides = zip(input.size(), input.stride(), grad_output.stride(), strict=True)
    if all(size == 1 or expected == stride for size, expected, stride in strides):
        return grad_output
    return torch.empty_like(input).copy_(grad_output)
