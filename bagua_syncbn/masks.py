"""Masks and lengths as arguments: their checks, and the form that the ops take."""

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
        raise ValueError("mask, lengths: expected at most one of them, got both")
    if lengths is not None:
        _check_lengths(lengths, input)
        places = torch.arange(input.size(-1), device=input.device)
        mask = places < lengths.view(-1, *[1] * (input.dim() - 1))
    assert mask is not None
    # Copied, because callers may write to their tensors before backward.
    size = mask_size(input)
    check_mask(mask, size, "(N, 1, *)", "input", input.device)
    return Masking(mask.expand(size).clone(memory_format=torch.contiguous_format).squeeze(1), zero_masked)


def mask_size(input: Tensor) -> list[int]:
    """Returns the size (N, 1, \\*) of a mask of ``input`` (N, C, \\*)."""
    return [input.shape[0], 1, *input.shape[2:]]


def broadcasts(shape: torch.Size, size: list[int]) -> bool:
    """Returns whether a tensor of ``shape`` broadcasts to ``size``."""
    # Not `dim in (1, expected)`: torch.compile takes that for false if `dim` is constant and `expected` is symbolic.
    ends = zip(reversed(shape), reversed(size), strict=False)
    return len(shape) <= len(size) and all(dim == 1 or dim == expected for dim, expected in ends)


def unsqueeze_hint(shape: torch.Size, size: list[int]) -> str:
    """Returns advice for a mask that lacks only the dimension of channels; "" for other masks."""
    has_samples = len(shape) == len(size) - 1 and broadcasts(shape, [size[0], *size[2:]])
    return "; give mask.unsqueeze(1)" if has_samples else ""


def check_mask(mask: Tensor, size: list[int], shape_text: str, name: str, device: torch.device) -> None:
    """Raises unless ``mask`` is bool, broadcasts to ``size`` in one way, and is on ``device``, as argument ``name``."""
    check_is_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: expected a bool tensor, got {mask.dtype}")
    shape = mask.shape
    if not broadcasts(shape, size):
        raise ValueError(
            f"mask: expected a tensor that broadcasts to {shape_text}, {size}, got {list(shape)}"
            + unsqueeze_hint(shape, size)
        )
    # Broadcasting reads the first dimension of a shorter mask as positions. If it could be samples, ask.
    missing = len(size) - len(shape)
    if missing and len(shape) and shape[0] == size[0] != 1:
        positions, samples = [1] * missing + [*shape], [shape[0]] + [1] * missing + [*shape[1:]]
        raise ValueError(
            f"ambiguous mask of shape {list(shape)}: its first dimension could be samples or positions; give "
            f"mask.view({samples}) for samples, or mask.view({positions}) for positions, the same in all samples"
        )
    if mask.device != device:
        raise RuntimeError(f"mask: expected a tensor on {device}, as {name}, got one on {mask.device}")


def _check_lengths(lengths: Tensor, input: Tensor) -> None:
    check_is_tensor("lengths", lengths)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths: expected an integer tensor, got {lengths.dtype}")
    if input.dim() < 3 or lengths.shape != input.shape[:1]:
        raise ValueError(
            "lengths: expected (N), one for each sample of an input (N, C, *, L), got "
            f"{list(lengths.shape)} for {list(input.shape)}"
        )
    if lengths.device != input.device:
        raise RuntimeError(f"lengths: expected a tensor on {input.device}, as input, got one on {lengths.device}")
    # Values on other devices are not checked, because the host would wait for the device.
    if type(lengths) is Tensor and lengths.is_cpu and not (is_compiling() or is_tracing() or is_transforming()):
        wrong = [length for length in lengths.tolist() if not 0 <= length <= input.size(-1)]
        if wrong:
            raise ValueError(f"lengths: expected from 0 to {input.size(-1)}, the size of input, got {wrong[0]}")
