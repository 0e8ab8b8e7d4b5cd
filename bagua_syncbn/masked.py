"""Masks for all layers of a model, without changes to any ``forward``."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_callable, check_flag, check_is_tensor
from .masks import broadcasts, mask_size, masking_of
from .models import check_module
from .options import Masks
from .step.call import Call, Masking
from .sync_batchnorm import SyncBatchNorm
from .torch_internals.autograd import has_transforms, level_of_duals

MaskRule = Callable[[Tensor, torch.Size], Tensor | None]


class _ModelMask:
    """Attachment that adds the mask or lengths of :func:`masked` to a layer's calls."""

    def __init__(self, mask: Tensor | None, lengths: Tensor | None, rule: MaskRule | None, zero_masked: bool) -> None:
        self._mask, self._lengths, self._rule, self._zero_masked = mask, lengths, rule, zero_masked
        # Shared by all layers with inputs of the same size, so that a mask is checked and expanded only once.
        self._maskings: dict[Any, Masking | None] = {}

    def __call__(self, go: Callable[[Call], Tensor], call: Call) -> Tensor:
        return go(call if call.has_masks else call._replace(masks=self._masking))

    def _masking(self, input: Tensor) -> Masking | None:
        given: Any = self._mask if self._lengths is None else self._lengths
        # Not cached for fake tensors, or under compilers, inference mode or transforms: later calls cannot use those
        # tensors.
        is_special = type(input) is not Tensor or torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
        if is_special or given.is_inference() or has_transforms() or level_of_duals() >= 0:
            return masking_of(input, self._masks_for(input))
        key = input.shape, input.device, given._version
        if key not in self._maskings:
            self._maskings[key] = masking_of(input, self._masks_for(input))
        return self._maskings[key]

    def _masks_for(self, input: Tensor) -> Masks:
        mask, lengths, rule = self._mask, self._lengths, self._rule
        if lengths is not None:
            assert rule is not None
            return None, rule(lengths, input.shape), self._zero_masked
        assert mask is not None
        if not broadcasts(mask.shape, mask_size(input)):
            if rule is None:
                raise RuntimeError(
                    f"mask: a mask of {list(mask.shape)} inside masked does not fit a layer with input of "
                    f"{list(input.shape)}; give a rule, or a mask that broadcasts to (N, 1, *)"
                )
            mask = rule(mask, input.shape)
        return mask, None, self._zero_masked


@contextmanager
def masked(
    model: nn.Module,
    mask: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    rule: MaskRule | None = None,
    zero_masked: bool = False,
) -> Iterator[None]:
    """Masks the inputs of all synchronized layers of ``model`` inside the context, without changes to ``forward``.

    A call that passes its own mask or lengths uses those instead. In nested contexts, the innermost mask applies.

    Args:
        model: the model, wrapped or not.
        mask: a mask as for :func:`sync_batch_norm`, for all inputs (N, C, \\*) that it fits.
        lengths: (N), instead of ``mask``: the lengths of the samples at the input of the model.
        rule: function for different input sizes, for example after a strided convolution. If the mask does not fit an
            input, ``rule(mask, shape)`` returns a mask for it. With ``lengths``, ``rule(lengths, shape)`` returns the
            lengths for every layer. None means that the layer uses all positions. Called once per ``shape``, until the
            mask or the lengths change.
        zero_masked: whether outputs are 0 at masked positions, as for :func:`sync_batch_norm`.

    Raises:
        TypeError: ``mask`` or ``lengths`` is not a tensor.
        ValueError: not exactly one of ``mask`` and ``lengths`` is given, or ``lengths`` is given and ``rule`` is not.

    A layer raises RuntimeError if the mask does not fit the input and there is no rule. It warns if ``model`` has no
    synchronized layer.

    Example::

        >>> with bagua_syncbn.masked(model, torch.arange(L) < lengths.view(-1, 1, 1)):
        ...     output = model(features)  # (N, C, L)
    """
    check_module(model, "model")
    check_callable("rule", rule, "a function of a mask or lengths and a shape")
    check_flag("zero_masked", zero_masked)
    if (mask is None) == (lengths is None):
        raise ValueError("mask, lengths: expected exactly one, got both or none")
    if lengths is not None and rule is None:
        raise ValueError("rule: expected a function that returns the lengths for each layer, got None")
    check_is_tensor("mask" if lengths is None else "lengths", mask if lengths is None else lengths)
    given = _ModelMask(mask, lengths, rule, zero_masked)
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
    if not layers:
        warnings.warn(f"masked: found no synchronized layer in {type(model).__name__}", stacklevel=3)
    outer = {layer: layer._sync_state.attached(_ModelMask) for layer in layers}
    try:
        for layer in layers:
            layer._sync_state.attach(_ModelMask, given)
        yield
    finally:
        for layer in layers:
            layer._sync_state.attach(_ModelMask, outer[layer])


def is_masked(layer: SyncBatchNorm) -> bool:
    """Returns whether ``layer`` is in a model inside :func:`masked`."""
    return layer._sync_state.attached(_ModelMask) is not None
