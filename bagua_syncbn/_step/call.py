"""Records of a call: arguments, mask and normalization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from .. import _ops as ops
from .._groups import GroupSpec
from .._ops.options import Options
from .._torch.autograd import Mode

if TYPE_CHECKING:
    from .steps import Step

# Input, weight, bias and residual of a call.
Tensors: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]

# mask and zero_masked of a call; or a function that returns the checked masking for an input.
GivenMask: TypeAlias = tuple[Tensor | None, bool] | Callable[[Tensor], Any]

# Mean (C), inverse deviation (C) and number of values per channel (int64 scalar) over all ranks.
Statistics: TypeAlias = tuple[Tensor, Tensor, Tensor]

# Merges the ranks' statistics and updates the buffers.
Merge: TypeAlias = Callable[[ops.Received, ops.Buffers, Options], Statistics]


class Call(NamedTuple):
    """Arguments of a call of a layer, or of :func:`~bagua_syncbn.sync_batch_norm`."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    buffers: ops.Buffers
    options: Options
    """Options as given; steps hold the checked ones."""
    uses_batch: bool
    """Whether batch statistics normalize the input, instead of running statistics."""
    group: GroupSpec | None
    """Ranks that share statistics; None in evaluation, where nothing synchronizes."""
    layer: nn.Module | None
    mode: Mode
    mask: GivenMask | None = None
    accumulate: Merge | None = None
    """If given, merges the statistics and keeps them, instead of updating the buffers."""

    @property
    def has_mask(self) -> bool:
        """True if there is a mask, or a function that may return one."""
        return self.mask is not None and (callable(self.mask) or self.mask[0] is not None)


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
    """Statistics and mask of a call. Checkpoints keep them for repetitions, so they hold no differentiable tensors."""

    step: Step
    layer: nn.Module | None
    masking: Masking | None = None
    statistics: Statistics | None = None
    """None if F.batch_norm computes them, or takes them from ``buffers``; under a torch.func transform, None until the
    differentiable form has gathered them."""
    number: int = 0
    """Number of the forward's message in the group, see :meth:`.Exchange.open`."""
    buffers: ops.Buffers = ops.NO_BUFFERS
    """Buffers of F.batch_norm: those of the call, or in a repetition copies without a counter."""

    def for_repetition(self) -> Normalization:
        """Returns the normalization for a repetition of the call: F.batch_norm then does not update the buffers."""
        mean, var, _ = self.buffers
        if mean is None or var is None:
            return self
        return replace(self, buffers=(mean.clone(), var.clone(), None))


def apply_epilogue(output: Tensor, residual: Tensor | None, options: Options, masking: Masking | None) -> Tensor:
    """Returns ``output`` with residual, activation and mask applied by torch operations."""
    if residual is not None:
        residual = residual if masking is None else masking.clear_outputs(residual)
        output = output + residual.to(output.dtype)
    if options.activation is not None:
        output = options.activation.of(output)
    return output if masking is None else masking.clear_outputs(output)
