"""Records of a call: arguments and normalization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from .. import _ops as ops
from .._groups import GroupSpec
from .._ops.options import Options
from .._torch.autograd import Mode
from .exchange import Exchange

# Input, weight, bias and residual of a call.
Tensors: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]

# mask and zero_masked of a call; or a function that returns the checked masking for an input.
GivenMask: TypeAlias = tuple[Tensor | None, bool] | Callable[[Tensor], Any]

NO_MASK: GivenMask = None, False

# Mean (C), inverse deviation (C) and number of values per channel (int64 scalar) over all ranks.
Statistics: TypeAlias = tuple[Tensor, Tensor, Tensor]

# Called with the statistics of all ranks and the options.
Accumulate: TypeAlias = Callable[[ops.Received, Options], None]


class Call(NamedTuple):
    """Arguments of a call of a layer, or of :func:`~bagua_syncbn.sync_batch_norm`."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    buffers: ops.Buffers
    options: Options
    uses_batch: bool
    """Whether batch statistics normalize the input, instead of running statistics."""
    group: GroupSpec | None
    """Ranks that share statistics; None in evaluation, where nothing synchronizes."""
    layer: nn.Module | None
    mode: Mode
    mask: GivenMask = NO_MASK
    accumulate: Accumulate | None = None
    """If given, receives the statistics instead of the buffers."""

    @property
    def tracked_buffers(self) -> ops.Buffers:
        """Buffers that a training call updates. The counter counts updates of the running statistics."""
        is_tracked = self.buffers.running_mean is not None and self.accumulate is None
        return self.buffers if is_tracked else ops.NO_BUFFERS

    @property
    def has_mask(self) -> bool:
        """True if there is a mask, or a function that may return one."""
        return callable(self.mask) or self.mask[0] is not None


class Masking(NamedTuple):
    """The checked mask of a call."""

    positions: Tensor
    """Valid positions, as a contiguous bool (N, \\*)."""
    zeroes: bool
    """Whether the output is 0 at all other positions."""

    def clear(self, values: Tensor) -> Tensor:
        """Returns ``values`` (N, C, \\*) with 0 at invalid positions."""
        return values.where(self.positions.unsqueeze(1), 0)

    def clear_outputs(self, values: Tensor) -> Tensor:
        """Returns ``values`` (N, C, \\*) with 0 at the positions where the output is 0."""
        return self.clear(values) if self.zeroes else values


@dataclass(slots=True)
class Normalization:
    """How to normalize an input: statistics, options and exchange, but no differentiable tensors."""

    options: Options
    exchange: Exchange | None
    """None if the statistics are constants."""
    layer: nn.Module | None
    masking: Masking | None = None
    is_traced: bool = False
    """Whether torch.compile traces the call. It can fuse the plain definitions of the ops with the code around them."""
    statistics: Statistics | None = None
    """None under a torch.func transform, until the differentiable form has gathered them."""
    number: int = 0
    """Number of the forward's message in the group, see :meth:`.Exchange.open`."""


def apply_epilogue(output: Tensor, residual: Tensor | None, options: Options, masking: Masking | None = None) -> Tensor:
    """Returns ``output`` with residual, activation and mask applied by torch operations."""
    if residual is not None:
        residual = residual if masking is None else masking.clear_outputs(residual)
        output = output + residual.to(output.dtype)
    if options.activation is not None:
        output = options.activation.of(output)
    return output if masking is None else masking.clear_outputs(output)
