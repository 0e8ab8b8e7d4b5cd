"""Input shapes, memory layouts and random batches."""

import torch
from torch import Tensor

Shape = tuple[int, ...]

_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def parse_shape(text: str) -> Shape:
    shape = tuple(int(size) for size in text.split("x"))
    if not 2 <= len(shape) <= 5:
        raise ValueError(f"shape: expected 2 to 5 dimensions, got {text}")
    return shape


def layouts(shape: Shape) -> list[str]:
    """Returns the possible layouts of a shape. (N, C) is always interleaved."""
    return ["planar", "interleaved"] if len(shape) in _MEMORY_FORMATS else ["interleaved"]


def make_batch(shape: Shape, layout: str) -> Tensor:
    batch = torch.randn(shape)
    if layout == "interleaved" and len(shape) in _MEMORY_FORMATS:
        batch = batch.to(memory_format=_MEMORY_FORMATS[len(shape)])
    return batch
