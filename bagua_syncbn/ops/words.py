"""Messages of ranks: their layout, and words, integers that tell whether all ranks make the same call.

Forward, a row of statistics: ``[mean (C) | var (C) | low | high | words]``, the biased variance, and the number of
values per channel as ``low + high * 2**24``, since a float32 holds every integer only up to ``2**24``. The words are
``layer``, ``options`` and ``call``, of 24 bits each, if there is a ``caller = layer * 2**24 + options``; only then the
size of a row is odd.

Backward, sums: ``[sum_g (C) | sum_g_xmu (C) | words]``. The words are ``a, a**2, b, b**2, c, c**2`` if there is a
``fingerprint = a + b * 2**12 + c * 2**24``: added up over ranks, the mean of the squares is the square of the mean only
where all are equal.

In large groups forward too, in float64: ``[n * mean (C) | n * (var + mean**2) (C) | n | words]``, always with words.

``csrc/packed_stats.h`` has the same.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

WORDS = 3  # that are gathered: layer, options, call
PARTS = 6  # that are added up: three parts of a fingerprint, each with its square
WORD = 2**24  # above each word: float32 holds every integer up to it
PART = 2**12  # above each part of a fingerprint: float32 holds its square


def words_in(gathered: Tensor) -> int:
    """Returns how many words the rows of ``gathered`` end in: without, each has an even number of values."""
    return WORDS if gathered.size(1) % 2 else 0


def words_of_row(caller: int | None, call: int) -> list[int]:
    """Returns the words that a row of statistics ends in."""
    return [] if caller is None else [*divmod(caller, WORD), call]


def parts_of(fingerprint: int | None) -> list[int]:
    """Returns the words that sums end in."""
    parts = () if fingerprint is None else (fingerprint % PART, fingerprint // PART % PART, fingerprint // PART**2)
    return [word for part in parts for word in (part, part * part)]


def parts_differ(said: Tensor, ranks: int) -> Tensor:
    """Returns whether the words that sums of ``ranks`` end in differed between ranks."""
    words, squares = said.to(torch.int64).view(-1, 2).unbind(1)
    return (squares * ranks != words.square()).any()


def count_in(number: Tensor, row: Tensor, adds_up: bool) -> None:
    """Adds ``number``, an integer on the device, to the words of ``row``, which then differ on ranks with another one.

    Args:
        adds_up: whether the words are those of sums.
    """
    if not adds_up:
        row[-1:].add_(number)
        return
    for word, square, part in ((row[-6], row[-5], number), (row[-4], row[-3], number // PART)):
        word.add_(part).remainder_(PART)
        square.copy_(word.square())


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


def record_sums(fault: Tensor | None, differ: Tensor, call: int) -> None:
    """Writes to ``fault`` that the words in the sums of ``call`` differed between ranks, where they ``differ``."""
    record(fault, differ, [torch.full_like(differ, number, dtype=torch.int64) for number in (3, call)])
