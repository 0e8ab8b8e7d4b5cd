"""Masks: which positions of an input make the statistics."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]

from ..checks import check_callable, check_flag, check_is_tensor
from ..models import check_module
from ..ops import Masking, of_positions
from ..options import Masks
from ..torch_internals import is_transforming


def masking_of(layer: nn.Module | None, input: Tensor, masks: Masks) -> Masking | None:
    """Returns the masking of a call of ``layer`` with ``input`` (N, C, \\*); None to use all positions.

    Raises:
        TypeError, ValueError, RuntimeError: ``mask`` or ``lengths`` is wrong, see :func:`.sync_batch_norm`.
    """
    mask, lengths, zero_masked = masks
    if zero_masked is not False:
        check_flag("zero_masked", zero_masked)
    if mask is None and lengths is None:
        given: _ModelMask | None = getattr(layer, "_masking", None)
        if given is None:
            return None
        mask, lengths, zero_masked = given.for_call(input)
        if mask is None and lengths is None:
            return None
    if mask is not None and lengths is not None:
        raise ValueError("mask, lengths: expected at most one of them, got both")
    # Copied, because callers may write to theirs before backward.
    if lengths is not None:
        _check_lengths(lengths, input)
        if not is_compiling():
            return Masking(lengths.to(torch.int64, copy=True, memory_format=torch.contiguous_format), zero_masked)
        # A mask asks for no size in backward, where Dynamo may take one from a stride, which differs between calls.
        mask = of_positions(lengths, input)
    assert mask is not None
    check_is_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: expected a bool tensor, got {mask.dtype}")
    size = _size_of_mask(input.shape)
    if not _broadcasts(mask.shape, size):
        raise ValueError(
            f"mask: expected a tensor that broadcasts to (N, 1, *), {size}, got {list(mask.shape)}"
            + _hint(mask.shape, size)
        )
    _check_is_read_in_one_way(mask.shape, size)
    if mask.device != input.device:
        raise RuntimeError(f"mask: expected it on {input.device}, where input is, got {mask.device}")
    return Masking(mask.expand(size).clone(memory_format=torch.contiguous_format).squeeze(1), zero_masked)


def _size_of_mask(shape: torch.Size) -> list[int]:
    return [shape[0], 1, *shape[2:]]


def _broadcasts(shape: torch.Size, size: list[int]) -> bool:
    # Not `own in (1, expected)`: torch.compile takes that for false if `own` is constant and `expected` is symbolic.
    ends = zip(reversed(shape), reversed(size), strict=False)
    return len(shape) <= len(size) and all(own == 1 or own == expected for own, expected in ends)


def _hint(shape: torch.Size, size: list[int]) -> str:
    """Returns advice for a mask with a dimension for samples and none for channels; "" for other masks."""
    has_samples = len(shape) == len(size) - 1 and _broadcasts(shape, [size[0], *size[2:]])
    return "; give mask.unsqueeze(1)" if has_samples else ""


def _check_is_read_in_one_way(shape: torch.Size, size: list[int]) -> None:
    """Raises ValueError if the first dimension of a mask may stand for samples as well as for places.

    Broadcasting, as everywhere in torch, takes the first dimensions for the missing ones, and so reads it as places.
    """
    missing = len(size) - len(shape)
    if missing == 0 or len(shape) == 0 or shape[0] == 1 or shape[0] != size[0]:
        return
    own, of_samples = [1] * missing + [*shape], [shape[0]] + [1] * missing + [*shape[1:]]
    raise ValueError(
        f"mask: expected a shape that is read in one way, got {list(shape)}, whose first dimension may be samples or "
        f"places; give mask.view({of_samples}) for samples, mask.view({own}) for places, the same in all samples"
    )


def _check_lengths(lengths: Tensor, input: Tensor) -> None:
    check_is_tensor("lengths", lengths)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths: expected an integer tensor, got {lengths.dtype}")
    if input.dim() < 3 or lengths.shape != input.shape[:1]:
        raise ValueError(
            "lengths: expected (N), one for each sample of an input (N, C, *, L), got "
            f"{list(lengths.shape)} for {list(input.shape)}"
        )
    if lengths.device != input.device:
        raise RuntimeError(f"lengths: expected it on {input.device}, where input is, got {lengths.device}")
    # Values on other devices are not checked, because the host would wait for the device.
    if type(lengths) is Tensor and lengths.is_cpu and not (is_compiling() or is_tracing() or is_transforming()):
        wrong = [length for length in lengths.tolist() if not 0 <= length <= input.size(-1)]
        if wrong:
            raise ValueError(f"lengths: expected from 0 to {input.size(-1)}, the size of input, got {wrong[0]}")


Rule = Callable[[Tensor, torch.Size], Tensor | None]


class _ModelMask(NamedTuple):
    """Mask or lengths for all layers of a model, as given to :func:`masked`."""

    mask: Tensor | None
    lengths: Tensor | None
    rule: Rule | None
    zero_masked: bool

    def for_call(self, input: Tensor) -> Masks:
        """Returns mask, lengths and ``zero_masked`` for a call with ``input``."""
        if self.lengths is not None:
            assert self.rule is not None
            return None, self.rule(self.lengths, input.shape), self.zero_masked
        assert self.mask is not None
        if _broadcasts(self.mask.shape, _size_of_mask(input.shape)):
            return self.mask, None, self.zero_masked
        if self.rule is not None:
            return self.rule(self.mask, input.shape), None, self.zero_masked
        raise RuntimeError(
            "mask: expected one that fits every layer within masked, got "
            f"{list(self.mask.shape)} for an input of {list(input.shape)}; give a rule"
            + _hint(self.mask.shape, _size_of_mask(input.shape)).replace("; give", ", or")
        )


@contextmanager
def masked(
    model: nn.Module,
    mask: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    rule: Rule | None = None,
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
    given: Any = _ModelMask(mask, lengths, rule, zero_masked)
    layers = [module for module in model.modules() if hasattr(module, "_masking")]
    if not layers:
        warnings.warn(f"masked: found no synchronized layer in {type(model).__name__}", stacklevel=3)
    before = [layer._masking for layer in layers]
    try:
        for layer in layers:
            layer._masking = given
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer._masking = own
