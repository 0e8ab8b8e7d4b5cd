"""Comparison of a step on ranks with one in one process."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# Rounding in float64 is some 1e-16, in tensors whose terms cancel relative to the largest of their kind.
_RELATIVE, _OF_LARGEST = 1e-7, 1e-12


class Pair(NamedTuple):
    """A tensor of the ranks and that of one process."""

    kind: str
    """``"output"``, ``"loss"``, ``"gradient"`` or ``"buffer"``."""
    name: str
    actual: Tensor
    expected: Tensor


class Difference(NamedTuple):
    """A tensor that differs: its position among all, the largest difference, and what is said of it."""

    position: int
    size: float
    text: str


def differences(pairs: Iterable[Pair], rank: int) -> list[Difference]:
    """Returns the pairs that differ by more than rounding in float64 explains."""
    pairs = list(pairs)
    largest: dict[str, float] = {}
    for kind, _, _, expected in pairs:
        largest[kind] = max(largest.get(kind, 0.0), _largest(expected))
    found = []
    for index, (kind, name, actual, expected) in enumerate(pairs):
        if actual.shape != expected.shape:
            text = f"{kind} {name} has size {list(actual.shape)} on rank {rank}, {list(expected.shape)} in one process"
            found.append(Difference(index, torch.inf, text))
            continue
        own = _largest(expected)
        error = _largest(_error(actual, expected))
        if not error <= _RELATIVE * own + _OF_LARGEST * largest[kind]:  # also NaN
            where = f"{kind} {name}".rstrip()
            text = f"{where} differs by up to {error:.1e} on rank {rank}, of values up to {own:.1e}"
            found.append(Difference(index, error, text))
    return found


def first_of(found: Iterable[list[Difference]]) -> Difference | None:
    """Returns the first of the differences that ranks have found, of several the largest; None if there are none."""
    return min((own for of_rank in found for own in of_rank), default=None, key=lambda own: (own.position, -own.size))


def _error(actual: Tensor, expected: Tensor) -> Tensor:
    dtype = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.detach().to(dtype), expected.detach().to(dtype)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return torch.where(same, torch.zeros_like(expected), actual - expected)


def _largest(tensor: Tensor) -> float:
    tensor = tensor.detach()
    return float((tensor if tensor.is_complex() else tensor.double()).abs().max()) if tensor.numel() else 0.0
