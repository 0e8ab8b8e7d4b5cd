"""Masks for all layers of a model, without changes to any ``forward``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._step.call import Call, Masking
from .._step.checks import check_callable, check_flag, check_is_tensor
from .._step.masks import fits, mask_size, masking_of
from .._torch.autograd import current_mode
from .._warnings import context
from ..conversion.models import with_attachments
from ..sync_batchnorm import SyncBatchNorm

MaskRule = Callable[[Tensor, torch.Size], Tensor | None]


@dataclass(eq=False)
class _ModelMask:
    """Attachment that adds the mask of :func:`masked` to a layer's calls."""

    mask: Tensor
    rule: MaskRule | None
    zero_masked: bool
    # Shared by all layers with inputs of the same size, so that the mask is checked and expanded only once, until it
    # changes.
    maskings: dict[Any, Masking | None] = field(default_factory=dict)
    version: int = 0

    def __call__(self, go: Callable[[Call], Tensor], call: Call) -> Tensor:
        return go(call if call.has_mask else call._replace(mask=self.masking))

    def masking(self, input: Tensor) -> Masking | None:
        # Not cached for fake tensors, or in other modes: later calls cannot use those tensors.
        is_plain = current_mode() == "eager" and type(input) is Tensor
        if not is_plain or torch.is_inference_mode_enabled() or self.mask.is_inference():
            return self._new_masking(input)
        if self.version != self.mask._version:
            self.maskings, self.version = {}, self.mask._version
        key = input.shape, input.device
        if key not in self.maskings:
            self.maskings[key] = self._new_masking(input)
        return self.maskings[key]

    def _new_masking(self, input: Tensor) -> Masking | None:
        mask: Tensor | None = self.mask
        if not fits(self.mask, mask_size(input)):
            if self.rule is None:
                raise RuntimeError(
                    f"mask: expected a mask that fits the input {[*input.shape]}, got {[*self.mask.shape]}; pass a "
                    "rule to masked, or a mask of size (N, 1, *)"
                )
            mask = self.rule(self.mask, input.shape)
        return masking_of(input, (mask, self.zero_masked))


@context
def masked(
    model: nn.Module,
    mask: Tensor,
    *,
    rule: MaskRule | None = None,
    zero_masked: bool = False,
) -> Iterator[None]:
    """Masks the inputs of all synchronized layers of ``model`` inside the context, without changes to ``forward``.

    A call that passes a mask uses that mask instead. In nested contexts, the innermost mask applies.

    Args:
        model: the model, wrapped or not.
        mask: mask of :func:`sync_batch_norm`, for all inputs (N, C, \\*) to which it broadcasts.
        rule: function for other input sizes, for example after a strided convolution: ``rule(mask, shape)`` returns
            the mask of an input of this shape, or None to use all positions. ``rule`` is usually called once per shape,
            until the mask changes.
        zero_masked: whether outputs are 0 at masked positions, as for :func:`sync_batch_norm`.

    Raises:
        TypeError: ``model`` is not a module, ``mask`` not a tensor, ``rule`` not callable with a mask and a
            shape, or ``zero_masked`` not a bool.

    A layer raises TypeError if the mask is not bool, and RuntimeError if it does not fit the input and there is no
    rule. Warns if ``model`` has no synchronized layer, and without a ``with`` statement.

    Example::

        >>> with bagua_syncbn.masked(model, torch.arange(L) < lengths.view(-1, 1, 1)):
        ...     output = model(features)  # (N, C, L)
    """
    check_callable("rule", rule, "mask", "shape")
    check_flag("zero_masked", zero_masked)
    check_is_tensor("mask", mask)
    given = _ModelMask(mask, rule, zero_masked)
    with with_attachments(model, "masked", lambda layer: given):
        yield


def is_masked(layer: SyncBatchNorm) -> bool:
    """Returns whether ``layer`` is in a model inside :func:`masked`."""
    return layer._sync_state.find(_ModelMask) is not None
