"""Inputs that are measured: of batch norm layers as people train them, in two layouts and three dtypes."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

Shape = tuple[int, ...]

# Ours and ATen's have these names.
OPS = ("stats", "gather_stats", "elemt", "backward_reduce", "backward_elemt")
# Sizes of the input that each op that touches every value must read or write.
PASSES = {"stats": 1, "elemt": 2, "backward_reduce": 2, "backward_elemt": 3}

# Channels and size of each distinct batch norm input.
RESNET50 = (
    (64, 112), (64, 56), (256, 56), (128, 56), (128, 28), (512, 28),
    (256, 28), (256, 14), (1024, 14), (512, 14), (512, 7), (2048, 7),
)  # fmt: skip
DETECTOR = ((32, 320), (64, 160), (128, 80), (256, 40), (512, 20))
UNET_3D = ((32, 128), (64, 64), (128, 32), (256, 16), (320, 8))

# Few images a GPU and points first: those who need synchronization have them.
NETWORKS: dict[str, tuple[Shape, ...]] = {
    "detector 640, batch 8": tuple((8, c, s, s) for c, s in DETECTOR),
    "ResNet-50, batch 8": tuple((8, c, s, s) for c, s in RESNET50),
    "detector 1280, batch 2": tuple((2, c, 2 * s, 2 * s) for c, s in DETECTOR),
    "3-D U-Net 128, batch 2": tuple((2, c, s, s, s) for c, s in UNET_3D),
    "points": ((100_000, 32), (100_000, 256), (1_000_000, 64), (300_000, 512)),
    "ResNet-50, batch 2": tuple((2, c, s, s) for c, s in RESNET50),
    "ResNet-50, batch 32": tuple((32, c, s, s) for c, s in RESNET50),
    "few channels": ((64, 8, 224, 224),),
}
# Training forward passes in half precision of a published table (TileOPs, H200), with microseconds where known.
PUBLISHED = {(4, 128, 1024, 1024): 912.0, (8, 64, 32, 32): 2.8, (4, 256, 28, 28): 3.6, (4, 128, 32, 32): 0, (32, 64): 0}
TINY: dict[str, tuple[Shape, ...]] = {"tiny": ((2, 3, 4, 4), (2, 4, 3, 3, 3), (40, 8))}

DTYPES = ("float16", "float32", "bfloat16")
LAYOUTS = ("planar", "interleaved")
VALUE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Case:
    """One input: contiguous if ``planar``; channels_last, or the rows of (N, C), if ``interleaved``."""

    network: str
    shape: Shape
    dtype: str
    layout: str

    @property
    def channels(self) -> int:
        return self.shape[1]

    @property
    def values(self) -> int:
        return prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of the input."""
        return self.values * VALUE_BYTES[self.dtype]

    def record(self) -> dict[str, Any]:
        """Returns what names the case in a file of results."""
        return {"network": self.network, "shape": list(self.shape), "dtype": self.dtype, "layout": self.layout}


def cases(networks: dict[str, tuple[Shape, ...]]) -> Iterator[Case]:
    """All cases, whole dtypes one after another: what is cut off when time runs out is the last dtype."""
    for dtype in DTYPES:
        for network, shapes in networks.items():
            for shape in shapes:
                for layout in LAYOUTS if len(shape) > 2 else LAYOUTS[1:]:
                    yield Case(network, shape, dtype, layout)


def published() -> list[Case]:
    layouts = ((shape, "planar" if len(shape) > 2 else "interleaved") for shape in PUBLISHED)
    return [Case("published", shape, "float16", layout) for shape, layout in layouts]
