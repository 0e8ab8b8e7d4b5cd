"""Comparison of tensors of the ranks with those of one process."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .ranks import Ranks

# Rounding in float64 is some 1e-16; in tensors whose terms cancel, of the largest ones of their kind.
_RELATIVE, _OF_LARGEST = 1e-7, 1e-12


class Pair(NamedTuple):
    """A tensor of the ranks and that of one process."""

    kind: str
    """``"output"``, ``"loss"``, ``"gradient"`` or ``"buffer"``."""
    name: str
    actual: Tensor
    expected: Tensor


class Difference(NamedTuple):
    """A pair that differs: its position, by how much, and what is said of it."""

    position: int
    size: float
    text: str


def first_difference(ranks: Ranks, pairs: Sequence[Pair]) -> Difference | None:
    """Returns the first pair that differs on a rank by more than rounding explains; None if all are equal on all."""
    found = ranks.together("the comparison", lambda: _differences(pairs, ranks.rank))
    return min((own for of_rank in found for own in of_rank), default=None, key=lambda own: (own.position, -own.size))


def _differences(pairs: Sequence[Pair], rank: int) -> list[Difference]:
    largest: dict[str, float] = {}
    for kind, _, _, expected in pairs:
        largest[kind] = max(largest.get(kind, 0.0), _largest(expected))
    found = []
    for position, (kind, name, actual, expected) in enumerate(pairs):
        if actual.shape != expected.shape:
            text = f"{kind} {name} has size {list(actual.shape)} on rank {rank}, not {list(expected.shape)}"
            found.append(Difference(position, torch.inf, text))
            continue
        dtype = torch.promote_types(expected.dtype, torch.float64)
        actual, expected = actual.detach().to(dtype), expected.detach().to(dtype)
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        own, error = _largest(expected), _largest((actual - expected).masked_fill(same, 0))
        if not error <= _RELATIVE * own + _OF_LARGEST * largest[kind]:  # also NaN
            what = f"{kind} {name}".rstrip()
            text = f"{what} differs by up to {error:.1e} on rank {rank}, of values up to {own:.1e}"
            found.append(Difference(position, error, text))
    return found


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
