"""inplace_abn's layer without its activation, which would not be batch normalization alone.

It overwrites its input, which saves memory in a network and cannot be done to a leaf: the input is copied first, and
the copy is part of what is measured.
"""

from inplace_abn import InPlaceABNSync
from torch import Tensor, nn


class _OnACopy(InPlaceABNSync):
    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input.clone())
        return output


def make(channels: int, dimensions: int) -> nn.Module:
    return _OnACopy(channels, activation="identity")
