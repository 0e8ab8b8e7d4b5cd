"""By what means a call talks to other ranks, and the ops around its messages, see :mod:`bagua_syncbn.sync`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..communicators import Communicator
from ..sync import CallSite, RankSync, call_site, compiled_words, kind_of, note_compilation, options_of
from ..sync.faults import ON_CPU, record_on


def _stats(input: Tensor, masking: ops.Masking | None, *header: int) -> Tensor:
    """Returns the statistics of ``input``, with ``masking`` of the positions that count."""
    if masking is None:
        return ops.batch_norm_stats(input, *header)  # type: ignore[no-any-return]
    return ops.batch_norm_masked_stats(input, masking.positions, *header)  # type: ignore[no-any-return]


class Exchange(RankSync):
    """The messages of one call of a layer over several ranks, with the ops that make them and take them apart."""

    elementwise: Any = ops  # where the ops without sums are
    lays_out = True  # gradients like the input; a compiler lays out tensors by itself
    masking: ops.Masking | None = None
    zeroed: Tensor | None = None  # of the masking

    _stats: Any = ops.batch_norm_stats
    _backward_elemt: Any = ops.batch_norm_backward_elemt

    __slots__ = ()

    def statistics(self, input: Tensor, options: ops.MergeOptions) -> ops.MergedStats:
        """Returns the statistics of all ranks' inputs.

        Raises:
            RuntimeError: the ranks make different calls, or the collective failed; on CPU no buffer has changed.
        """
        counter = options.num_batches_tracked if options.momentum is None else None
        gathered = self.gather(self._stats(input, *self.header()), counter)
        record = self.record
        merged = ops.merge_stats(gathered, options, None if record is None else record.tensor)
        if ON_CPU.kind.value:
            self.check(gathered, counter)
        return merged

    def backward_elemt(
        self,
        grad: Tensor,
        input: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        sums: Tensor,
        count: Tensor,
        op: Any = None,
    ) -> Tensor:
        """Calls the op that takes the sums of all ranks apart; raises, on CPU, if it found that the ranks differ.

        The ``op`` may be another one that does.
        """
        op, record = op or self._backward_elemt, self.record
        last = (record.tensor,) if record is ON_CPU else self.sums_record()
        grad_input: Tensor = op(grad, input, weight, mean, invstd, sums, count, self.size, *last)
        if ON_CPU.kind.value:
            self.check_sums()
        return grad_input


class MaskedExchange(Exchange):
    """Those of a call in which not all positions count."""

    masking: ops.Masking

    __slots__ = ("masking", "zeroed")

    def __init__(self, site: CallSite, masking: ops.Masking) -> None:
        super().__init__(site)
        self.masking, self.zeroed = masking, masking.zeroed()

    def _stats(self, input: Tensor, *header: int) -> Tensor:
        return _stats(input, self.masking, *header)

    def _backward_elemt(self, *arguments: Any) -> Tensor:
        tensors, last = arguments[:7], arguments[7:]
        positions, zeroes = self.masking
        return ops.batch_norm_masked_backward_elemt(*tensors, positions, zeroes, *last)  # type: ignore[no-any-return]


class InGraph:
    """The messages of a call that torch.compile traces: no sizes are agreed upon, and the headers are constants."""

    # Operations of torch, which the compiler fuses with what is around them. The sums over values stay ops of ours.
    elementwise: Any = ops.reference
    lays_out = False

    def __init__(
        self,
        layer: nn.Module | None,
        input: Tensor,
        options: ops.MergeOptions,
        communicator: Communicator,
        masking: ops.Masking | None,
    ) -> None:
        kind, shared = kind_of(layer), options_of(layer, input, options)
        note_compilation(getattr(communicator, "name", None), kind, *shared)
        self.masking, self.zeroed = masking, None if masking is None else masking.zeroed()
        self._speaker, self._fingerprint = compiled_words(kind, shared, communicator.size)
        self.communicator = communicator

    def statistics(self, input: Tensor, options: ops.MergeOptions) -> ops.MergedStats:
        packed = _stats(input, self.masking, self._speaker, 0)
        gathered = self.communicator.all_gather(packed)
        # Apart from the buffers: what a graph repeats in backward must not depend on what changed in forward.
        merged = ops.merge_stats(gathered, options.without_buffers())
        record = record_on(input.device)
        ops.merge_stats(gathered, options, None if record is None else record.tensor)
        return merged

    def fingerprint(self) -> int:
        return self._fingerprint

    def all_reduce(self, sums: Tensor) -> Tensor:
        return self.communicator.all_reduce(sums)

    def backward_elemt(self, *arguments: Any) -> Tensor:
        # Sums of other calls become NaN, with no note of it: a graph that keeps for backward what each forward may
        # write to could not run two forwards before the backward of the first.
        size = self.communicator.size
        if self.masking is not None:
            positions, zeroes = self.masking
            return self.elementwise.batch_norm_masked_backward_elemt(*arguments, positions, zeroes, size)  # type: ignore[no-any-return]
        return self.elementwise.batch_norm_backward_elemt(*arguments, size)  # type: ignore[no-any-return]

    def total(self, packed: Tensor) -> Tensor:
        return self.communicator.all_reduce(packed)


class Alone:
    """A group of one: nothing to say."""

    elementwise: Any = ops
    lays_out = True

    def __init__(self, masking: ops.Masking | None = None) -> None:
        self.masking, self.zeroed = masking, None if masking is None else masking.zeroed()

    def statistics(self, input: Tensor, options: ops.MergeOptions) -> ops.MergedStats:
        return ops.merge_stats(_stats(input, self.masking).unsqueeze(0), options)

    def fingerprint(self) -> None:
        return None

    def all_reduce(self, sums: Tensor) -> Tensor:
        return sums

    def backward_elemt(self, *arguments: Any, op: Any = None) -> Tensor:
        if self.masking is not None:
            positions, zeroes = self.masking
            return self.elementwise.batch_norm_masked_backward_elemt(*arguments, positions, zeroes)  # type: ignore[no-any-return]
        return (op or self.elementwise.batch_norm_backward_elemt)(*arguments)  # type: ignore[no-any-return]

    def total(self, packed: Tensor) -> Tensor:
        return packed


class AloneInGraph(Alone):
    """A group of one in a call that torch.compile traces."""

    elementwise = ops.reference
    lays_out = False


class Given(Alone):
    """Statistics that do not depend on the input: nothing passes through them."""


_ALONE = Alone()

AnyExchange = Exchange | InGraph | Alone


def exchange_of(
    layer: nn.Module | None,
    input: Tensor,
    options: ops.MergeOptions,
    communicator: Communicator,
    masking: ops.Masking | None = None,
) -> AnyExchange:
    """Returns by what means a call of ``layer`` talks to the ranks of ``communicator``.

    With ``masking`` the statistics, and what passes through them, are of the positions that count alone.
    """
    if torch.compiler.is_compiling():
        if communicator.size == 1:
            return AloneInGraph(masking)
        return InGraph(layer, input, options, communicator, masking)
    if communicator.size == 1:
        return _ALONE if masking is None else Alone(masking)
    site = call_site(layer, input, options, communicator)
    return Exchange(site) if masking is None else MaskedExchange(site, masking)
