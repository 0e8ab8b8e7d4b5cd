"""Calls of the ops by which every CUDA kernel of a dtype runs: their results, to be compared with others."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.activations import ACTIVATIONS, activation_of
from ..ops.definition import accumulate_dtype, per_channel
from ..ops.words import parts_of

_PRIME = 2**16 + 1
_CALLER, _CALL, _FINGERPRINT = 7 * 2**24 + 5, 9, 3 + 5 * 2**12 + 7 * 2**24


class _Input(NamedTuple):
    shape: tuple[int, ...]  # (N, C, L) for planar, (N, C) and (N, C, H, W) for interleaved layout
    offset: int = 0  # values by which it begins after a multiple of 16 bytes
    has_lengths: bool = False  # for a mask, else positions


def _inputs(vector: int) -> list[_Input]:
    """Returns inputs in both layouts, whose values are taken one at a time and as vectors of ``vector`` values.

    Each kernel has one part of its input in some call and several in another one: at least three in planar layout, and
    more than the last block of an interleaved reduction loads at once. Rows begin and end within vectors, and the last
    tile of channels is not full.
    """
    return [
        _Input((2, 3, 768 * vector + 1)),
        _Input((1, 2, 1536 * vector + 3), offset=1, has_lengths=True),  # vectors where all tensors begin so
        _Input((3, 5, 8 * vector)),
        _Input((450, 3, 7), has_lengths=True),  # too short for vectors
        _Input((3, 5, 7)),
        _Input((8192 // vector + 131, 5 * vector)),
        _Input((2, 3 * vector, 3, 4), has_lengths=True),
        _Input((3, 37, 10, 11), has_lengths=True),  # the number of channels is no multiple of a vector
        _Input((7, 3 * vector), offset=1),
    ]


class Exercise:
    """Values for the ops, the same on every machine.

    Means and deviations are far from 0 and 1 and differ between channels. The terms of no sum cancel: what is small
    beside them is small beside the sum.

    Args:
        device: where the ops compute.
        dtype: of the inputs.
        widen: gives all values in float64, after rounding to the dtype that they would have.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, widen: bool) -> None:
        self.device, self.dtype, self.widen = device, dtype, widen
        # A permutation, because 3 does not divide the prime less 1; divided in float64, which rounds alike everywhere.
        self._noise = (torch.arange(_PRIME, device=device) ** 3 % _PRIME).double() / _PRIME
        self._parts = torch.tensor(parts_of(_FINGERPRINT), device=device)

    def results(self, ops: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields the results of ``ops``, each with the name of its op."""
        for number, given in enumerate(_inputs(min(16 // self.dtype.itemsize, 8))):
            yield from self._of_input(ops, number, given)
        yield from self._of_ranks(ops)
        yield from self._without_values(ops)

    def _of_input(self, ops: Any, number: int, given: _Input) -> Iterator[tuple[str, Tensor]]:
        shape, channels = given.shape, given.shape[1]
        channel = torch.arange(channels, device=self.device).double()
        deviation, center = 0.25 * 2 ** (channel % 5), (4 + 3 * (channel % 7)) * (1 - 2 * (channel % 2))
        noise = self._some(*shape, skip=3 * number)
        values = (noise * 4 - 2) * per_channel(deviation, noise)
        x = self._placed(values + per_channel(center, noise), given.offset)
        dy = self._placed(self._some(*shape, skip=999) + noise * 1.5, given.offset)
        residual = self._placed(self._some(*shape, skip=1999) * 2 - 1, given.offset)
        mask = self._some(shape[0], *shape[2:], skip=99) < 0.6
        if given.has_lengths:
            mask = (self._some(shape[0], skip=99) * (shape[-1] + 1)).long()
        mean, invstd = self._of(center - 2.1 * deviation), self._of(0.43 / deviation)
        # Parameters have the accumulate dtype or that of the input, or there are none.
        dtype = accumulate_dtype(self.dtype) if number % 2 else self.dtype
        weight = None if number % 4 == 2 else self._of(self._some(channels, skip=7) + 0.5, dtype)
        bias = None if number % 4 == 3 else self._of(self._some(channels, skip=77) - 1.5, dtype)

        for where in (None, mask):
            yield "batch_norm_stats", ops.batch_norm_stats(x, _CALLER, _CALL, where)
            if self.dtype != torch.float64:
                yield "batch_norm_stats", self._of(ops.batch_norm_stats(x, _FINGERPRINT, 0, where, True))

        factors = x, weight, bias, mean, invstd
        for after in ((), (residual, *_activation(number))):
            yield "batch_norm_elemt", ops.batch_norm_elemt(*factors, *after)

        grad = self._placed(torch.zeros_like(noise), given.offset)
        for through in ((), (_FINGERPRINT, bias, residual, *_activation(number + 3), grad)):
            for result in ops.batch_norm_backward_reduce(dy, x, mean, invstd, weight, *through):
                yield "batch_norm_backward_reduce", result
        yield "batch_norm_backward_reduce", grad

        factors = dy, x, weight, mean, invstd
        count = torch.full((), 1000, device=self.device)
        sums = self._of(torch.cat([600 + channel, (300 + channel) * deviation, 2 * self._parts]))
        for options in ((mask,), (None, bias, *_activation(number + 6))):
            dx = ops.batch_norm_backward_elemt(*factors, sums, count, 2, None, 0, *options)
            yield "batch_norm_backward_elemt", dx
        ops.batch_norm_backward_elemt(*factors, sums[: 2 * channels], count, grad_input=dy)
        yield "batch_norm_backward_elemt", dy
        if number == 0:
            sums[-1] += 1  # ranks differ
            dx = ops.batch_norm_backward_elemt(*factors, sums, count, 2)
            yield "batch_norm_backward_elemt", dx.isnan().double()

    def _of_ranks(self, ops: Any) -> Iterator[tuple[str, Tensor]]:
        """As :meth:`results`, for the merge: of more ranks than a warp has threads, and more channels than a block."""
        ranks, channels = 35, 70
        moments, words = self._some(ranks, 2 * channels) + 1, torch.tensor([7, 5, 9], device=self.device)
        # Few values, of few ranks, which show in the unbiased variance; and more than 2**24.
        low = (self._some(ranks, 1, skip=7) * 9).floor() * (self._some(ranks, 1, skip=77) < 0.3)
        high = (self._some(ranks, 1, skip=777) * 2).floor()
        few, many = (self._of(torch.cat([moments, low, each * high, words.expand(ranks, 3)], 1)) for each in (0, 1))
        wrong, infinite = few.clone(), few.clone()
        wrong[20, -1] += 1
        infinite[20, 2] = torch.inf
        given = [(few, 0.7, False), (many, None, False), (wrong, 0.7, False), (infinite, 0.7, True)]
        if self.dtype != torch.float64:
            mean, square = moments[0].chunk(2)
            sums = torch.cat([300 * mean, 300 * (square + mean.square()), low.new_full((1,), 300), ranks * self._parts])
            wrong = sums.clone()
            wrong[-2] += 1
            given += [(sums, 0.7, False), (wrong, None, True)]
        for rows, momentum, skips in given:
            running_mean, running_var = self._of(self._some(2, channels, skip=99) + 0.5, self.dtype).unbind()
            batches = torch.full((), 3, device=self.device)
            buffers = running_mean, running_var, batches
            merged = ops.batch_norm_gather_stats(rows, *buffers, momentum, 0.5, None, skips, ranks)
            for result in (*merged, *buffers):
                result = result if result.is_floating_point() else result.double()
                yield "batch_norm_gather_stats", result.nan_to_num(-1, -2)

    def _without_values(self, ops: Any) -> Iterator[tuple[str, Tensor]]:
        x, ones = (
            self._of(torch.empty(0, 5, device=self.device), self.dtype),
            self._of(torch.ones(5, device=self.device)),
        )
        yield "batch_norm_stats", ops.batch_norm_stats(x, _CALLER, _CALL)
        for result in ops.batch_norm_backward_reduce(x, x, ones, ones, None, _FINGERPRINT):
            yield "batch_norm_backward_reduce", result

    def _of(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a copy of ``values`` in ``dtype``, by default the accumulate dtype."""
        copy = values.to(dtype or accumulate_dtype(self.dtype), copy=True)
        return copy.double() if self.widen else copy

    def _some(self, *shape: int, skip: int = 0) -> Tensor:
        """Returns values from 0 to 1 in float64, the first but ``skip`` ones."""
        return self._noise[skip : skip + math.prod(shape)].view(shape)

    def _placed(self, values: Tensor, offset: int) -> Tensor:
        """Returns ``values`` as an input, which begins ``offset`` values after a multiple of 16 bytes."""
        memory_format = torch.channels_last if values.dim() == 4 else torch.contiguous_format
        laid = self._of(values, self.dtype).contiguous(memory_format=memory_format)
        memory = laid.new_empty(offset + laid.numel())
        return memory.as_strided(laid.shape, laid.stride(), offset).copy_(laid)


def _activation(number: int) -> tuple[int, float]:
    activation = activation_of(ACTIVATIONS[number % len(ACTIVATIONS)])
    assert activation is not None
    return activation.code, activation.parameter
