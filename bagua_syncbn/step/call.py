"""Records of a call, and the hooks of a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from .. import ops
from ..groups import ALONE
from ..options import NO_MASKS, GivenMasks, Options
from .exchange import Exchange

# Mean (C), inverse deviation (C) and number of values per channel (int64 scalar) over all ranks.
Statistics: TypeAlias = tuple[Tensor, Tensor, Tensor]

# Called with the rows of all ranks or their sum, the number of ranks in the sum, the buffers and the options.
Accumulate: TypeAlias = Callable[[Tensor, int, ops.Buffers, Options], None]


class Call(NamedTuple):
    """Arguments of a call of a layer, or of :func:`~bagua_syncbn.sync_batch_norm`."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    buffers: ops.Buffers
    options: Options
    training: bool
    """Whether batch statistics normalize the input."""
    group: Any
    """Ranks to compute the statistics over: a GroupSpec; :data:`ALONE` in evaluation."""
    layer: nn.Module | None
    masks: GivenMasks = NO_MASKS
    accumulate: Accumulate | None = None
    """Takes the statistics instead of the buffers."""

    @property
    def synchronizes(self) -> bool:
        """True for a training call over the ranks of a group. Code asks here, never the mode of the layer."""
        return self.group is not ALONE

    @property
    def tracked_buffers(self) -> ops.Buffers:
        """Buffers that a call in training updates."""
        # num_batches_tracked counts batches of running statistics: without them it stays.
        return ops.NO_BUFFERS if self.buffers.running_mean is None else self.buffers

    @property
    def has_masks(self) -> bool:
        """True if there is a mask, lengths, or a function that may return one of them."""
        return callable(self.masks) or self.masks[0] is not None or self.masks[1] is not None


@dataclass(slots=True)
class Normalization:
    """How to normalize an input: statistics, options and exchange, without the differentiable tensors."""

    options: Options
    exchange: Exchange | None  # None if the statistics are constants
    layer: nn.Module | None
    masking: ops.Masking | None = None
    # None under a transform of torch.func, until the differentiable form has gathered them.
    statistics: Statistics | None = None

    @property
    def positions(self) -> Tensor | None:
        """Positions of the input that count, in the form that the ops take; None for all."""
        return None if self.masking is None else self.masking.positions

    def for_recompute(self) -> Normalization:
        """Returns the normalization for a recomputation of the call."""
        return self


class Hooks(NamedTuple):
    """Functions that extras set for the calls of a thread."""

    prepare: Callable[[Call, Callable[[], Any]], Any] | None = None
    """Called with a call and a function that prepares it. Returns the result of the function, or in the recomputation
    of a checkpoint the result of the first run."""

    see_output: Callable[..., None] | None = None
    """Called with output, input, weight, bias, residual and normalization of each call."""


class _Thread(threading.local):
    hooks: Hooks | None = None  # None without any hook: a plain call checks once


this_thread = _Thread()


def set_hook(name: str, function: Callable[..., Any] | None) -> None:
    """Sets a hook of this thread, a field of :class:`Hooks`; None removes it."""
    hooks = (this_thread.hooks or Hooks())._replace(**{name: function})
    this_thread.hooks = hooks if any(hooks) else None


def follow(output: Tensor, residual: Tensor | None, options: Options, masking: ops.Masking | None = None) -> Tensor:
    """Returns ``output`` with residual, activation and mask applied by torch operations."""
    if residual is not None:
        residual = residual if masking is None else masking.clear_outputs(residual)
        output = output + residual.to(output.dtype)
    if options.activation is not None:
        output = options.activation.of(output)
    return output if masking is None else masking.clear_outputs(output)
