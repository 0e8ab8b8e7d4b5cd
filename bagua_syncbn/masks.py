"""Masks as an argument: checks, and their form for the ops."""

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]

from .checks import check_flag, check_is_tensor
from .ops import Masking, of_positions
from .options import GivenMasks
from .torch_internals.autograd import is_transforming


def masking_of(input: Tensor, masks: GivenMasks) -> Masking | None:
    """Returns the masking of a call with ``input`` (N, C, \\*); None to use all positions.

    Raises:
        TypeError, ValueError, RuntimeError: ``mask`` or ``lengths`` is wrong, see :func:`.sync_batch_norm`.
    """
    mask, lengths, zero_masked = masks(input) if callable(masks) else masks
    if zero_masked is not False:
        check_flag("zero_masked", zero_masked)
    if mask is None and lengths is None:
        return None
    if mask is not None and lengths is not None:
        raise ValueError("mask, lengths: expected at most one of them, got both")
    # Copied, because callers may write to theirs before backward.
    if lengths is not None:
        _check_lengths(lengths, input)
        if not is_compiling():
            return Masking(lengths.to(torch.int64, copy=True, memory_format=torch.contiguous_format), zero_masked)
        # A mask asks for no size in backward, where Dynamo may take one from a stride, which differs between calls.
        mask = of_positions(lengths, input)
    assert mask is not None
    size = size_of_mask(input.shape)
    check_mask(mask, size, "(N, 1, *)", "input", input.device)
    return Masking(mask.expand(size).clone(memory_format=torch.contiguous_format).squeeze(1), zero_masked)


def check_mask(mask: Tensor, size: list[int], shape: str, beside: str, device: torch.device) -> None:
    """Raises unless ``mask`` is bool, broadcasts to ``size``, called ``shape``, and is on ``device``, as ``beside``."""
    check_is_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: expected a bool tensor, got {mask.dtype}")
    if not broadcasts(mask.shape, size):
        raise ValueError(
            f"mask: expected a tensor that broadcasts to {shape}, {size}, got {list(mask.shape)}"
            + hint(mask.shape, size)
        )
    _check_is_read_in_one_way(mask.shape, size)
    if mask.device != device:
        raise RuntimeError(f"mask: expected it on {device}, where {beside} is, got {mask.device}")


def size_of_mask(shape: torch.Size) -> list[int]:
    return [shape[0], 1, *shape[2:]]


def broadcasts(shape: torch.Size, size: list[int]) -> bool:
    # Not `own in (1, expected)`: torch.compile takes that for false if `own` is constant and `expected` is symbolic.
    ends = zip(reversed(shape), reversed(size), strict=False)
    return len(shape) <= len(size) and all(own == 1 or own == expected for own, expected in ends)


def hint(shape: torch.Size, size: list[int]) -> str:
    """Returns advice for a mask with a dimension for samples and none for channels; "" for other masks."""
    has_samples = len(shape) == len(size) - 1 and broadcasts(shape, [size[0], *size[2:]])
    return "; give mask.unsqueeze(1)" if has_samples else ""


def _check_is_read_in_one_way(shape: torch.Size, size: list[int]) -> None:
    """Raises ValueError if the first dimension of a mask may stand for samples as well as for places.

    Broadcasting, as everywhere in torch, takes the first dimensions for the missing ones, and so reads it as places.
    """
    missing = len(size) - len(shape)
    if missing == 0 or len(shape) == 0 or shape[0] == 1 or shape[0] != size[0]:
        return
    own, of_samples = [1] * missing + [*shape], [shape[0]] + [1] * missing + [*shape[1:]]
    raise ValueError(
        f"mask: expected a shape that is read in one way, got {list(shape)}, whose first dimension may be samples or "
        f"places; give mask.view({of_samples}) for samples, mask.view({own}) for places, the same in all samples"
    )


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
        raise RuntimeError(f"lengths: expected it on {input.device}, where input is, got {lengths.device}")
    # Values on other devices are not checked, because the host would wait for the device.
    if type(lengths) is Tensor and lengths.is_cpu and not (is_compiling() or is_tracing() or is_transforming()):
        wrong = [length for length in lengths.tolist() if not 0 <= length <= input.size(-1)]
        if wrong:
            raise ValueError(f"lengths: expected from 0 to {input.size(-1)}, the size of input, got {wrong[0]}")
