"""Masks for all layers of a model, so that no ``forward`` has to pass them on."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_callable, check_flag, check_is_tensor
from .masks import broadcasts, mask_size, masking_of, unsqueeze_hint
from .models import check_module
from .options import GivenMasks, Masks
from .step.call import Call, Masking
from .sync_batchnorm import SyncBatchNorm
from .torch_internals.autograd import has_transforms, level_of_duals

MaskRule = Callable[[Tensor, torch.Size], Tensor | None]


class _ModelMask:
    """Attachment: gives the calls of a layer the mask or the lengths of :func:`masked`."""

    def __init__(self, mask: Tensor | None, lengths: Tensor | None, rule: MaskRule | None, zero_masked: bool) -> None:
        self._mask, self._lengths, self._rule, self._zero_masked = mask, lengths, rule, zero_masked
        # One masking for all layers with inputs of one size, checked and expanded once.
        self._maskings: dict[Any, Masking | None] = {}

    def __call__(self, go: Callable[[Call], Tensor], call: Call) -> Tensor:
        """Gives ``call`` the mask, unless it has its own."""
        if callable(call.masks):
            return go(call)
        mask, lengths, zero_masked = call.masks
        if mask is not None or lengths is not None:
            return go(call)
        if zero_masked is not False:
            check_flag("zero_masked", zero_masked)
        return go(call._replace(masks=self.masking))

    def masking(self, input: Tensor) -> Masking | None:
        """Returns the masking of a call with ``input``."""
        given: Any = self._mask if self._lengths is None else self._lengths
        if torch.compiler.is_compiling() or given.is_inference() or has_transforms() or level_of_duals() >= 0:
            return masking_of(input, self._masks_for(input))
        key = input.shape, input.device, given._version
        if key not in self._maskings:
            masking = masking_of(input, self._masks_for(input))
            positions = None if masking is None else masking.positions
            if positions is not None and (type(positions) is not Tensor or positions.is_inference()):
                return masking  # a fake tensor, or one that autograd cannot save in a later call
            self._maskings[key] = masking
        return self._maskings[key]

    def _masks_for(self, input: Tensor) -> Masks:
        mask, lengths, rule = self._mask, self._lengths, self._rule
        if lengths is not None:
            assert rule is not None
            return None, rule(lengths, input.shape), self._zero_masked
        assert mask is not None
        if broadcasts(mask.shape, mask_size(input)):
            return mask, None, self._zero_masked
        if rule is not None:
            return rule(mask, input.shape), None, self._zero_masked
        raise RuntimeError(
            f"mask: a mask of {list(mask.shape)} does not fit a layer within masked, whose input is "
            f"{list(input.shape)}; give a rule" + unsqueeze_hint(mask.shape, mask_size(input)).replace("; give", ", or")
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

    A call that passes its own mask or lengths uses those. In nested contexts the innermost one counts.

    Args:
        model: the model whose layers use the mask, wrapped or not.
        mask: a mask as for :func:`sync_batch_norm`, used by layers whose input (N, C, \\*) it fits.
        lengths: (N), instead of ``mask``: the lengths of the samples at the input of the model.
        rule: function for layers with other input sizes, for example after a convolution with a stride. For an input
            that the mask does not fit, ``rule(mask, shape)`` returns the mask. With ``lengths``, ``rule(lengths,
            shape)`` returns the lengths for every layer. None means that the layer uses all positions. It is called
            once for each ``shape``, and again after the mask or the lengths were written to.
        zero_masked: whether outputs are 0 at masked positions, as for :func:`sync_batch_norm`.

    Raises:
        TypeError: ``mask`` or ``lengths`` is not a tensor.
        ValueError: neither or both of ``mask`` and ``lengths`` are given, or ``lengths`` without a ``rule``.

    A layer raises RuntimeError if its input does not fit the mask and there is no rule. Warns if ``model`` has no
    synchronized layer.

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
        raise ValueError("rule: expected a function that returns the lengths for each layer, got None")
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


def masks_of(layer: SyncBatchNorm, options: Mapping[str, Any]) -> GivenMasks:
    """Returns the masks of a call of ``layer`` with keyword arguments ``options``, or those of :func:`masked`."""
    mask, lengths = options.get("mask"), options.get("lengths")
    given = layer._sync_state.attached(_ModelMask)
    return (mask, lengths, False) if given is None or mask is not None or lengths is not None else given.masking
