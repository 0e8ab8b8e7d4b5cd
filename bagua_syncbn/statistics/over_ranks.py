"""Sums and means over ranks, outside layers."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _ops as ops
from .._errors import notifies_peers
from .._groups import LOCAL, Communicator, GroupSpec, ProcessGroupLike, spec_of
from .._reliability.faults import differ_text
from .._reliability.history import history_in
from .._reliability.protocol import RankExchange, total_in, with_header
from .._reliability.signatures import Signature, exact_bits, word_of
from .._reliability.unsynchronized import warn_at_launch
from .._step.checks import check_is_tensor, check_number, check_tracer, is_distributed
from .._step.masks import check_mask
from .._torch.autograd import is_recorded, is_without_data
from .._torch.process_groups import device_in

_NAME = "mean_over_ranks"


@notifies_peers(lambda values=None, mask=None, process_group=None, **_: (process_group, _NAME))
def mean_over_ranks(
    values: Tensor,
    mask: Tensor | None = None,
    process_group: ProcessGroupLike = None,
    *,
    count: float | Tensor | None = None,
    gradients: Literal["averaged", "summed"] = "averaged",
) -> Tensor:
    r"""Returns this rank's share of the mean loss over the samples of all ranks.

    If ranks have different numbers of samples, boxes or valid pixels, the average of local means is not the overall
    mean. This function weights ranks so that gradients averaged over ranks (by
    :class:`~torch.nn.parallel.DistributedDataParallel`, FSDP2 or Bagua's gradient allreduce) equal the gradients in one
    process. With :math:`W` ranks, where rank :math:`r` has :math:`n_r` values :math:`v_{r,i}`, rank :math:`r` returns

    .. math:: \frac{W}{n} \sum_i v_{r,i}, \qquad n = \sum_r n_r

    To log the loss, average the results of all ranks. A rank without samples returns 0, which also requires a gradient;
    this rank must run backward too. If no rank has samples, :math:`n` is 1. In one process the result is the mean.

    Counts are summed in float64, in a single message; backward does not communicate. The host does not wait for the
    device: if the ranks' calls differ, the result on CUDA is NaN, and a later call raises. In compiled code, the result
    is NaN. All ranks must make the call, even without gradients.

    Args:
        values: per-sample losses of this rank (``reduction="none"``), in any shape.
        mask: bool, with as many dimensions as ``values``; dimensions of size 1 broadcast. True for values to include;
            None for all values.
        process_group: the ranks over which gradients are reduced; None for the whole job.
        count: overrides :math:`n_r`, by default the number of values. In gradient accumulation, pass the number in all
            micro-batches of the step; for a sum over anchors, the number of boxes. With ``count``, ``values`` may be a
            sum. The loss is NaN if a tensor ``count`` is negative or not finite.
        gradients: "averaged" or "summed" over ranks. If summed, the factor :math:`W` is omitted, and the loss is the
            sum of the results over ranks.

    Shape:
        - Output: scalar, in the dtype of ``values``; sums are computed in float32 or float64.

    Warns if ``WORLD_SIZE`` is above 1, but no process group was initialized.

    Raises:
        TypeError: ``values`` is not a plain floating point tensor, ``mask`` not a bool tensor, or ``count`` not
            a number; ``process_group`` has an unknown type.
        ValueError: ``mask`` does not fit ``values``; ``values`` is a scalar, and ``count`` is None; ``count`` is
            negative, not finite or not a single number; ``gradients`` is invalid; ``process_group`` does not fit the
            job.
        RuntimeError: ``mask`` is on another device; ranks make different calls, or a peer raised.

    Example::

        >>> losses = torch.nn.functional.cross_entropy(model(images), labels, reduction="none")
        >>> bagua_syncbn.mean_over_ranks(losses).backward()
    """
    spec = spec_of(process_group)
    _check(values, mask, count, gradients)
    if count is None:
        count = values.numel() if mask is None else mask.expand_as(values).sum()
    kept = values if mask is None else values.where(mask, 0)
    total = kept.sum(dtype=torch.promote_types(values.dtype, torch.float32))  # like torch.mean; float16 would overflow
    communicator = LOCAL if is_without_data(values) else spec.communicator()
    if communicator.size > 1:
        if not isinstance(count, Tensor):
            count = torch.full((), count, dtype=torch.float64, device=values.device)
        count = count.to(values.device, torch.float64)
        if gradients == "averaged":
            total = total * communicator.size
    elif not is_recorded():
        warn_at_launch(f"{_NAME}: the mean is not over ranks", spec)
    if isinstance(count, Tensor):
        count = count.detach().reshape(1)
        count = count.where((count >= 0) & (count < math.inf), math.nan)  # the host does not read it
        count = sum_over_ranks(count, communicator, _NAME, None, f"gradients={gradients!r}")
        count = count.where(count != 0, 1).squeeze(0)
    elif count == 0:
        count = 1
    return (total / count).to(values.dtype)


def _check(values: Any, mask: Any, count: Any, gradients: Any) -> None:
    """Raises for invalid arguments of :func:`mean_over_ranks`."""
    check_is_tensor("values", values)
    if is_distributed(values) or not values.is_floating_point():
        got = f"{type(values).__name__} of {values.dtype}"
        raise TypeError(f"values: expected a plain floating point tensor, got {got}")
    if values.dim() == 0 and count is None:
        raise ValueError('values: expected per-sample losses (reduction="none"), got a scalar; for a sum, pass count')
    if mask is not None:
        check_mask(mask, list(values.shape), "of values", values.device)
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(f"count: expected one number, got size {list(count.shape)}")
    elif count is not None:
        check_number("count", count, "a number or a tensor")
        if not 0 <= count < math.inf:
            raise ValueError(f"count: expected a finite number of at least 0, got {count}")
    if gradients not in ("averaged", "summed"):
        raise ValueError(f'gradients: expected "averaged" or "summed", got {gradients!r}')


def meet(what: str, module: object, spec: GroupSpec, details: str) -> Communicator:
    """Waits until all ranks of ``spec`` make the call ``what``, like :func:`sum_over_ranks`. Returns the communicator.

    Raises:
        RuntimeError: a rank did not arrive before the timeout, or makes another call.
    """
    try:
        communicator = spec.communicator()
    except RuntimeError as error:  # e.g. in the first use of a group
        raise RuntimeError(f"{what}: {error}") from error
    model = module if isinstance(module, nn.Module) else None  # the caller then raises on all ranks
    if communicator.size > 1:
        tensors = () if model is None else (*model.buffers(), *model.parameters())
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        device = getattr(communicator, "device", None) or device_in(getattr(communicator, "group", None), device)
        sum_over_ranks(torch.empty(0, dtype=torch.float64, device=device), communicator, what, model, details)
    return communicator


def sum_over_ranks(
    packed: Tensor, communicator: Communicator, what: str, module: nn.Module | None, details: str
) -> Tensor:
    """Returns the float64 sum of ``packed`` (n) over the ranks of ``communicator``, with equal bits on all ranks.

    ``what`` (the name of the call in errors), the class of ``module`` and ``details`` must be equal on all ranks. On
    CPU a mismatch raises. On devices a mismatch raises if ``module`` is given, which makes the host wait; otherwise the
    sum is NaN, and a later call raises if the device has a fault record.
    """
    if communicator.size == 1:
        return packed
    check_tracer(communicator, packed)
    if is_recorded():  # compared only on the device, like the sums of compiled layers
        fingerprint = word_of(f"{what} ({details})") & exact_bits(communicator.size)
        return total_in(ops.Received(communicator.all_reduce(with_header(packed, fingerprint)), communicator.size))
    history = history_in(communicator)
    if module is not None:
        what = f"{what} of {type(module).__name__}"
        what = history.numbered(what, module, what)
    kind, text, numel = word_of(what), f"{what} ({details})", packed.numel() + 1 + ops.HEADER_SUMS_SIZE
    signature = Signature(kind * ops.WORD + word_of(text), kind, text, True, numel, torch.float64)
    exchange = RankExchange(signature, history.record_of(packed.device.type), communicator, history)
    _, number = exchange.open()
    total, one = exchange.total(torch.cat([packed, packed.new_ones(1)]), number).tensor_split([-1])
    if module is not None and one.isnan():  # on a device, where the host has not compared headers
        raise RuntimeError(differ_text(what))
    return total
