r"""Declares the ops of ``torch.ops.bagua_syncbn``: the schema of each, and the shapes that tracing needs.

Shapes and dtypes. ``input`` is (N, C, \*) in float16, bfloat16, float32 or float64. The *accumulate dtype* is float64
for float64 input and float32 for all others; ``mean``, ``invstd`` and everything that crosses ranks have it.

==============================  =====================================================================================
``batch_norm_stats``            ``input`` to one contiguous tensor of 2C + 2 + K values,
                                ``[mean (C) | var (C) | low | high | words (K)]``: mean and biased variance of each
                                channel, the number of values per channel, ``count = low + high * 2**24``, in two words
                                because a float32 stops counting at ``2**24``, and the words for ``speaker`` and
                                ``call``
``batch_norm_gather_stats``     ``gathered`` (W, 2C + 2 + K), one row per rank, to ``mean`` (C), ``invstd`` (C) and
                                ``count`` (int64 scalar) of all ranks together; updates the running statistics in place,
                                with ``skip_nonfinite`` only if they stay finite. Where the words differ between rows,
                                or a count is none, ``mean`` and ``invstd`` are NaN, no buffer changes and ``fault``
                                says so
``batch_norm_elemt``            ``(input - mean) * invstd * weight + bias``, in the dtype and memory format of ``input``
``batch_norm_backward_reduce``  to ``sums`` of 2C + K values, ``[sum_dy (C) | sum_dy_xmu (C) | words (K)]``, where
                                ``dy`` is ``grad_output`` and ``xmu`` is ``input - mean``, with the words for
                                ``fingerprint``; ``grad_weight`` (C) and ``grad_bias`` (C) of this rank, in the dtype of
                                ``weight`` if there is one, else in the accumulate dtype
``batch_norm_backward_elemt``   to the gradient of ``input``, given the ``sums`` and ``count`` of all ``ranks``. The K
                                words that follow the 2C sums are pairs ``(w, w**2)``, added up: where those of the
                                ranks differed, the gradient is NaN and ``fault`` says so.
                                ``batch_norm_backward_elemt_`` puts it in the place of ``grad_output``
==============================  =====================================================================================

Three of them exist with an activation too, and what is added before it: ``y = act(z)``, ``z = (input - mean) * invstd *
weight + bias + residual``. ``activation`` is the code of one in ``activations.py``.

==================================  =================================================================================
``batch_norm_act_elemt``            ``act(z)``, in the dtype and memory format of ``input``
``batch_norm_act_backward_reduce``  as ``batch_norm_backward_reduce`` of ``grad = grad_output * act'(z)``, made from
                                    ``input`` and ``residual`` once more. The fourth result is ``grad``, in the dtype
                                    and memory format of ``input``: the gradient of ``residual``, and what
                                    ``batch_norm_backward_elemt`` is to be given; empty without ``with_grad``
``batch_norm_act_backward_elemt``   as ``batch_norm_backward_elemt`` of ``grad``, made from ``grad_output`` and
                                    ``input`` once more; without a residual
==================================  =================================================================================

Four exist where not all positions count. ``mask`` says which do, the same for all channels: a contiguous bool (N, \*),
or int64 lengths (N) for an input (N, C, \*, L), of which the first so many places along L count.

=====================================  ==============================================================================
``batch_norm_masked_stats``            as ``batch_norm_stats`` of the positions that count
``batch_norm_masked_elemt``            as ``batch_norm_elemt`` where they count, else 0, whatever ``input`` is there
``batch_norm_masked_backward_reduce``  as ``batch_norm_backward_reduce`` of the positions that count
``batch_norm_masked_backward_elemt``   as ``batch_norm_backward_elemt`` where they count, else 0 if it ``zeroes``, or
                                       ``grad_output * invstd * weight``: nothing passes through the statistics there
=====================================  ==============================================================================

Words are integers that the dtype holds exactly, the same on all ranks. A row of statistics ends in ``layer``, ``terms``
and ``call``, of 24 bits each, if there is a ``speaker = layer * 2**24 + terms``; only then its size is odd. Sums end in
``a, a**2, b, b**2, c, c**2`` if there is a ``fingerprint = a + b * 2**12 + c * 2**24``. Each is one integer, and what
few calls need comes last, since the host spends half a microsecond on every argument that is given.

``fault`` is an int64 tensor of 8 values in the memory of the host, pinned for a device that writes to it; the first
fault stays until the host clears it:

========================  =============================================================================================
``[0, ...]``              none
``[1, rank, a, b]``       the words of ``rank`` (b, 3 values) are not those of rank 0 (a, 3 values)
``[2, rank, a, b]``       the count of ``rank`` is not an integer from 0 to ``2**53``
``[3, call, ...]``        the words of the ranks in a sum differed, in the op that was given this ``call``
========================  =============================================================================================

The names are ATen's. The schemas live in Python so that a pure-Python install has the same ops; native kernels register
themselves behind them.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

_Shapes = TypeVar("_Shapes", bound=Callable[..., object])

library = torch.library.Library("bagua_syncbn", "DEF")
SCHEMAS: dict[str, str] = {}  # by name

WORDS = 3  # that are gathered: layer, terms, call
PARTS = 6  # that are added up: three parts of a fingerprint, each with its square


def words_in(gathered: Tensor) -> int:
    """Returns how many words the rows of ``gathered`` end in: without, each has an even number of values."""
    return WORDS if gathered.size(1) % 2 else 0


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which statistics of ``dtype`` values are computed and sent."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _op(schema: str) -> Callable[[_Shapes], _Shapes]:
    """Declares an op that has ``schema``; what is decorated gives the shapes of its results."""
    name = schema.partition("(")[0]
    SCHEMAS[name] = schema
    # Flexible: torch.compile may lay out tensors in other ways than traced, as for convolutions, without copies.
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    shapes: Callable[[_Shapes], _Shapes] = torch.library.register_fake(f"bagua_syncbn::{name}", lib=library)
    return shapes


def _row(input: Tensor, speaker: int | None) -> Tensor:
    words = 0 if speaker is None else WORDS
    return input.new_empty(2 * input.size(1) + 2 + words, dtype=accumulate_dtype(input.dtype))


@_op("batch_norm_stats(Tensor input, int? speaker=None, int call=0) -> Tensor")
def _(input: Tensor, speaker: int | None = None, call: int = 0) -> Tensor:
    return _row(input, speaker)


@_op("batch_norm_masked_stats(Tensor input, Tensor mask, int? speaker=None, int call=0) -> Tensor")
def _(input: Tensor, mask: Tensor, speaker: int | None = None, call: int = 0) -> Tensor:
    return _row(input, speaker)


@_op(
    "batch_norm_gather_stats(Tensor gathered, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor(c!)? num_batches_tracked, float? momentum, float eps, Tensor(d!)? fault=None, "
    "bool skip_nonfinite=False) -> (Tensor mean, Tensor invstd, Tensor count)"
)
def _(
    gathered: Tensor,
    running_mean: object,
    running_var: object,
    counter: object,
    momentum: object,
    eps: float,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    channels = (gathered.size(1) - 2 - words_in(gathered)) // 2
    return gathered.new_empty(channels), gathered.new_empty(channels), gathered.new_empty((), dtype=torch.int64)


@_op("batch_norm_elemt(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd) -> Tensor")
@_op(
    "batch_norm_masked_elemt(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, Tensor mask) "
    "-> Tensor"
)
@_op(
    "batch_norm_act_elemt(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, Tensor? residual, "
    "int activation, float parameter) -> Tensor"
)
def _(input: Tensor, *_: object) -> Tensor:
    return torch.empty_like(input)


def _sums_and_gradients(
    input: Tensor, mean: Tensor, weight: Tensor | None, fingerprint: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    channels, words = input.size(1), 0 if fingerprint is None else PARTS
    like = mean if weight is None else weight
    return mean.new_empty(2 * channels + words), like.new_empty(channels), like.new_empty(channels)


@_op(
    "batch_norm_backward_reduce(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, "
    "int? fingerprint=None) -> (Tensor sums, Tensor grad_weight, Tensor grad_bias)"
)
def _(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    fingerprint: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _sums_and_gradients(input, mean, weight, fingerprint)


@_op(
    "batch_norm_masked_backward_reduce(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, "
    "Tensor mask, int? fingerprint=None) -> (Tensor sums, Tensor grad_weight, Tensor grad_bias)"
)
def _(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    mask: Tensor,
    fingerprint: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _sums_and_gradients(input, mean, weight, fingerprint)


@_op(
    "batch_norm_act_backward_reduce(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, "
    "Tensor? bias, Tensor? residual, int activation, float parameter, int? fingerprint=None, "
    "bool with_grad=True) -> (Tensor sums, Tensor grad_weight, Tensor grad_bias, Tensor grad)"
)
def _(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
    parameter: float,
    fingerprint: int | None = None,
    with_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad = torch.empty_like(input) if with_grad else input.new_empty(0)
    return *_sums_and_gradients(input, mean, weight, fingerprint), grad


@_op(
    "batch_norm_backward_elemt(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, Tensor invstd, "
    "Tensor sums, Tensor count, int ranks=1, Tensor(a!)? fault=None, int call=0) -> Tensor"
)
@_op(
    "batch_norm_act_backward_elemt(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, Tensor invstd, "
    "Tensor sums, Tensor count, Tensor? bias, int activation, float parameter, int ranks=1, "
    "Tensor(a!)? fault=None, int call=0) -> Tensor"
)
@_op(
    "batch_norm_masked_backward_elemt(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, Tensor invstd, "
    "Tensor sums, Tensor count, Tensor mask, bool zeroes=False, int ranks=1, Tensor(a!)? fault=None, int call=0) "
    "-> Tensor"
)
def _(grad_output: Tensor, input: Tensor, *_: object) -> Tensor:
    return torch.empty_like(input)


@_op(
    "batch_norm_backward_elemt_(Tensor(a!) grad, Tensor input, Tensor? weight, Tensor mean, Tensor invstd, "
    "Tensor sums, Tensor count, int ranks=1, Tensor(b!)? fault=None, int call=0) -> ()"
)
def _(*_: object) -> None:
    return None
