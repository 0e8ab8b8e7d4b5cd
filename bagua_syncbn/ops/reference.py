"""The ops in plain torch, for any device: the definition that native kernels are tested against."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import activations
from .schemas import SCHEMAS, accumulate_dtype, library, words_in

# What one in the high word of a packed count stands for. Every integer up to it is exact in float32.
COUNT_BASE = 2**24
_MAX_HIGH = 2**29  # counts up to 2**53, which float64 holds exactly


def reduced_dims(input: Tensor) -> list[int]:
    """Returns the dimensions over which the values of a channel of ``input`` (N, C, \\*) run."""
    return [0, *range(2, input.dim())]


def per_channel(values: Tensor, input: Tensor) -> Tensor:
    """Views ``values`` (C) so that it broadcasts along dimension 1 of ``input``."""
    return values.view(1, -1, *[1] * (input.dim() - 2))


def _merge_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def _average_factor(momentum: float | None, num_batches_tracked: Tensor | None, like: Tensor) -> Tensor:
    if momentum is not None:
        return torch.full_like(like, momentum)
    if num_batches_tracked is None:
        raise RuntimeError("num_batches_tracked: expected a tensor, because momentum is None; got None")
    return 1 / num_batches_tracked.clamp(min=1).to(like.dtype)


def _fill(values: Tensor, numbers: Iterable[int]) -> None:
    # fill_ passes the number to the device as a kernel argument; a copied host tensor would synchronize.
    for value, number in zip(values, numbers, strict=True):
        value.fill_(number)


def words_of_row(speaker: int | None, call: int) -> list[int]:
    """Returns the words that a row of statistics ends in."""
    return [] if speaker is None else [*divmod(speaker, COUNT_BASE), call]


def parts_of(fingerprint: int | None) -> list[int]:
    """Returns the words that sums end in."""
    parts = () if fingerprint is None else (fingerprint & 0xFFF, fingerprint >> 12 & 0xFFF, fingerprint >> 24)
    return [word for part in parts for word in (part, part * part)]


def batch_norm_stats(input: Tensor, speaker: int | None = None, call: int = 0) -> Tensor:
    words = words_of_row(speaker, call)
    channels = input.size(1)
    count = input.numel() // channels if channels else 0
    packed = input.new_zeros(2 * channels + 2 + len(words), dtype=accumulate_dtype(input.dtype))
    if count:
        # var_mean is Welford's algorithm: it survives a mean that is large beside the deviation.
        var, mean = torch.var_mean(input.to(packed.dtype), reduced_dims(input), correction=0)
        packed[:channels].copy_(mean)
        packed[channels : 2 * channels].copy_(var)
    _fill(packed[2 * channels :], [count % COUNT_BASE, count // COUNT_BASE, *words])
    return packed


def of_positions(mask: Tensor, input: Tensor) -> Tensor:
    """Returns which positions of ``input`` (N, C, \\*) count, as a bool tensor that broadcasts to it.

    ``mask`` is bool (N, \\*), or lengths (N) along the last dimension.
    """
    if mask.dtype == torch.bool:
        return mask.view(input.size(0), 1, *input.shape[2:])
    places = torch.arange(input.size(-1), device=input.device)
    return places < mask.view(-1, *[1] * (input.dim() - 1))


def batch_norm_masked_stats(input: Tensor, mask: Tensor, speaker: int | None = None, call: int = 0) -> Tensor:
    words = words_of_row(speaker, call)
    channels, inside = input.size(1), of_positions(mask, input)
    packed = input.new_zeros(2 * channels + 2 + len(words), dtype=accumulate_dtype(input.dtype))
    count = inside.expand(input.size(0), 1, *input.shape[2:]).sum()
    number = count.clamp(min=1).to(packed.dtype)

    def average(values: Tensor) -> Tensor:
        return values.where(inside, 0).sum(reduced_dims(input)) / number

    wide = input.to(packed.dtype)
    mean = average(wide)
    deviation = wide - per_channel(mean, input)
    shift = average(deviation)  # what rounding has left
    packed[:channels].copy_(mean + shift)
    packed[channels : 2 * channels].copy_(average(deviation.square()) - shift.square())
    packed[2 * channels].copy_(count % COUNT_BASE)
    packed[2 * channels + 1].copy_(count // COUNT_BASE)
    _fill(packed[2 * channels + 2 :], words)
    return packed


def _record(fault: Tensor | None, happened: Tensor, values: Sequence[Tensor]) -> None:
    """Writes ``values`` to ``fault`` where something ``happened`` and nothing was written before."""
    if fault is None:
        return
    record = torch.cat([value.reshape(-1) for value in values]).to(torch.int64)
    before = fault[: record.numel()].to(record.device, non_blocking=True)  # of pinned memory: in the stream's order
    fault[: record.numel()].copy_(torch.where(happened & (before[0] == 0), record, before), non_blocking=True)


def _faults_of_rows(low: Tensor, high: Tensor, words: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns whether something is wrong with a row, and what, as ``fault`` has it."""
    differs = (words != words[0]).any(1)
    is_count = (low == low.floor()) & (low >= 0) & (low < COUNT_BASE)
    is_count &= (high == high.floor()) & (high >= 0) & (high <= _MAX_HIGH)
    wrong = differs | ~is_count.squeeze(1)
    rank = (2 * differs + wrong).argmax().view(1)
    kind = torch.where(differs.any(), 1, 2)
    return wrong.any(), [kind, rank, *((words[0], words[rank]) if words.size(1) else ())]


def batch_norm_gather_stats(
    gathered: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    fault: Tensor | None = None,
    skip_nonfinite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    # Chan, Golub and LeVeque's merge of W sets at once. Every rank adds the same rows in the same order, so all get the
    # same bits. A rank without samples sends zeros and a count of 0, and so weighs nothing.
    words = words_in(gathered)
    channels = (gathered.size(1) - 2 - words) // 2
    rows = gathered.to(_merge_dtype(gathered.device))
    means, variances, low, high, said = rows.split([channels, channels, 1, 1, words], dim=1)
    is_wrong, what = _faults_of_rows(low, high, said)
    _record(fault, is_wrong, what)

    counts = (low.to(torch.int64) + high.to(torch.int64) * COUNT_BASE).masked_fill(is_wrong, 0)
    total = counts.sum()
    shares = counts.to(rows.dtype) / total.clamp(min=1).to(rows.dtype)
    mean = (shares * means).sum(0).masked_fill(is_wrong, torch.nan)
    var = (shares * (variances + (means - mean).square())).sum(0)

    # An unbiased variance needs two values. Whether there are two is known on the device only: no branch on the host.
    updates = total >= 2
    if skip_nonfinite:
        updates = updates & mean.isfinite().all() & var.isfinite().all()
    if num_batches_tracked is not None:
        num_batches_tracked.add_(updates)
    if running_mean is not None and running_var is not None:
        factor = _average_factor(momentum, num_batches_tracked, mean.new_empty(()))
        unbiased_var = var * (total.to(var.dtype) / (total - 1).clamp(min=1).to(var.dtype))
        for running, new in ((running_mean, mean), (running_var, unbiased_var)):
            old = running.to(new.dtype)
            running.copy_(torch.where(updates, old.lerp(new, factor), old))

    dtype = gathered.dtype
    return mean.to(dtype), (var + eps).rsqrt().to(dtype), total


def _normalized(input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    scale = invstd if weight is None else invstd * weight
    # Subtract first: (x * scale) + (bias - mean * scale) cancels badly where the mean is large beside the deviation.
    output = (input - per_channel(mean, input)).mul_(per_channel(scale, input))
    return output if bias is None else output.add_(per_channel(bias, input))


def batch_norm_elemt(input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    return torch.empty_like(input).copy_(_normalized(input, weight, bias, mean, invstd))


def batch_norm_backward_reduce(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    fingerprint: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    words = parts_of(fingerprint)
    channels = input.size(1)
    dtype = mean.dtype if weight is None else weight.dtype
    dims = reduced_dims(input)
    grad_output = grad_output.to(mean.dtype)
    sums = mean.new_empty(2 * channels + len(words))
    sum_dy, sum_dy_xmu, said = sums.split([channels, channels, len(words)])
    _fill(said, words)
    sum_dy.copy_(grad_output.sum(dims))
    sum_dy_xmu.copy_((grad_output * (input - per_channel(mean, input))).sum(dims))
    # Copies: the sums are about to be reduced over the ranks in place, and these must stay this rank's own.
    return sums, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype, copy=True)


def batch_norm_backward_elemt(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor,
    count: Tensor,
    ranks: int = 1,
    fault: Tensor | None = None,
    call: int = 0,
) -> Tensor:
    sums, said = sums.split([2 * input.size(1), sums.numel() - 2 * input.size(1)])
    if said.numel():
        words, squares = said.to(torch.int64).view(-1, 2).unbind(1)
        differ = (squares * ranks != words.square()).any()
        sums = sums.masked_fill(differ, torch.nan)
        _record(fault, differ, [torch.full_like(differ, number, dtype=torch.int64) for number in (3, call)])
    mean_dy, mean_dy_xmu = (sums / count).chunk(2)
    scale = invstd if weight is None else invstd * weight
    projected = (input - per_channel(mean, input)).mul_(per_channel(invstd.square() * mean_dy_xmu, input))
    centered = grad_output - per_channel(mean_dy, input)
    grad_input = centered.sub_(projected).mul_(per_channel(scale, input))
    return torch.empty_like(input).copy_(grad_input)


def batch_norm_masked_elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, mask: Tensor
) -> Tensor:
    output = _normalized(input, weight, bias, mean, invstd)
    return torch.empty_like(input).copy_(output.where(of_positions(mask, input), 0))


def batch_norm_masked_backward_reduce(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    mask: Tensor,
    fingerprint: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    inside = of_positions(mask, input)
    grad_output, input = grad_output.where(inside, 0), input.where(inside, 0)
    return batch_norm_backward_reduce(grad_output, input, mean, invstd, weight, fingerprint)


def batch_norm_masked_backward_elemt(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor,
    count: Tensor,
    mask: Tensor,
    zeroes: bool = False,
    ranks: int = 1,
    fault: Tensor | None = None,
    call: int = 0,
) -> Tensor:
    inside = batch_norm_backward_elemt(grad_output, input, weight, mean, invstd, sums, count, ranks, fault, call)
    scale = invstd if weight is None else invstd * weight
    outside = grad_output.new_zeros(()) if zeroes else grad_output * per_channel(scale, input)
    return torch.empty_like(input).copy_(torch.where(of_positions(mask, input), inside, outside.to(input.dtype)))


def batch_norm_backward_elemt_(grad: Tensor, input: Tensor, *rest: Any) -> None:
    # By the op, so that each device has its kernel.
    grad.copy_(torch.ops.bagua_syncbn.batch_norm_backward_elemt.default(grad, input, *rest))


def batch_norm_act_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    residual: Tensor | None,
    activation: int,
    parameter: float,
) -> Tensor:
    z = _normalized(input, weight, bias, mean, invstd)
    z = z if residual is None else z.add_(residual)
    return torch.empty_like(input).copy_(activations.value(z, activation, parameter))


def batch_norm_act_backward_reduce(
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
    z = _normalized(input, weight, bias, mean, invstd)
    z = z if residual is None else z.add_(residual)
    grad = activations.gradient(grad_output.to(z.dtype), z, activation, parameter)
    sums = batch_norm_backward_reduce(grad, input, mean, invstd, weight, fingerprint)
    return *sums, torch.empty_like(input).copy_(grad) if with_grad else input.new_empty(0)


def batch_norm_act_backward_elemt(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor,
    count: Tensor,
    bias: Tensor | None,
    activation: int,
    parameter: float,
    ranks: int = 1,
    fault: Tensor | None = None,
    call: int = 0,
) -> Tensor:
    z = _normalized(input, weight, bias, mean, invstd)
    grad = activations.gradient(grad_output.to(z.dtype), z, activation, parameter)
    return batch_norm_backward_elemt(grad, input, weight, mean, invstd, sums, count, ranks, fault, call)


for _name in SCHEMAS:
    library.impl(_name, globals()[_name], "CompositeExplicitAutograd")
