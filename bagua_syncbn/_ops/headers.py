"""Messages between ranks: layout, and headers that show whether all ranks send the same message.

Forward, one row per rank: ``[mean (C) | var (C) | low | high | header]``, with the biased variance. The number of
values per channel is ``low + high * 2**24``, because float32 holds every integer only up to ``2**24``. The header is
``layer, options, number``, 24 bits each, where ``identity = layer * 2**24 + options``. A row has no header, and an
even size, if there is no identity.

Backward, sums over ranks: ``[sum_g (C) | sum_g_xmu (C) | header_sums]``. The header sums are ``a, a**2, b, b**2, c,
c**2`` for ``fingerprint = a + b * 2**12 + c * 2**24``; there are none without a fingerprint. The mean of the squares
over ranks equals the square of the mean only if all ranks sent the same value.

Large groups also send sums forward, in float64: ``[n * mean (C) | n * (var + mean**2) (C) | n | header_sums]``. These
messages always have header sums.

``csrc/packed_stats.h`` has the same layout.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

HEADER_SIZE = 3
HEADER_SUMS_SIZE = 6
WORD = 2**24  # bound of each value in a header: float32 holds every integer up to it
PART = 2**12  # bound of each part of a fingerprint: float32 holds its square


def row_layout(gathered: Tensor) -> tuple[int, int]:
    """Returns the number of channels and the header size of the rows in ``gathered``."""
    header_size = HEADER_SIZE if gathered.size(1) % 2 else 0
    return (gathered.size(1) - 2 - header_size) // 2, header_size


def header_of(identity: int | None, number: int) -> list[int]:
    """Returns the header for ``batch_norm_stats``."""
    return [] if identity is None else [*divmod(identity, WORD), number]


def header_sums_of(fingerprint: int | None) -> list[int]:
    """Returns the values that a rank adds to the header sums."""
    parts = () if fingerprint is None else (fingerprint % PART, fingerprint // PART % PART, fingerprint // PART**2)
    return [value for part in parts for value in (part, part * part)]


def headers_differ(header_sums: Tensor, ranks: int) -> Tensor:
    """Returns whether the ``ranks`` had different fingerprints."""
    totals, squares = header_sums.to(torch.int64).view(-1, 2).unbind(1)
    return (squares * ranks != totals.square()).any()


def fill(values: Tensor, numbers: Iterable[int | Tensor]) -> None:
    """Sets ``values`` to ``numbers`` (integers, or scalars on the device). Unlike a copy, this does not synchronize."""
    for value, number in zip(values, numbers, strict=True):
        value.fill_(number)


def record(fault: Tensor | None, happened: Tensor, values: Sequence[Tensor]) -> None:
    """Writes ``values`` to the fault record if a fault ``happened`` and the record is empty.

    On CUDA, reading and writing are separate steps: if the host clears a fault in between, the fault is written again.
    """
    if fault is None:
        return
    written = torch.cat([value.reshape(-1) for value in values]).to(torch.int64)
    before = fault[: written.numel()].to(written.device, non_blocking=True)  # pinned memory: in the stream's order
    fault[: written.numel()].copy_(torch.where(happened & (before[0] == 0), written, before), non_blocking=True)


def record_sums(fault: Tensor | None, differ: Tensor, number: int) -> None:
    """Records that the headers in the sums of message ``number`` differ between ranks."""
    record(fault, differ, [torch.full_like(differ, value, dtype=torch.int64) for value in (3, number)])
