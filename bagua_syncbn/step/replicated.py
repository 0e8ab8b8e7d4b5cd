"""Training step among replicas of one process: one node of autograd's graph for all replicas of a layer.

Replicas meet in forward, where the thread of replica 0 merges their statistics and normalizes for all. In backward no
thread waits, as it could wait for work that runs next on itself: autograd runs the node when the gradients of all
outputs are there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..communicators.replicas import Replica, Tensors, in_streams
from ..sync import FIXED_STATISTICS
from ..torch_internals import is_batched, is_transforming
from .call import Call
from .differentiable import differentiable_batch_norm, gradients_of
from .function import after, through_activation
from .recomputation import note_output


def replicated_batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call, replica: Replica
) -> Tensor:
    """Computes :func:`~bagua_syncbn.sync_batch_norm` in training in a replica. Only replica 0 updates its buffers."""

    def compute(rows: list[Tensors]) -> list[list[Tensor]]:
        tensors = [tensor for *row, _ in rows for tensor in row]
        moments: list[list[Tensor]] = []
        # Replica 0 may run without gradients while another replica needs them.
        with torch.set_grad_enabled(any(tensor is not None and tensor.requires_grad for tensor in tensors)):
            outputs = _Replicated.apply(call, [stats for *_, stats in rows], moments, *tensors)
        return [[output, *own] for output, own in zip(outputs, moments, strict=True)]

    records = torch.is_grad_enabled()
    tensors = [t if t is None or records else t.detach() for t in (input, weight, bias, residual)]
    stats = ops.batch_norm_stats(input.detach())
    output: Tensor
    output, mean, invstd = replica.replicas.meet(replica.rank, replica.layer, [*tensors, stats], compute)
    if not records:
        return output.detach()
    note_output(output, call, input, weight, bias, (mean, invstd), residual)
    return output


def _in_rows(values: Sequence[Any], width: int) -> list[Sequence[Any]]:
    return [values[start : start + width] for start in range(0, len(values), width)]


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, stats: list[Tensor], moments: list[list[Tensor]], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Returns the outputs of all replicas, for input, weight, bias and residual of one after the other.

        ``moments`` receives the mean and the inverse deviation on the device of each replica.
        """
        rows, outputs, kept = _in_rows(tensors, 4), [], []
        device = rows[0][0].device
        gathered = torch.stack([own.to(device) for own in stats])
        *merged, count, clamped = ops.merge_stats(gathered, call.buffers, call.options)
        for input, weight, bias, residual in rows:
            own = [moment.to(input.device) for moment in merged]
            moments.append(own)
            outputs.append(ops.batch_norm_elemt(input, weight, bias, *own, *after(call, residual)))
            kept += [input, weight, *((None, None) if call.options.activation is None else (bias, residual)), *own]
        ctx.call = call
        devices = [row[0].device for row in rows]
        ctx.streams = [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]
        ctx.save_for_backward(count, clamped, *kept)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd itself sets the stream of one device alone.
        with in_streams(ctx.streams):
            return _Replicated._backward(ctx, *grad_outputs)

    @staticmethod
    def _backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # An output that is not in the loss has a gradient of 0; its input still affects the statistics of all.
        call, needed = ctx.call, ctx.needs_input_grad[3:]
        count, clamped, *kept = ctx.saved_tensors
        rows = _in_rows(kept, 6)
        if torch.is_grad_enabled() or is_transforming() or any(map(is_batched, grad_outputs)):

            def compute(views: Sequence[Any]) -> list[Tensor]:
                return _differentiable(views, call, count)

            return None, None, None, *gradients_of(compute, grad_outputs, [row[:4] for row in rows], needed, call)
        ctx.recipes = None  # all operations that save the outputs ran before
        reduced, grads = [], []
        again: dict[str, Any]
        for grad_output, (input, weight, bias, residual, mean, invstd) in zip(grad_outputs, rows, strict=True):
            grad, through, again = grad_output, (), {}
            if call.options.activation is not None:
                grad, through, again = through_activation(grad_output, input, bias, residual, call)
            found = ops.batch_norm_backward_reduce(grad_output, input, mean, invstd, weight, None, *through)
            reduced.append((grad, again, *found))
        # Summed in the order of replicas, so that the bits do not depend on which device is ready first.
        total = torch.stack([sums.to(count.device) for _, _, sums, _, _ in reduced]).sum(0)
        ops.clear_clamped(total, clamped)
        for row, needs, (grad, again, _, *of_parameters) in zip(rows, _in_rows(needed, 4), reduced, strict=True):
            input, weight, _, _, mean, invstd = row
            grad_input = None
            if needs[0]:
                arguments = mean, invstd, total.to(input.device), count.to(input.device)
                grad_input = ops.batch_norm_backward_elemt(grad, input, weight, *arguments, **again)
            own = grad_input, *of_parameters, grad
            grads += [value if need else None for value, need in zip(own, needs, strict=True)]
        return None, None, None, *grads


def _differentiable(rows: Sequence[Any], call: Call, count: Tensor) -> list[Tensor]:
    """Returns the outputs of replicas in operations of torch, differentiable any number of times."""
    options = call.options
    wide = [row[0].to(ops.accumulate_dtype(row[0].dtype)) for row in rows]
    dims = ops.reduced_dims(wide[0])

    def mean_of(values: list[Tensor]) -> Tensor:
        return torch.stack([value.sum(dims).to(count.device) for value in values]).sum(0) / count

    def per_channel(values: Tensor, like: Tensor) -> Tensor:
        return ops.per_channel(values.to(like.device), like)

    mean = mean_of(wide)
    var = mean_of([(input - per_channel(mean, input)).square() for input in wide])
    invstd = (var.clamp(min=options.eps) if options.eps_mode == "clamp" else var + options.eps).rsqrt()

    def statistics(input: Tensor, _: Call) -> ops.MergedStats:
        return mean.to(input.device), invstd.to(input.device), count, None

    fixed = Call(options, ops.NO_BUFFERS, FIXED_STATISTICS)
    return [differentiable_batch_norm(*row, fixed, statistics) for row in rows]  # type: ignore[call-arg]
