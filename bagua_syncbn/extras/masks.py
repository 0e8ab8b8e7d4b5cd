"""Masks for all layers of a model, so that no ``forward`` has to pass them on."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks import check_callable, check_flag, check_is_tensor
from ..masks import broadcasts, hint, size_of_mask
from ..models import check_module
from ..options import Masks
from ..step.call import Call
from ..sync_batchnorm import SyncBatchNorm

MaskRule = Callable[[Tensor, torch.Size], Tensor | None]


class _ModelMask(NamedTuple):
    """Mask or lengths for all layers of a model, as given to :func:`masked`."""

    mask: Tensor | None
    lengths: Tensor | None
    rule: MaskRule | None
    zero_masked: bool

    def __call__(self, go: Callable[[Call], Tensor], call: Call) -> Tensor:
        """Gives ``call`` the mask, unless it has one."""
        if callable(call.masks):
            return go(call)
        mask, lengths, zero_masked = call.masks
        if mask is not None or lengths is not None:
            return go(call)
        check_flag("zero_masked", zero_masked)
        return go(call._replace(masks=self.for_input))

    def for_input(self, input: Tensor) -> Masks:
        """Returns mask, lengths and ``zero_masked`` for a call with ``input``."""
        if self.lengths is not None:
            assert self.rule is not None
            return None, self.rule(self.lengths, input.shape), self.zero_masked
        assert self.mask is not None
        if broadcasts(self.mask.shape, size_of_mask(input.shape)):
            return self.mask, None, self.zero_masked
        if self.rule is not None:
            return self.rule(self.mask, input.shape), None, self.zero_masked
        raise RuntimeError(
            "mask: expected one that fits every layer within masked, got "
            f"{list(self.mask.shape)} for an input of {list(input.shape)}; give a rule"
            + hint(self.mask.shape, size_of_mask(input.shape)).replace("; give", ", or")
        )


@contextmanager
def masked(
    model: nn.Module,
    mask: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    rule: MaskRule | None = None,
    zero_masked: bool = False,
) -> Iterator[None]:
    """Gives all synchronized layers of ``model`` a mask within the context, so that no ``forward`` has to pass it on.

    Calls with a mask or lengths of their own use those. Contexts may be nested; the innermost decides.

    Args:
        model: the model whose layers use the mask, wrapped or not.
        mask: a mask as for :func:`sync_batch_norm`, used by layers whose input (N, C, \\*) it fits.
        lengths: (N), in place of ``mask``: the lengths of the samples at the input of the model.
        rule: function for layers that work on another size, for example after a convolution with a stride. Called as
            ``rule(mask, shape)`` for layers whose input, of this ``shape``, the mask does not fit, it returns their
            mask. With ``lengths`` it is called as ``rule(lengths, shape)`` for every layer and returns the layer's
            lengths. It returns None for a layer that is to use all positions.
        zero_masked: whether outputs are 0 at masked positions, as for :func:`sync_batch_norm`.

    Raises:
        TypeError: ``mask`` or ``lengths`` is no tensor.
        ValueError: neither or both of ``mask`` and ``lengths`` are given, or ``lengths`` without a ``rule``.

    A layer raises RuntimeError if its input does not fit the mask and there is no rule. A warning says if ``model`` has
    no synchronized layer.

    Example::

        >>> with bagua_syncbn.masked(model, torch.arange(L) < lengths.view(-1, 1, 1)):
        ...     output = model(features)  # (N, C, L)
    """
    check_module(model, "model")
    check_callable("rule", rule, "a function of a mask or lengths and a shape")
    check_flag("zero_masked", zero_masked)
    if (mask is None) == (lengths is None):
        raise ValueError("mask, lengths: expected one of them, got both or neither")
    if lengths is not None and rule is None:
        raise ValueError("rule: expected one with lengths, which says what they are in each layer; got None")
    check_is_tensor("mask" if lengths is None else "lengths", mask if lengths is None else lengths)
    given = _ModelMask(mask, lengths, rule, zero_masked)
    before = {
        part: part._sync_state.attached(_ModelMask) for part in model.modules() if isinstance(part, SyncBatchNorm)
    }
    if not before:
        warnings.warn(f"masked: found no synchronized layer in {type(model).__name__}", stacklevel=3)
    try:
        for layer in before:
            layer._sync_state.attach(_ModelMask, given)
        yield
    finally:
        for layer, outer in before.items():
            layer._sync_state.attach(_ModelMask, outer)


def is_masked(layer: SyncBatchNorm) -> bool:
    """Whether ``layer`` is in a model within :func:`masked`."""
    return layer._sync_state.attached(_ModelMask) is not None


def masks_of(layer: SyncBatchNorm, input: Tensor, options: Mapping[str, Any]) -> Masks:
    """Returns the masks of a call of ``layer`` with ``input`` and ``options``, its own or those of :func:`masked`."""
    mask, lengths = options.get("mask"), options.get("lengths")
    given = layer._sync_state.attached(_ModelMask)
    if given is None or mask is not None or lengths is not None:
        return mask, lengths, False
    return given.for_input(input)
