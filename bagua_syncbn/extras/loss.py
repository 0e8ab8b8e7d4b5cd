"""The mean of a loss over the samples of all ranks."""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]

from ..checks import check_is_dense, check_is_tensor, check_number, is_distributed
from ..errors import notifies_peers
from ..groups import spec_of
from ..masks import check_mask
from ..torch_internals.autograd import is_transforming
from .sums import sum_over_ranks

_NAME = "mean_over_ranks"


@notifies_peers(lambda values=None, mask=None, process_group=None, **_: (process_group, _NAME))
def mean_over_ranks(
    values: Tensor,
    mask: Tensor | None = None,
    process_group: Any = None,
    *,
    count: float | Tensor | None = None,
    gradients: Literal["averaged", "summed"] = "averaged",
) -> Tensor:
    r"""Returns this rank's share of the mean of a loss over the samples of all ranks.

    If ranks have different numbers of samples, boxes or valid pixels, the mean of their means is not the mean of one
    process. The backward pass of this one gives its gradients, once the engine
    (:class:`~torch.nn.parallel.DistributedDataParallel`, FSDP2, Bagua's gradient allreduce) has averaged them over the
    ranks. With :math:`W` ranks, of which rank :math:`r` has the values :math:`v_r` and counts :math:`n_r` of them, rank
    :math:`r` gets

    .. math:: \frac{W}{n} \sum_i v_{r,i}, \qquad n = \sum_r n_r

    The mean over ranks of this number is the loss of one process: average it over the ranks before you log it. A rank
    without samples gets 0, with a graph, so its backward pass takes part in the reduction. Where no rank counts any,
    :math:`n` is 1.

    The counts are summed in float64, in one message without a graph; backward sends nothing. The host reads one value,
    for which it waits for the device; in compiled code it does not, and the loss is NaN if ranks differ. All ranks make
    the call, also without gradients. In one process it is the mean.

    Args:
        values: the losses of this rank's samples, as of ``reduction="none"``, in any shape.
        mask: bool, broadcasts to ``values``: which of them count; others get no gradient. None for all.
        process_group: the ranks over which the engine reduces gradients, as for :func:`sync_batch_norm`; None for all
            of the job.
        count: what this rank adds to :math:`n` in place of the number of its values: in gradient accumulation the
            number in all micro-batches of the step, the same in each call; or the number of boxes that a sum over
            anchors is divided by. ``values`` may then be a sum. A count that is negative or not finite raises; if it is
            a tensor on a device other than CPU, or in compiled code, it makes the loss NaN instead.
        gradients: what the engine does: "averaged", or "summed" over the ranks. Then the factor :math:`W` is left out,
            and the sum over ranks of the results is the loss.

    Shape:
        - Output: scalar, of the dtype of ``values``; sums are computed in float32 at least.

    Raises:
        TypeError: ``values`` is no dense floating point tensor of this rank, ``mask`` no bool tensor, ``count`` no
            number; ``process_group`` is of no known kind.
        ValueError: ``mask`` does not broadcast to ``values``, or could in two ways; ``values`` is a scalar without
            ``count``; ``count`` is not finite, below 0 or more than one number; ``gradients`` is none of the two.
        RuntimeError: ``mask`` is on another device; ranks make different calls, or another rank raised.

    Example::

        >>> losses = torch.nn.functional.cross_entropy(model(images), labels, reduction="none")
        >>> bagua_syncbn.mean_over_ranks(losses).backward()
    """
    spec = spec_of(process_group)
    _check(values, mask, count)
    if gradients not in ("averaged", "summed"):
        raise ValueError(f'gradients: expected "averaged" or "summed", got {gradients!r}')
    if count is None:
        count = values.numel() if mask is None else mask.expand_as(values).sum()
    kept = values if mask is None else values.where(mask, 0)
    total = kept.sum(dtype=torch.promote_types(values.dtype, torch.float32))  # as a mean adds up: half overflows
    communicator = spec.communicator(_NAME)
    if communicator.size > 1:
        if not isinstance(count, Tensor):
            count = torch.full((), count, dtype=torch.float64, device=values.device)
        packed = _nan_if_wrong(count.detach().to(values.device, torch.float64)).reshape(1)
        count = sum_over_ranks(packed, communicator, _NAME, None, f"gradients={gradients!r}")
        if gradients == "averaged":
            total = total * communicator.size
    elif isinstance(count, Tensor):
        count = _nan_if_wrong(count)
    divisor = torch.where(count == 0, 1, count.detach()).reshape(()) if isinstance(count, Tensor) else count or 1
    return (total / divisor).to(values.dtype)


def _nan_if_wrong(count: Tensor) -> Tensor:
    """Returns ``count``; NaN instead of a negative or infinite one, if the host did not read it."""
    return count.where((count >= 0) & (count < math.inf), math.nan)


def _check(values: Any, mask: Any, count: Any) -> None:
    """Raises unless these are arguments of :func:`mean_over_ranks`."""
    check_is_tensor("values", values)
    check_is_dense("values", values)
    if is_distributed(values) or not values.is_floating_point():
        got = f"{type(values).__name__} of {values.dtype}"
        raise TypeError(f"values: expected a floating point tensor of this rank, got {got}")
    if values.dim() == 0 and count is None:
        raise ValueError(
            'values: expected the loss of each sample, as of reduction="none", got a scalar; if it is their sum, give '
            "count, the number of samples"
        )
    if mask is not None:
        check_mask(mask, list(values.shape), "values", "values", values.device)
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(f"count: expected one number, got size {list(count.shape)}")
        if type(count) is not Tensor or not count.is_cpu or is_compiling() or is_tracing() or is_transforming():
            return  # only the device knows the value
        count = count.item()
    if count is not None:
        check_number("count", count, "a number or a tensor")
        if not 0 <= count < math.inf:
            raise ValueError(f"count: expected a finite number of at least 0, got {count}")
