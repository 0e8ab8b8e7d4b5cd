"""Calls that together run every CUDA kernel for a dtype, with values that reveal errors."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops.activations import ACTIVATIONS
from .._ops.definition import accumulate_dtype, per_channel
from .._ops.headers import header_sums_of

_PRIME = 2**16 + 1
_IDENTITY, _NUMBER = 0xABCDE1 * 2**24 + 0x123457, 0x765431  # words that need 24 bits
# More ranks than a warp has lanes, and not a multiple of the eight that a thread loads at once; more channels than a
# block has threads. If one rank sends a part of this fingerprint that is smaller by 1, only integer arithmetic shows
# it: float32 rounds the difference away.
_RANKS, _CHANNELS = 47, 300
_FINGERPRINT = 511 + 509 * 2**12 + 505 * 2**24
_LARGE = 2**32  # factor of counts and of their sums


class OpCall(NamedTuple):
    """A call of an op. ``written``: arguments that the op writes to, which no later call uses."""

    op: str
    arguments: tuple[Any, ...]
    written: tuple[Tensor, ...] = ()
    options: dict[str, Tensor] = {}  # noqa: RUF012 - never changed


class _Input(NamedTuple):
    shape: tuple[int, ...]  # (N, C, L) is planar, (N, C) interleaved
    offset: int = 0  # values between a 16-byte boundary and the first value
    interleaved: bool = False  # (N, C, H, W) as channels_last
    scale: float = 1.0  # multiplies grad_output
    center: float = 1.0  # multiplies the means
    unit: float = 1.0  # multiplies the input
    padding: int = 0  # number of invalid positions at the start of each row, with a mask
    is_plain: bool = False  # whether ops run without options, and a row of the second channel has NaN


def _inputs(vector: int, smallest: float) -> list[_Input]:
    """Returns inputs for scalar loads and for loads of ``vector`` values.

    Each kernel runs on inputs with one part and with several parts per channel. Rows begin and end within vectors, and
    the last tile of channels is incomplete. An input's position in the list determines its activations. No value may be
    near a kink of its activation.
    """
    center = {2: 2**6, 4: 2**15, 8: 1}[vector]  # means that require a precise variance
    return [
        _Input((2, 3, 768 * vector + 1), scale=30),  # bias gradients overflow float16
        # The second row has a slot more than if it were aligned. The first part has no valid positions.
        _Input((1, 2, 1535 * vector - 2), offset=1, center=center, padding=1290 * vector),
        _Input((3, 5, 8 * vector)),
        _Input((450, 3, 7)),  # too short for vectors
        _Input((3, 5, 7)),
        _Input((2, 1, 2600 * vector + 1)),  # 10 parts per channel
        _Input((259, 17 * vector)),  # 3 tiles of channels in elementwise kernels, 5 in reductions
        _Input((2, 3 * vector, 3, 4), interleaved=True),
        _Input((3, 37, 10, 11), interleaved=True),  # the number of channels is not a multiple of the vector size
        _Input((7, 3 * vector), offset=vector // 2),
        # 396 parts, more than a block has threads. The first parts read a second batch.
        _Input((25400, 17), center=center, is_plain=True),
        _Input((2, 2, 8450 * vector + 1), is_plain=True),  # 33 parts of a planar channel, more than a warp
        # Each thread reads a full batch of vectors.
        _Input((1, 264, 127 * vector), offset=1, is_plain=True),
        _Input((3, 5, 31), unit=smallest / 32, is_plain=True),  # subnormal numbers
    ]


class Exercise:
    """Generates values and calls for a device and a dtype, equal on all machines.

    Means and deviations differ between channels and are far from 0 and 1. Sums do not cancel, so an error in a term
    shows in the sum.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.accumulate = device, dtype, accumulate_dtype(dtype)
        # A permutation of 0 to 2**16, repeated. The division is in float64, which rounds equally on all devices.
        self._noise = (torch.arange(7 * _PRIME, device=device) ** 3 % _PRIME).double() / _PRIME

    def calls(self) -> Iterator[OpCall]:
        smallest = torch.finfo(self.dtype).smallest_normal
        inputs = _inputs(16 // self.dtype.itemsize, smallest)
        activated = sum(not given.is_plain for given in inputs)
        for number, given in enumerate(inputs):
            yield from self._on_input(number, given, range(number, len(ACTIVATIONS), activated))
        yield from self._merging_ranks()
        empty, ones = self._of(torch.empty(0, _CHANNELS, device=self.device), self.dtype), self._full(_CHANNELS)
        nan = torch.full_like(ones, torch.nan, dtype=self.dtype).unsqueeze(0)
        for code in range(1, 1 + len(ACTIVATIONS)):
            yield OpCall("batch_norm_elemt", (nan, None, None, ones, ones, None, code, 0.3))
        yield OpCall("batch_norm_stats", (empty, _IDENTITY, _NUMBER))
        yield OpCall("batch_norm_backward_reduce", (empty, empty, ones, ones, None, _FINGERPRINT))

    def _on_input(self, number: int, given: _Input, numbers: range) -> Iterator[OpCall]:
        shape, channels = given.shape, given.shape[1]
        channel = torch.arange(channels, device=self.device).double()
        deviation = 0.25 * 2 ** (channel % 5)
        center = (4 + 3 * (channel % 7)) * (1 - 2 * (channel % 2)) * given.center
        noise = self._some(*shape, skip=3 * number)
        values = (noise * 4 - 2) * per_channel(deviation, noise) + per_channel(center, noise)
        x = self._placed(values * given.unit, given)
        dy = self._placed((self._some(*shape, skip=999) + noise * 1.5) * given.scale, given)
        mean, invstd = self._of((center - 2.1 * deviation) * given.unit), self._of(3.3 / deviation)
        if given.is_plain:
            x[-1, 1] = torch.nan
            yield OpCall("batch_norm_stats", (x, _IDENTITY, _NUMBER))
            yield OpCall("batch_norm_elemt", (x, None, None, mean, invstd))
            yield OpCall("batch_norm_backward_reduce", (dy, x, mean, invstd, None))
            return
        # Activations get values from -15 to 15, beyond their kinks and the range in which they change.
        other = given._replace(offset=given.offset + (number == 5))
        residual, grad = (self._placed(self._some(*shape, skip=1999) * 16 - 8, other) for _ in range(2))
        places = self._some(shape[0], *shape[2:], skip=99)
        mask = ((places * 400 + 1) * (places < 0.6)).to(torch.uint8).view(torch.bool)  # True is any byte but 0
        mask[..., : given.padding] = False
        # Parameters have the accumulate dtype or a narrower one, or are None.
        narrower = {torch.float32: torch.bfloat16, torch.float64: torch.float32}.get(self.dtype, self.dtype)
        dtype = self.accumulate if number % 2 else narrower
        weight = None if number % 4 == 2 else self._of(self._some(channels, skip=7) + 0.5, dtype)
        bias = None if number % 4 == 3 else self._of(self._some(channels, skip=91) - 8, dtype)
        activations = [[(1 + (each + step) % len(ACTIVATIONS), 0.3) for each in numbers] for step in (0, 4, 8)]

        masked = self._placed(x.masked_fill(~mask.unsqueeze(1), torch.nan), given)
        for values, positions in ((x, None), (masked, mask)):
            yield OpCall("batch_norm_stats", (values, _IDENTITY, _NUMBER, positions))
            if self.dtype != torch.float64 and number % 3 == 0:
                yield OpCall("batch_norm_stats", (values, _FINGERPRINT, 0, positions, True))
        for epilogue in ((), *((residual, *each) for each in activations[0]), *[(residual,)] * (number % 4 == 0)):
            yield OpCall("batch_norm_elemt", (x, weight, bias, mean, invstd, *epilogue))
        reduced = dy, x, mean, invstd, weight
        yield OpCall("batch_norm_backward_reduce", reduced)
        for each in activations[1]:
            arguments = *reduced, _FINGERPRINT, bias, residual, *each, grad
            yield OpCall("batch_norm_backward_reduce", arguments, (grad,))
        totals = torch.cat([600 + channel, (30 + channel) * deviation]) * _LARGE
        sums, wrong = (self._of(torch.cat([totals, self._header(differing)])) for differing in (None, number % 3))
        factors, count = (dy, x, weight, mean, invstd), torch.full((), 1000 * _LARGE, device=self.device)
        record = self._record(3 if number == 1 else 0)
        yield OpCall("batch_norm_backward_elemt", (*factors, wrong, count, _RANKS, record, 4 + number), (record,))
        for options in ((mask,), *((None, bias, *each) for each in activations[2])):
            yield OpCall("batch_norm_backward_elemt", (*factors, sums, count, _RANKS, None, 0, *options))
        yield OpCall("batch_norm_backward_elemt", (*factors, sums, count, _RANKS), (dy,), {"grad_input": dy})

    def _merging_ranks(self) -> Iterator[OpCall]:
        moments = self._some(_RANKS, 2 * _CHANNELS) + 1
        # Few ranks with few values: biased and unbiased variance differ clearly.
        counts = (self._some(_RANKS, 1, skip=7) * 9).floor() * (self._some(_RANKS, 1, skip=77) < 0.3)
        header = torch.tensor([7, 5, 9], device=self.device).expand(_RANKS, 3)
        rows = torch.cat([moments, counts, 0 * counts, header], 1)
        last, every, mean, var = _RANKS - 1, slice(None), _CHANNELS - 10, 2 * _CHANNELS - 10
        low, high, word = range(2 * _CHANNELS, 2 * _CHANNELS + 3)
        table: list[tuple[Any, ...]] = [  # momentum, skip_nonfinite, changed values
            (0.7, False),
            (0.7, False, (last, low, 8), (33, low, 3)),
            (None, False, (every, high, 300), (5, high, 0)),  # more than 2**32 values on most ranks
            (None, True),
            (0.7, False, (every, low, 0), (last, low, 1)),  # a single value
            (0.7, False, (every, low, 0)),
            (0.7, True, (last, low, 8), (last, mean, math.inf)),
            (0.7, True, (last, low, 8), (last, var, math.inf)),
            (0.7, False, (last, word, 8), (last, low, 0.5), (5, low, 0.5)),  # a wrong header precedes wrong counts
            (0.7, False, (20, word + 1, 8)),
            (0.7, False, (33, word + 2, 8)),
            (0.7, False, (last, low, 0.5)),
            (0.7, False, (2, low, -1), (20, low, 0.5)),  # the first rank counts
            (0.7, False, (33, low, math.nan)),
            (0.7, False, (7, low, 2**24)),
            (0.7, False, (last, high, -1)),
            (0.7, False, (3, high, 2**30)),
        ]
        for momentum, skips, *changes in table:
            gathered = self._of(rows)
            for row, column, value in changes:
                gathered[row, column] = value
            yield self._merge(gathered, momentum, skips)
        if self.dtype == torch.float64:  # statistics are never summed
            return
        average, square = moments[0].chunk(2)
        square = square + average.square()
        square[7] = 0.9 * average[7] ** 2  # rounding can leave a negative variance
        for differing, count in (
            (None, 300),
            (None, 300 * _LARGE + 1),
            *((part, 300) for part in range(3)),
            (None, 300.5),
            (None, -1),
        ):
            values = torch.cat([average, square, self._full(1)]).double() * count
            yield self._merge(torch.cat([values, self._header(differing)]), None, differing is not None)

    def _merge(self, gathered: Tensor, momentum: float | None, skips: bool) -> OpCall:
        mean, var = self._of(self._some(2, _CHANNELS, skip=99) + 0.5, self.dtype).unbind()
        buffers, record = (mean.clone(), var.clone(), torch.full((), 3, device=self.device)), self._record()
        arguments = gathered, *buffers, momentum, 0.5, record, skips, _RANKS, _NUMBER
        return OpCall("batch_norm_gather_stats", arguments, (*buffers, record))

    def _header(self, differing: int | None) -> Tensor:
        """Returns the header sums of all ranks. One rank's part number ``differing`` is smaller by 1."""
        other = _FINGERPRINT - (0 if differing is None else 2 ** (12 * differing))
        sums, others = torch.tensor([*map(header_sums_of, (_FINGERPRINT, other))], device=self.device).double()
        return (_RANKS - 1) * sums + others

    def _record(self, earlier: int = 0) -> Tensor:
        """Returns a fault record that contains the kind of an ``earlier`` fault, which ops must not overwrite."""
        record = torch.zeros(8, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")
        record[0] = earlier
        return record

    def _full(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self.accumulate, device=self.device)

    def _of(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a copy of ``values`` in ``dtype``, by default the accumulate dtype."""
        return values.to(dtype or self.accumulate, copy=True)

    def _some(self, *shape: int, skip: int = 0) -> Tensor:
        """Returns float64 noise from 0 to 1, starting at index ``skip``."""
        return self._noise[skip : skip + math.prod(shape)].view(shape)

    def _placed(self, values: Tensor, given: _Input) -> Tensor:
        """Returns ``values`` in the dtype, layout and alignment of an input."""
        memory_format = torch.channels_last if given.interleaved else torch.contiguous_format
        laid_out = self._of(values, self.dtype).contiguous(memory_format=memory_format)
        memory = laid_out.new_empty(given.offset + laid_out.numel())
        return memory.as_strided(laid_out.shape, laid_out.stride(), given.offset).copy_(laid_out)
