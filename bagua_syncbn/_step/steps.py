"""Steps: ways to compute a call. ``functional.py`` chooses a step, and the layer keeps it for its next calls."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from .. import _ops as ops
from .._ops.options import Options
from .call import Call, Masking, Normalization, Statistics, apply_epilogue
from .checks import named
from .derivatives import differentiable_batch_norm
from .exchange import Exchange
from .masks import masking_of
from .normalize import normalize, normalize_in_graph


class Step:
    """One way to compute a call, with everything decided that does not depend on values.

    :meth:`prepare` gets the statistics, :meth:`finish` the output. Checkpoints repeat only ``finish``, which then
    neither communicates nor updates buffers, see :meth:`.Normalization.for_repetition`.
    """

    is_compiled = False
    """Whether torch.compile traces the call. It can fuse the plain definitions of the ops with the code around them."""

    def __init__(self, options: Options, exchange: Exchange | None = None, key: tuple[Any, ...] | None = None) -> None:
        self.options = options
        self.exchange = exchange  # None if statistics are constants
        self.key = key  # properties of the calls that the step fits; None if it is not kept

    @abstractmethod
    def prepare(self, call: Call) -> Normalization:
        """Returns the statistics for ``call``."""

    @abstractmethod
    def finish(self, call: Call, norm: Normalization) -> Tensor:
        """Returns the output of ``call``, normalized with ``norm``."""


def masking_in(call: Call) -> Masking | None:
    """Returns the checked mask of ``call``, which has one. Errors name the layer."""
    assert call.mask is not None
    try:
        return masking_of(call.input, call.mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise named(error, call.layer) from None


class RankStep(Step):
    """Training with the statistics of all ranks' batches."""

    exchange: Exchange
    finish = staticmethod(normalize)

    def prepare(self, call: Call) -> Normalization:
        exchange, masking = self.exchange, None if call.mask is None else masking_in(call)
        identity, number = exchange.open()
        # Arguments that are not passed cost nothing.
        extra = () if masking is None and not exchange.summed else (masking and masking.positions, exchange.summed)
        row = ops.batch_norm_stats(call.input, identity, number, *extra)
        merge = call.accumulate or (ops.merge_in_graph if self.is_compiled else ops.merge_stats)
        statistics = exchange.share(row, "forward", number, merge, call.buffers, self.options)
        return Normalization(self, call.layer, masking, statistics, number)


class CompiledStep(RankStep):
    """Training in a graph of torch.compile."""

    is_compiled = True

    def __init__(self, options: Options, exchange: Exchange, key: tuple[Any, ...] | None = None) -> None:
        # Leaves activation and residual to the compiler, which decides what to fuse and recompute.
        super().__init__(options._replace(activation=None), exchange, key)
        self._epilogue = options

    def prepare(self, call: Call) -> Normalization:
        return super().prepare(call._replace(input=call.input.detach()))

    def finish(self, call: Call, norm: Normalization) -> Tensor:
        output = normalize_in_graph(call, norm)
        return apply_epilogue(output, call.residual, self._epilogue, norm.masking)


class TransformedStep(RankStep):
    """Training under a transform of torch.func or in forward mode, with derivatives of any order."""

    def prepare(self, call: Call) -> Normalization:
        return Normalization(self, call.layer, None if call.mask is None else masking_in(call))

    def finish(self, call: Call, norm: Normalization) -> Tensor:
        def gather(input: Tensor) -> Statistics:
            if norm.statistics is None:  # else a checkpoint repeats the call
                found = RankStep.prepare(self, call._replace(input=input, mask=lambda _: norm.masking))
                norm.statistics, norm.number = found.statistics, found.number
            assert norm.statistics is not None
            return norm.statistics

        return differentiable_batch_norm(*call[:4], norm, gather)
