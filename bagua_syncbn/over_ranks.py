"""Sums and means over ranks that belong to no layer."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]

from . import ops
from .checks import check_is_dense, check_is_tensor, check_number, is_distributed
from .errors import notifies_peers
from .groups import Communicator, spec_of
from .masks import check_mask
from .ops.headers import record_sums
from .reliability.faults import differ_text
from .reliability.history import history_in
from .reliability.protocol import RankExchange
from .reliability.signatures import CallSignature, exact_bits, word_of
from .torch_internals.autograd import is_transforming

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

    If ranks have different numbers of samples, boxes or valid pixels, the mean of their means differs from the mean in
    one process. The backward pass of this function computes the gradients of one process, once they are averaged over
    ranks (by :class:`~torch.nn.parallel.DistributedDataParallel`, FSDP2 or Bagua's gradient allreduce). With :math:`W`
    ranks, where rank :math:`r` has :math:`n_r` values :math:`v_{r,i}`, rank :math:`r` gets

    .. math:: \frac{W}{n} \sum_i v_{r,i}, \qquad n = \sum_r n_r

    The mean of the results over ranks is the loss of one process: average them before you log the loss. A rank without
    samples gets 0, with a graph, so its backward pass takes part in the reduction. If all ranks have no samples,
    :math:`n` is 1.

    Counts are summed in float64, in one message without a graph; backward does not communicate. The host does not wait
    for the device: on CUDA the result is NaN if ranks differ, and a later call raises; in compiled code it is NaN. All
    ranks make the call, also without gradients. In one process it is the mean.

    Args:
        values: the losses of this rank's samples (``reduction="none"``), in any shape.
        mask: bool, broadcastable to ``values``: True for values that count; others get no gradient. None for all.
        process_group: the ranks over which gradients are reduced, as for :func:`sync_batch_norm`; None for the whole
            job.
        count: this rank's :math:`n_r` if it is not the number of values. In gradient accumulation it is the number in
            all micro-batches of the step, the same in each call; for a sum over anchors, the number of boxes.
            ``values`` may then be a sum. The host reads a tensor only on CPU and outside compiled code; elsewhere the
            loss is NaN if ``count`` is negative or not finite.
        gradients: "averaged" or "summed" over ranks. If they are summed, the factor :math:`W` is omitted, and the sum
            of the results over ranks is the loss.

    Shape:
        - Output: scalar, of the dtype of ``values``; sums are computed in float32 at least.

    Raises:
        TypeError: ``values`` is not a dense floating point tensor of this rank, ``mask`` not a bool tensor, or
            ``count`` not a number; ``process_group`` has an unknown type.
        ValueError: ``mask`` does not broadcast to ``values``, or could in two ways; ``values`` is a scalar without
            ``count``; ``count`` is not finite, negative or more than one number; ``gradients`` has another value.
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
    total = kept.sum(dtype=torch.promote_types(values.dtype, torch.float32))  # like torch.mean; half overflows
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
    """Returns NaN for a negative or infinite ``count``, which the host may not have read."""
    return count.where((count >= 0) & (count < math.inf), math.nan)


def _check(values: Any, mask: Any, count: Any) -> None:
    """Raises for wrong arguments of :func:`mean_over_ranks`."""
    check_is_tensor("values", values)
    check_is_dense("values", values)
    if is_distributed(values) or not values.is_floating_point():
        got = f"{type(values).__name__} of {values.dtype}"
        raise TypeError(f"values: expected a floating point tensor of this rank, got {got}")
    if values.dim() == 0 and count is None:
        raise ValueError(
            'values: expected the loss of each sample (reduction="none"), got a scalar; if it is their sum, pass the '
            "number of samples as count"
        )
    if mask is not None:
        check_mask(mask, list(values.shape), "values", "values", values.device)
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(f"count: expected one number, got size {list(count.shape)}")
        if type(count) is not Tensor or not count.is_cpu or is_compiling() or is_tracing() or is_transforming():
            return  # the host cannot read the value, or would have to wait
        count = count.item()
    if count is not None:
        check_number("count", count, "a number or a tensor")
        if not 0 <= count < math.inf:
            raise ValueError(f"count: expected a finite number of at least 0, got {count}")


def sum_over_ranks(
    packed: Tensor, communicator: Communicator, what: str, module: nn.Module | None, details: str
) -> Tensor:
    """Returns the sum of ``packed`` (n), in float64, over the ranks of ``communicator``; bitwise equal on all ranks.

    Ranks compare the message like messages of layers. If they differ, it raises if ``module`` is given or on CPU.
    Otherwise the sum is NaN, and on devices with a fault record a later call raises.

    Args:
        packed: on the device of this rank's messages.
        communicator: the ranks, which all make the call.
        what: the name of the call in errors.
        module: its model, if any. The host waits for the device.
        details: what else must be equal on all ranks.

    Raises:
        RuntimeError: the ranks make different calls, or with different models or details; or the collective failed.
    """
    if communicator.size == 1:
        return packed
    size, counted = communicator.size, torch.cat([packed, packed.new_ones(1)])
    if is_compiling():  # compared only on the device, like the sums of compiled layers
        header = ops.header_sums_of(word_of(f"{what} ({details})") & exact_bits(size))
        total = communicator.all_reduce(torch.cat([counted, packed.new_tensor(header)]))
        is_same = (total[-ops.HEADER_SUMS_SIZE :] == total.new_tensor(header) * size).all()
        return total[: packed.numel()].where(is_same, torch.nan)
    history = history_in(communicator)
    if module is not None:
        what = f"{what} of {type(module).__name__}"
        what = history.numbered(what, module, what)
    kind, text, numel = word_of(what), f"{what} ({details})", counted.numel() + ops.HEADER_SUMS_SIZE
    signature = CallSignature(kind * ops.WORD + word_of(text), kind, text, (True, numel, torch.float64))
    record = history.record_of(packed.device.type) if type(packed) is Tensor else None
    total = RankExchange(signature, record, communicator, history).total(counted)
    total, ranks = total.tensor_split([-1])  # NaN if no host has compared the headers and they differ
    if module is None and record is not None and not record.is_checked_at_once:
        record_sums(record.tensor, (ranks != size).squeeze(0), history.calls)
    elif ranks.item() != size:
        raise RuntimeError(differ_text(what))
    return total
