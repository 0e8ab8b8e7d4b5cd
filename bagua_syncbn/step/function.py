"""The step, read top to bottom: statistics, gather, merge, normalize; and back: sums, all-reduce, gradient.

With an activation, ``y = act(z)`` and ``z = bn(x) + residual``. Backward then goes by ``g = grad_output * act'(z)``,
for which x, the residual and the statistics make ``z`` once more: ``g`` is the gradient of the residual, and takes the
place of ``grad_output`` in the step without activation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..sync import FIXED_STATISTICS, name_of, raise_for_all
from ..torch_internals import (
    apply_of,
    has_transforms,
    is_batched,
    is_transforming,
    level_of_duals,
    unseen_by_selective_checkpointing,
)
from .call import Call, follow
from .checkpointing import is_repetition
from .differentiable import differentiable_backward, differentiable_batch_norm
from .recomputation import note_output, this_thread


def synchronized_batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call
) -> Tensor:
    """Computes :func:`~bagua_syncbn.sync_batch_norm` over the ranks of ``call``, or by the statistics that it has."""
    if torch.compiler.is_compiling():  # the compiler plans what to fuse, and what to repeat in backward
        merged = gather(input.detach(), call)
        options = call.options
        alone = Call(options._replace(activation=None), call.buffers, call.sync, call.layer, call.masking)
        output: Tensor = _SyncBatchNorm.apply(input, weight, bias, None, alone, *merged)
        return follow(output, residual, options, call.masking)
    if is_transforming():
        if is_repetition():
            raise RuntimeError(
                "sync_batch_norm: expected no torch.func and no forward-mode differentiation through a forward that "
                "activation checkpointing repeats; take the checkpoint away"
            )
        return differentiable_batch_norm(input, weight, bias, residual, call, gather)
    output = _SyncBatchNorm.apply(input, weight, bias, residual, call)
    if this_thread.depth and call.statistics is not None and call.sync is not FIXED_STATISTICS:
        note_output(output, call, input, weight, bias, call.statistics[:2], residual)
    return output


def gather(input: Tensor, call: Call) -> ops.MergedStats:
    """Returns the statistics of all ranks' inputs, and updates the buffers."""
    sync, buffers, options = call.sync, call.buffers, call.options
    caller, call.number = sync.header()
    if call.masking is None:
        stats = ops.batch_norm_stats(input, caller, call.number)
    else:
        stats = ops.batch_norm_stats(input, caller, call.number, call.masking.positions)
    # Averages over all batches need as many batches on all ranks.
    counter = buffers.num_batches_tracked if options.momentum is None else None
    gathered, fault = sync.gather(stats, call.number, counter)
    if sync.is_traced:
        # Merged without the buffers, since a graph that repeats it in backward must not depend on changed buffers.
        merged = ops.merge_stats(gathered, ops.NO_BUFFERS, options)
        ops.merge_stats(gathered, buffers, options, fault)
    else:
        merged = ops.merge_stats(gathered, buffers, options, fault)
        sync.check(call.number, gathered, counter)
    if gathered.dtype != stats.dtype:  # a sum of all ranks
        mean, invstd, *rest = merged
        merged = mean.to(stats.dtype), invstd.to(stats.dtype), *rest  # type: ignore[assignment]
    call.statistics = merged
    return merged


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        call: Call,
        *given: Any,
    ) -> Tensor:
        if given:
            mean, invstd, count, clamped = given
        elif call.statistics is not None:  # in evaluation, and in a repetition by a checkpoint
            mean, invstd, count, clamped = call.statistics
        elif this_thread.runs:
            if is_repetition():
                raise RuntimeError(f"{name_of(call.layer)}: expected no repetition of a call that failed")
            with unseen_by_selective_checkpointing():  # a repetition gathers nothing
                mean, invstd, count, clamped = gather(input, call)
        else:
            mean, invstd, count, clamped = gather(input, call)
        ctx.call = call
        activation, masking = call.options.activation, call.masking
        kept = (None, None) if activation is None else (bias, residual)
        ctx.save_for_backward(input, weight, *kept, mean, invstd, count, clamped)
        follows = () if activation is None and residual is None else after(call, residual)
        output: Tensor = call.sync.elementwise.batch_norm_elemt(input, weight, bias, mean, invstd, *follows)
        # Not in place: a selective checkpoint may have kept the output of the op.
        return output if masking is None else masking.clear_outputs(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, residual, mean, invstd, count, clamped = ctx.saved_tensors
        needs, call = ctx.needs_input_grad, ctx.call
        sync, number, masking = call.sync, call.number, call.masking
        try:
            # create_graph=True; torch.func and forward mode; is_grads_batched=True
            if torch.is_grad_enabled() or (
                not sync.is_traced and (has_transforms() or level_of_duals() >= 0 or is_batched(grad_output))
            ):
                tensors, merged = (input, weight, bias, residual), (mean, invstd, count, clamped)
                return *differentiable_backward(grad_output, tensors, needs[:4], call, merged), *[None] * 5
            ctx.recipes = None  # all operations that save the output ran before
            if masking is not None and masking.zeroes:
                # No gradient passes through a zero, whatever input and residual hold there.
                grad_output, input = masking.clear(grad_output), masking.clear(input)
                residual = None if residual is None else masking.clear(residual)
            if not sync.is_traced and grad_output.stride() != input.stride():
                grad_output = ops.laid_out_as(input, grad_output)
            is_fixed = sync is FIXED_STATISTICS
            grad, through = grad_output, ()
            again: dict[str, Any] = {}
            if call.options.activation is not None:
                grad, through, again = through_activation(grad_output, input, bias, residual, call)
            # Whether the input needs a gradient is a property of the model, the same on every rank; what a rank's batch
            # holds is not, so nothing else decides whether to communicate.
            fingerprint = sync.fingerprint(number) if needs[0] else None
            sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
                grad_output, input, mean, invstd, weight, fingerprint, *through
            )
            grad_input, grad_residual = None, grad if needs[3] else None
            if needs[0] and is_fixed:
                # Elementwise factors alone, because zero sums would make NaN of infinite deviations.
                grad_input = ops.batch_norm_elemt(grad, weight, None, torch.zeros_like(mean), invstd)
            elif needs[0]:
                sums, *check = sync.all_reduce(sums, number)
                if clamped is not None:
                    ops.clear_clamped(sums, clamped)
                arguments = grad, input, weight, mean, invstd, sums, count, *check
                if masking is not None:
                    grad_input = sync.elementwise.batch_norm_backward_elemt(*arguments, mask=masking.positions)
                elif grad is grad_output or residual is not None:
                    grad_input = sync.elementwise.batch_norm_backward_elemt(*arguments, **again)
                else:
                    grad_input = grad
                    ops.batch_norm_backward_elemt(*arguments, grad_input=grad)
                sync.check(number)
        except Exception as error:
            raise_for_all(error, (sync.communicator, call.layer))
            raise
        grad_weight, grad_bias = grad_weight if needs[1] else None, grad_bias if needs[2] else None
        return grad_input, grad_weight, grad_bias, grad_residual, None, None, None, None, None


def after(call: Call, residual: Tensor | None) -> tuple[Any, ...]:
    """Returns residual and activation as trailing arguments of ``batch_norm_elemt``."""
    activation = call.options.activation
    return (residual,) if activation is None else (residual, activation.code, activation.parameter)


def through_activation(
    grad_output: Tensor, input: Tensor, bias: Tensor | None, residual: Tensor | None, call: Call
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Prepares the gradient ``g`` before the activation of ``call``.

    Returns the tensor that receives it, which is ``grad_output`` where it is not stored; the trailing arguments with
    which ``batch_norm_backward_reduce`` makes it; and those with which ``batch_norm_backward_elemt`` makes it again.
    """
    activation = call.options.activation
    code, parameter = activation.code, activation.parameter
    is_alone = call.masking is None and residual is None and call.sync is not FIXED_STATISTICS
    if is_alone and ops.recompute_is_cheaper(input, activation):
        again = {"bias": bias, "activation": code, "parameter": parameter}
        return grad_output, (bias, None, code, parameter), again
    grad = torch.empty_like(input)
    return grad, (bias, residual, code, parameter, grad), {}


# Computes synchronized_batch_norm if is_untouched(), for unwrapped() tensors only.
cached_batch_norm: Callable[..., Tensor] = apply_of(_SyncBatchNorm)
