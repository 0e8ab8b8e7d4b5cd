"""Checks mask and length arguments, and converts them to the form that the ops take."""

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]

from .checks import check_flag, check_is_tensor
from .options import GivenMasks
from .step.call import Masking
from .torch_internals.autograd import is_transforming


def masking_of(input: Tensor, masks: GivenMasks) -> Masking | None:
    """Returns the masking of a call with ``input`` (N, C, \\*); None to use all positions.

    Raises:
        TypeError, ValueError, RuntimeError: ``mask`` or ``lengths`` is wrong, see :func:`.sync_batch_norm`.
    """
    if callable(masks):
        return masks(input)  # type: ignore[no-any-return]
    mask, lengths, zero_masked = masks
    if zero_masked is not False:
        check_flag("zero_masked", zero_masked)
    if mask is None and lengths is None:
        return None
    if mask is not None and lengths is not None:
        raise ValueError("mask, lengths: expected at most one, got both")
    if lengths is not None:
        _check_lengths(lengths, input)
        places = torch.arange(input.size(-1), device=input.device)
        mask = places < lengths.view(-1, *[1] * (input.dim() - 1))
    assert mask is not None
    # Copied, because callers may write to the tensors before backward.
    size = mask_size(input)
    check_mask(mask, size, "(N, 1, *)", input.device)
    return Masking(mask.expand(size).clone(memory_format=torch.contiguous_format).squeeze(1), zero_masked)


def mask_size(input: Tensor) -> list[int]:
    """Returns the size (N, 1, \\*) of a mask of ``input`` (N, C, \\*)."""
    return [input.shape[0], 1, *input.shape[2:]]


def broadcasts(shape: torch.Size, size: list[int]) -> bool:
    """Returns whether a tensor of ``shape`` broadcasts to ``size``."""
    # Not `dim in (1, expected)`: torch.compile evaluates that to False if `dim` is constant and `expected` is symbolic.
    ends = zip(reversed(shape), reversed(size), strict=False)
    return len(shape) <= len(size) and all(dim == 1 or dim == expected for dim, expected in ends)


def check_mask(mask: Tensor, size: list[int], expected: str, device: torch.device) -> None:
    """Raises unless ``mask`` is bool, on ``device``, and broadcasts unambiguously to ``size``, named ``expected``."""
    check_is_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: expected a bool tensor, got {mask.dtype}")
    shape = mask.shape
    if not broadcasts(shape, size):
        raise ValueError(f"mask: expected a tensor that broadcasts to {expected}, {size}, got {list(shape)}")
    # Broadcasting aligns the first dimension of a shorter mask with positions, although it could be samples.
    if 0 < len(shape) < len(size) and shape[0] == size[0] != 1:
        raise ValueError(
            f"ambiguous mask of shape {list(shape)}: the first dimension could be samples or positions; use mask.view "
            f"to give it {len(size)} dimensions"
        )
    if mask.device != device:
        raise RuntimeError(f"mask: expected a tensor on {device}, got {mask.device}")


def _check_lengths(lengths: Tensor, input: Tensor) -> None:
    check_is_tensor("lengths", lengths)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths: expected an integer tensor, got {lengths.dtype}")
    if input.dim() < 3 or lengths.shape != input.shape[:1]:
        raise ValueError(f"lengths: expected (N) for input (N, C, *, L), got {[*lengths.shape]} for {[*input.shape]}")
    if lengths.device != input.device:
        raise RuntimeError(f"lengths: expected a tensor on {input.device}, got {lengths.device}")
    # Only on CPU: elsewhere the host would wait for the device.
    if type(lengths) is Tensor and lengths.is_cpu and not (is_compiling() or is_tracing() or is_transforming()):
        wrong = [length for length in lengths.tolist() if not 0 <= length <= input.size(-1)]
        if wrong:
            raise ValueError(f"lengths: expected from 0 to {input.size(-1)}, the size of input, got {wrong[0]}")
