"""The step, read top to bottom: statistics, gather, merge, normalize; and back: sums, all-reduce, gradient.

With an activation, ``y = act(z)`` and ``z = bn(x) + residual``. Backward then goes by ``g = grad_output * act'(z)``,
for which x, the residual and the statistics make ``z`` once more: ``g`` is the gradient of the residual, and takes the
place of ``grad_output`` in the step without activation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..options import Options
from ..sync import FIXED_STATISTICS, Sync, name_of
from ..torch_internals import apply_of, is_transformed, is_transforming, unseen_by_selective_checkpointing
from .checkpointing import is_repetition
from .higher_order import differentiable_backward, differentiable_batch_norm
from .outputs import note_output, this_thread


class Call:
    """A call without the tensors that may have gradients: options, buffers, mask and ranks.

    It has a number in the group, and statistics, once these are gathered. A checkpoint repeats the call with all of it.
    """

    __slots__ = ("buffers", "layer", "masking", "number", "options", "statistics", "sync")

    def __init__(
        self,
        options: Options,
        buffers: ops.Buffers,
        sync: Sync,
        layer: nn.Module | None = None,
        masking: ops.Masking | None = None,
    ) -> None:
        self.options, self.buffers, self.sync, self.layer, self.masking = options, buffers, sync, layer, masking
        self.number = 0
        self.statistics: ops.MergedStats | None = None

    def gather(self, input: Tensor) -> ops.MergedStats:
        """Returns the statistics of all ranks' inputs, and moves the buffers by them."""
        sync, buffers, options = self.sync, self.buffers, self.options
        speaker, self.number = sync.header()
        if self.masking is None:
            stats = ops.batch_norm_stats(input, speaker, self.number)
        else:
            stats = ops.batch_norm_stats(input, speaker, self.number, self.masking.positions)
        # Averages over all batches need as many batches on all ranks.
        counter = buffers.num_batches_tracked if options.momentum is None else None
        gathered, fault = sync.gather(stats, self.number, counter)
        if sync.is_traced:
            # Merged without the buffers, since a graph that repeats it in backward must not depend on changed buffers.
            merged = ops.merge_stats(gathered, ops.NO_BUFFERS, options)
            ops.merge_stats(gathered, buffers, options, fault)
        else:
            merged = ops.merge_stats(gathered, buffers, options, fault)
            sync.check(self.number, gathered, counter)
        if gathered.dtype != stats.dtype:  # a sum of all ranks
            mean, invstd, *rest = merged
            merged = mean.to(stats.dtype), invstd.to(stats.dtype), *rest  # type: ignore[assignment]
        self.statistics = merged
        return merged

    def without_activation(self) -> "Call":
        """Returns the call that normalizes alone."""
        options = self.options._replace(activation=None)
        return Call(options, self.buffers, self.sync, self.layer, self.masking)

    def after(self, residual: Tensor | None) -> tuple[Any, ...]:
        """Returns residual and activation as trailing arguments of ``batch_norm_elemt``."""
        activation = self.options.activation
        return (residual,) if activation is None else (residual, activation.code, activation.parameter)

    def follow(self, output: Tensor, residual: Tensor | None) -> Tensor:
        """Returns ``output`` with residual, activation and mask applied, in operations of torch."""
        return follow(output, residual, self.options, self.masking)


def follow(output: Tensor, residual: Tensor | None, options: Options, masking: ops.Masking | None = None) -> Tensor:
    """Returns ``output`` with residual, activation and mask applied, in operations of torch."""
    if residual is not None:
        residual = residual if masking is None else masking.clear_outputs(residual)
        output = output + residual.to(output.dtype)
    if options.activation is not None:
        output = options.activation.of(output)
    return output if masking is None else masking.clear_outputs(output)


def synchronized_batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call
) -> Tensor:
    """Computes :func:`~bagua_syncbn.sync_batch_norm` in training over the ranks of ``call``."""
    if torch.compiler.is_compiling():  # the compiler plans what to fuse, and what to repeat in backward
        merged = call.gather(input.detach())
        output: Tensor = _SyncBatchNorm.apply(input, weight, bias, None, call.without_activation(), *merged)
        return call.follow(output, residual)
    if is_transforming():
        if is_repetition():
            raise RuntimeError(
                "sync_batch_norm: expected no torch.func and no forward-mode differentiation through a forward that "
                "activation checkpointing repeats; take the checkpoint away"
            )
        return differentiable_batch_norm(input, weight, bias, residual, call)
    output = _SyncBatchNorm.apply(input, weight, bias, residual, call)
    if this_thread.depth and call.statistics is not None:
        moments = call.statistics[:2]
        note_output(output, call.layer, input, weight, bias, *moments, residual, call.options.activation, call.masking)
    return output


def evaluated_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    call: Call,
    mean: Tensor,
    invstd: Tensor,
) -> Tensor:
    """Computes :func:`~bagua_syncbn.sync_batch_norm` in evaluation, with constant ``mean`` and ``invstd``."""
    count = torch.ones((), dtype=torch.int64, device=input.device)
    output: Tensor = _SyncBatchNorm.apply(input, weight, bias, residual, call, mean, invstd, count, None)
    return output


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
        elif call.statistics is not None:  # in a repetition by a checkpoint
            mean, invstd, count, clamped = call.statistics
        elif this_thread.runs:
            if is_repetition():
                raise RuntimeError(f"{name_of(call.layer)}: expected no repetition of a call that failed")
            with unseen_by_selective_checkpointing():  # a repetition gathers nothing
                mean, invstd, count, clamped = call.gather(input)
        else:
            mean, invstd, count, clamped = call.gather(input)
        ctx.call = call
        activation, masking = call.options.activation, call.masking
        kept = (None, None) if activation is None else (bias, residual)
        ctx.save_for_backward(input, weight, *kept, mean, invstd, count, clamped)
        after = () if activation is None and residual is None else call.after(residual)
        output: Tensor = call.sync.elementwise.batch_norm_elemt(input, weight, bias, mean, invstd, *after)
        if masking is not None and masking.zeroes:
            masking.clear_(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, residual, mean, invstd, count, clamped = ctx.saved_tensors
        needs, call = ctx.needs_input_grad, ctx.call
        sync, number, masking = call.sync, call.number, call.masking
        # create_graph=True, is_grads_batched=True
        if torch.is_grad_enabled() or (not sync.is_traced and is_transformed(grad_output)):
            tensors, merged = (input, weight, bias, residual), (mean, invstd, count, clamped)
            return *differentiable_backward(grad_output, tensors, needs[:4], call, merged), *[None] * 5
        ctx.recipe = None  # all operations that save the output ran before
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
            grad, through, again = _through_activation(grad_output, input, bias, residual, call)
        try:
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
                    ops.batch_norm_backward_elemt_(*arguments)
                sync.check(number)
        except RuntimeError as error:
            ops.raise_torchs(error)
            raise
        grad_weight, grad_bias = grad_weight if needs[1] else None, grad_bias if needs[2] else None
        return grad_input, grad_weight, grad_bias, grad_residual, None, None, None, None, None


def _through_activation(
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
