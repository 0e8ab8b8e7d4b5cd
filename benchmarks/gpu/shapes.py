"""What is measured: five ops on inputs of the batch norm layers of three networks, in two layouts and three dtypes."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

# Of ours and of ATen's.
OPS = ("stats", "gather_stats", "elemt", "backward_reduce", "backward_elemt")

# Channels and size of each distinct batch norm input.
RESNET50 = (
    (64, 112), (64, 56), (256, 56), (128, 56), (128, 28), (512, 28),
    (256, 28), (256, 14), (1024, 14), (512, 14), (512, 7), (2048, 7),
)  # fmt: skip
UNET_512 = ((64, 512), (128, 256), (256, 128), (512, 64), (1024, 32))
UNET_3D_96 = ((32, 96), (64, 48), (128, 24), (256, 12), (320, 6))

NETWORKS: dict[str, tuple[tuple[int, ...], ...]] = {
    **{f"ResNet-50, batch {n}": tuple((n, c, s, s) for c, s in RESNET50) for n in (2, 8, 32)},
    "U-Net 512, batch 8": tuple((8, c, s, s) for c, s in UNET_512),
    "3-D U-Net 96, batch 4": tuple((4, c, s, s, s) for c, s in UNET_3D_96),
    "few channels": ((64, 8, 224, 224),),
}
TINY: dict[str, tuple[tuple[int, ...], ...]] = {"tiny": ((2, 3, 4, 4), (3, 8, 5, 5), (2, 4, 3, 3, 3))}

DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("planar", "interleaved")
VALUE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Case:
    """One input: contiguous if ``planar``, channels_last if ``interleaved``."""

    network: str
    shape: tuple[int, ...]
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


def cases(networks: dict[str, tuple[tuple[int, ...], ...]]) -> Iterator[Case]:
    """All cases, whole dtypes one after another: what is cut off when time runs out is the last dtype."""
    for dtype in DTYPES:
        for network, shapes in networks.items():
            for shape in shapes:
                for layout in LAYOUTS:
                    yield Case(network, shape, dtype, layout)
