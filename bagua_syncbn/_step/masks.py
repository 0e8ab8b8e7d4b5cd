"""Checks masks, and converts them to the form that the ops take."""

import torch
from torch import Tensor

from .call import GivenMask, Masking
from .checks import check_flag, check_is_tensor


def masking_of(input: Tensor, given: GivenMask) -> Masking | None:
    """Returns the masking of a call with ``input`` (N, C, \\*); None to use all positions.

    Raises:
        TypeError, ValueError, RuntimeError: the mask is wrong, see :func:`.sync_batch_norm`.
    """
    if callable(given):
        return given(input)
    mask, zero_masked = given
    if zero_masked is not False:
        check_flag("zero_masked", zero_masked)
    if mask is None:
        return None
    size = mask_size(input)
    check_mask(mask, size, "(N, 1, *)", input.device)
    # Copied, because callers may write to the mask before backward.
    return Masking(mask.expand(size).clone(memory_format=torch.contiguous_format).squeeze(1), zero_masked)


def mask_size(input: Tensor) -> list[int]:
    """Returns the size (N, 1, \\*) of a mask of ``input`` (N, C, \\*)."""
    return [input.shape[0], 1, *input.shape[2:]]


def fits(mask: Tensor, size: list[int]) -> bool:
    """Returns whether each dimension of ``mask`` is 1 or the one in ``size``."""
    # Not `dim in (1, expected)`: torch.compile evaluates that to False if `dim` is constant and `expected` is symbolic.
    sizes = zip(mask.shape, size, strict=False)
    return mask.dim() == len(size) and all(dim == 1 or dim == expected for dim, expected in sizes)


def check_mask(mask: Tensor, size: list[int], expected: str, device: torch.device) -> None:
    """Raises unless ``mask`` is bool, on ``device``, and fits ``size``, which errors describe as ``expected``."""
    check_is_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: expected a bool tensor, got {mask.dtype}")
    if not fits(mask, size):
        got = [*mask.shape]
        raise ValueError(f"mask: expected the size {expected}, here {size}, where any dimension may be 1, got {got}")
    if mask.device != device:
        raise RuntimeError(f"mask: expected a tensor on {device}, got {mask.device}")
