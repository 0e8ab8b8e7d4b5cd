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
_CALLER, _CALL, _FINGERPRINT = 7 * 2**24 + 5, 9, 3 + 5 * 2**12 + 7 * 2**24
_RANKS, _CHANNELS = 35, 300  # more than a warp, and more than a block


class Call(NamedTuple):
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


def _inputs(vector: int) -> list[_Input]:
    """Returns inputs for scalar loads and for loads of ``vector`` values.

    Each kernel runs on inputs with one part and with several parts per channel. Rows begin and end within vectors, and
    the last tile of channels is incomplete. An input's position in the list determines its activation. No value may be
    near a kink of its activation.
    """
    return [
        _Input((2, 3, 768 * vector + 1), scale=9),  # bias gradients overflow float16
        _Input((1, 2, 1536 * vector + 3), offset=1),
        _Input((3, 5, 8 * vector)),
        _Input((450, 3, 7)),  # too short for vectors
        _Input((3, 5, 7)),
        _Input((2, 1, 10400 * vector + 1)),  # 40 parts per channel
        _Input((2048 // vector + 131, 17 * vector)),  # three tiles, five in reductions
        _Input((2, 3 * vector, 3, 4), interleaved=True),
        _Input((3, 37, 10, 11), interleaved=True),  # the number of channels is not a multiple of the vector size
        _Input((7, 3 * vector), offset=1),
    ]


class Exercise:
    """Values and calls for a device and a dtype, the same on every machine.

    Means and deviations differ between channels and are far from 0 and 1. Sums do not cancel, so an error in a term
    shows in the sum.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.accumulate = device, dtype, accumulate_dtype(dtype)
        # A permutation of 0 to 2**16, repeated. Divided in float64, which rounds alike everywhere.
        self._noise = (torch.arange(4 * _PRIME, device=device) ** 3 % _PRIME).double() / _PRIME

    def calls(self) -> Iterator[Call]:
        for number, given in enumerate(_inputs(min(16 // self.dtype.itemsize, 8))):
            yield from self._on_input(number, given)
        yield from self._merging_ranks()
        empty, ones = self._of(torch.empty(0, _CHANNELS, device=self.device), self.dtype), self._full(_CHANNELS)
        yield Call("batch_norm_stats", (empty, _CALLER, _CALL))
        yield Call("batch_norm_backward_reduce", (empty, empty, ones, ones, None, _FINGERPRINT))

    def _on_input(self, number: int, given: _Input) -> Iterator[Call]:
        shape, channels = given.shape, given.shape[1]
        channel = torch.arange(channels, device=self.device).double()
        deviation, center = 0.25 * 2 ** (channel % 5), (4 + 3 * (channel % 7)) * (1 - 2 * (channel % 2))
        noise = self._some(*shape, skip=3 * number)
        x = self._placed((noise * 4 - 2) * per_channel(deviation, noise) + per_channel(center, noise), given)
        dy = self._placed((self._some(*shape, skip=999) + noise * 1.5) * given.scale, given)
        residual, grad = (self._placed(self._some(*shape, skip=1999) * 2 - 1, given) for _ in range(2))
        mask = self._some(shape[0], *shape[2:], skip=99) < 0.6
        mean, invstd = self._of(center - 2.1 * deviation), self._of(0.43 / deviation)
        # Parameters have the accumulate dtype or the input's, or are None.
        dtype = self.accumulate if number % 2 else self.dtype
        weight = None if number % 4 == 2 else self._of(self._some(channels, skip=7) + 0.5, dtype)
        bias = None if number % 4 == 3 else self._of(self._some(channels, skip=91) - 1.5, dtype)
        activations = [(1 + (number + step) % len(ACTIVATIONS), 0.3) for step in (0, 3, 8)]

        masked = self._placed(x.masked_fill(~mask.unsqueeze(1), torch.nan), given)
        for values, positions in ((x, None), (masked, mask)):
            yield Call("batch_norm_stats", (values, _CALLER, _CALL, positions))
            if self.dtype != torch.float64 and number % 3 == 0:
                yield Call("batch_norm_stats", (values, _FINGERPRINT, 0, positions, True))
        for epilogue in ((), (residual, *activations[0]), (residual,))[: 2 + (number % 4 == 0)]:
            yield Call("batch_norm_elemt", (x, weight, bias, mean, invstd, *epilogue))
        reduced = dy, x, mean, invstd, weight
        yield Call("batch_norm_backward_reduce", reduced)
        arguments = *reduced, _FINGERPRINT, bias, residual, *activations[1], grad
        yield Call("batch_norm_backward_reduce", arguments, (grad,))
        sums = self._of(torch.cat([600 + channel, (300 + channel) * deviation, self._header(2)]))
        factors, count = (dy, x, weight, mean, invstd), torch.full((), 1000, device=self.device)
        wrong, record = sums.clone(), self._record()  # a part of the header differs between ranks
        wrong[2 * (channels + number % 3)] += 1
        yield Call("batch_norm_backward_elemt", (*factors, wrong, count, 2, record, 4 + number), (record,))
        for options in ((mask,), (None, bias, *activations[2])):
            yield Call("batch_norm_backward_elemt", (*factors, sums, count, 2, None, 0, *options))
        yield Call("batch_norm_backward_elemt", (*factors, sums, count, 2), (dy,), {"grad_input": dy})

    def _merging_ranks(self) -> Iterator[Call]:
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
            (None, False, (every, high, 1), (5, high, 0)),  # more than 2**24 values
            (None, True),
            (0.7, False, (every, low, 0), (last, low, 1)),  # a single value
            (0.7, False, (every, low, 0)),
            (0.7, True, (last, low, 8), (last, mean, math.inf)),
            (0.7, True, (last, low, 8), (last, var, math.inf)),
            (0.7, False, (last, word, 8), (5, low, 0.5)),  # a wrong header precedes a wrong count
            (0.7, False, (20, word + 1, 8)),
            (0.7, False, (33, word + 2, 8)),
            (0.7, False, (last, low, 0.5)),
            (0.7, False, (2, low, -1)),
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
        count, header = self._full(1) * 300, self._header(_RANKS)
        sums = torch.cat([300 * average, 300 * square, count, header]).double()
        for column, change in ((0, 0.0), (-6, 1.0), (-4, 1.0), (-2, 1.0), (-7, 0.5), (-7, -301.0)):  # header, count
            gathered = sums.clone()
            gathered[column] += change
            yield self._merge(gathered, None, change != 0)

    def _merge(self, gathered: Tensor, momentum: float | None, skips: bool) -> Call:
        mean, var = self._of(self._some(2, _CHANNELS, skip=99) + 0.5, self.dtype).unbind()
        buffers, record = (mean.clone(), var.clone(), torch.full((), 3, device=self.device)), self._record()
        arguments = gathered, *buffers, momentum, 0.5, record, skips, _RANKS, _CALL
        return Call("batch_norm_gather_stats", arguments, (*buffers, record))

    def _header(self, ranks: int) -> Tensor:
        return torch.tensor(header_sums_of(_FINGERPRINT), device=self.device).double() * ranks

    def _record(self) -> Tensor:
        return torch.zeros(8, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")

    def _full(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self.accumulate, device=self.device)

    def _of(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a copy of ``values`` in ``dtype``, by default the accumulate dtype."""
        return values.to(dtype or self.accumulate, copy=True)

    def _some(self, *shape: int, skip: int = 0) -> Tensor:
        """Returns values from 0 to 1 in float64, starting with number ``skip``."""
        return self._noise[skip : skip + math.prod(shape)].view(shape)

    def _placed(self, values: Tensor, given: _Input) -> Tensor:
        """Returns ``values`` in the dtype, layout and alignment of an input."""
        memory_format = torch.channels_last if given.interleaved else torch.contiguous_format
        laid_out = self._of(values, self.dtype).contiguous(memory_format=memory_format)
        memory = laid_out.new_empty(given.offset + laid_out.numel())
        return memory.as_strided(laid_out.shape, laid_out.stride(), given.offset).copy_(laid_out)
