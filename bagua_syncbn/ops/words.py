"""Words: integers that follow statistics and sums, by which ranks find out whether they all make the same call.

The dtype holds each exactly. A row of statistics ends in ``layer``, ``terms`` and ``call``, of 24 bits each, if there
is a ``speaker = layer * 2**24 + terms``; only then its size is odd. Sums end in ``a, a**2, b, b**2, c, c**2`` if there
is a ``fingerprint = a + b * 2**12 + c * 2**24``.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

WORDS = 3  # that are gathered: layer, terms, call
PARTS = 6  # that are added up: three parts of a fingerprint, each with its square
# The worth of one in the high word of a packed count. Every integer up to it is exact in float32.
COUNT_BASE = 2**24


def words_in(gathered: Tensor) -> int:
    """Returns how many words the rows of ``gathered`` end in: without, each has an even number of values."""
    return WORDS if gathered.size(1) % 2 else 0


def words_of_row(speaker: int | None, call: int) -> list[int]:
    """Returns the words that a row of statistics ends in."""
    return [] if speaker is None else [*divmod(speaker, COUNT_BASE), call]


def parts_of(fingerprint: int | None) -> list[int]:
    """Returns the words that sums end in."""
    parts = () if fingerprint is None else (fingerprint & 0xFFF, fingerprint >> 12 & 0xFFF, fingerprint >> 24)
    return [word for part in parts for word in (part, part * part)]


def fill(values: Tensor, numbers: Iterable[int]) -> None:
    """Sets ``values`` to ``numbers``, without the synchronization that copying a tensor of the host would be."""
    for value, number in zip(values, numbers, strict=True):
        value.fill_(number)


def record(fault: Tensor | None, happened: Tensor, values: Sequence[Tensor]) -> None:
    """Writes ``values`` to ``fault`` where something ``happened`` and nothing was written before.

    On CUDA it reads and writes one after the other: a fault that the host takes in between comes back once.
    """
    if fault is None:
        return
    written = torch.cat([value.reshape(-1) for value in values]).to(torch.int64)
    before = fault[: written.numel()].to(written.device, non_blocking=True)  # of pinned memory: in the stream's order
    fault[: written.numel()].copy_(torch.where(happened & (before[0] == 0), written, before), non_blocking=True)
