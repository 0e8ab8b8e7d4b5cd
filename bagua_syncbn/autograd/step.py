"""The step, read top to bottom: stats, gather, merge, normalize. And back: sums, reduce, gradient."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..communicators import Communicator
from .differentiable import differentiable_backward
from .internals import unseen_by_selective_checkpointing
from .recomputation import Forward, forwards_of


def synchronized_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    eps_mode: str,
    communicator: Communicator,
    layer: nn.Module | None,
) -> Tensor:
    """Training of :func:`~bagua_syncbn.sync_batch_norm` over the ranks of ``communicator``."""

    def synchronize(stats: Tensor) -> ops.Moments:
        gathered = communicator.all_gather(stats)
        return ops.merge_stats(gathered, running_mean, running_var, num_batches_tracked, momentum, eps, eps_mode)

    if torch.compiler.is_compiling():  # which plans by itself what to repeat in backward
        gathered = communicator.all_gather(ops.batch_norm_stats(input.detach()))
        # Apart from the buffers: what a graph repeats in backward must not depend on what changed in forward.
        moments = ops.merge_stats(gathered, None, None, None, None, eps, eps_mode)
        if running_mean is not None:
            ops.merge_stats(gathered, running_mean, running_var, num_batches_tracked, momentum, eps, eps_mode)
        traced: Tensor = _SyncBatchNorm.apply(input, weight, bias, *moments, communicator, None)
        return traced
    forwards = forwards_of(layer)
    with torch.no_grad(), unseen_by_selective_checkpointing():
        stats = ops.batch_norm_stats(input)
        forward = forwards.recall(stats, eps, eps_mode)
        if forward is None:
            forward = Forward(stats, eps, eps_mode, synchronize(stats))
            forwards.remember(forward)
    output: Tensor = _SyncBatchNorm.apply(input, weight, bias, *forward.moments, communicator, forward)
    if not output.requires_grad:
        forwards.hold(forward)
    return output


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        count: Tensor,
        clamped: Tensor | None,
        communicator: Communicator,
        forward: Forward | None,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, invstd, count, clamped)
        ctx.communicator = communicator
        ctx.forward = forward  # remembered as long as this graph lives, because that long it can be repeated
        output: Tensor = ops.batch_norm_elemt(input, weight, bias, mean, invstd)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, *moments = ctx.saved_tensors
        mean, invstd, count, clamped = moments
        needs_grad = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph=True
            grads = differentiable_backward(
                grad_output, input, weight, ops.Moments(*moments), ctx.communicator, needs_grad
            )
            return *grads, *[None] * 6
        grad_output = _laid_out_as(input, grad_output)
        sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(grad_output, input, mean, invstd, weight)
        grad_input = None
        # Whether the input needs a gradient is a property of the model, the same on every rank; what a rank's batch
        # holds is not, so nothing else decides whether to communicate.
        if needs_grad[0]:
            sums = ops.clear_clamped(ctx.communicator.all_reduce(sums), clamped)
            grad_input = ops.batch_norm_backward_elemt(grad_output, input, weight, mean, invstd, sums, count)
        return grad_input, grad_weight if needs_grad[1] else None, grad_bias if needs_grad[2] else None, *[None] * 6


def _laid_out_as(input: Tensor, grad_output: Tensor) -> Tensor:
    """Returns ``grad_output`` in the memory format of ``input``, so that no two ops make the same copy."""
    if grad_output.stride() == input.stride():
        return grad_output
    strides = zip(input.size(), input.stride(), grad_output.stride(), strict=True)
    if all(size == 1 or expected == stride for size, expected, stride in strides):
        return grad_output
    return torch.empty_like(input).copy_(grad_output)
