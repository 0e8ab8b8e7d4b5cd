"""The step, read top to bottom: statistics, gather, merge, normalize; and back: sums, all-reduce, gradient.

With an activation, ``y = act(z)`` and ``z = bn(x) + residual``. Backward then goes by ``g = grad_output * act'(z)``,
for which x, the residual and the statistics make ``z`` once more: ``g`` is the gradient of the residual, and takes the
place of ``grad_output`` in the step without activation.
"""

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..sync import FixedStatistics
from ..torch_internals import apply_of, is_transformed, is_transforming
from .call import Call, follow
from .checkpointing import is_repetition, result_of_call
from .higher_order import differentiable_backward, differentiable_batch_norm
from .outputs import note_output, this_thread


def synchronized_batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, call: Call
) -> Tensor:
    """Computes :func:`~bagua_syncbn.sync_batch_norm` in training over the ranks of ``call``."""
    if torch.compiler.is_compiling():  # the compiler plans what to fuse, and what to repeat in backward
        merged = call.gather(input.detach())
        output: Tensor = _SyncBatchNorm.apply(input, weight, bias, None, call.without_activation(), *merged)
        return follow(output, residual, call.options, call.masking)
    if is_transforming():
        if is_repetition():
            raise RuntimeError(
                "sync_batch_norm: expected no torch.func and no forward-mode differentiation through a forward that "
                "activation checkpointing repeats; take the checkpoint away"
            )
        return differentiable_batch_norm(input, weight, bias, residual, call)
    output = _SyncBatchNorm.apply(input, weight, bias, residual, call)
    if this_thread.depth and call.statistics is not None:
        mask = None if call.masking is None else call.masking.output_mask
        moments = call.statistics[:2]
        note_output(output, call.layer, input, weight, bias, *moments, residual, call.options.activation, mask)
    return output


def cached_batch_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> Tensor:
    """Computes :func:`synchronized_batch_norm` if :func:`is_untouched`, for :func:`unwrapped` tensors only."""
    output: Tensor = _apply(input, weight, bias, None, call)
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
        elif this_thread.runs:
            call.sync, call.statistics = result_of_call(call.layer, lambda: (call.sync, call.gather(input)))
            mean, invstd, count, clamped = call.statistics
        else:
            mean, invstd, count, clamped = call.statistics = call.gather(input)
        ctx.call = call
        activation, masking = call.options.activation, call.masking
        saved = (None, None) if activation is None else (bias, residual)
        ctx.save_for_backward(input, weight, *saved, mean, invstd, count, clamped)
        is_plain = activation is None and masking is None and residual is None
        after = () if is_plain else call.after(residual)
        # torch.compile gets operations of torch, which the compiler fuses with neighbouring ones.
        elementwise = ops.reference if torch.compiler.is_compiling() else ops
        output: Tensor = elementwise.batch_norm_elemt(input, weight, bias, mean, invstd, *after)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, residual, mean, invstd, count, clamped = ctx.saved_tensors
        needs, call = ctx.needs_input_grad, ctx.call
        if torch.is_grad_enabled() or is_transformed(grad_output):  # create_graph=True, is_grads_batched=True
            tensors, merged = (input, weight, bias, residual), (mean, invstd, count, clamped)
            return *differentiable_backward(grad_output, tensors, needs[:4], call, merged), *_NONE
        ctx.recipe = None  # all operations that save the output ran before
        sync, masking, activation = call.sync, call.masking, call.options.activation
        is_fixed = isinstance(sync, FixedStatistics)
        mask = () if masking is None else (masking.output_mask,)
        grad = grad_output = ops.laid_out_as(input, grad_output)
        through: tuple[Any, ...] = mask
        again: dict[str, Any] = {}
        if activation is not None:
            code, parameter = activation.code, activation.parameter
            if residual is masking is None and not is_fixed and ops.recompute_is_cheaper(input, activation):
                again = {"bias": bias, "activation": code, "parameter": parameter}
            else:
                grad = torch.empty_like(input)
            through = *(mask or (None,)), bias, residual, code, parameter, None if again else grad
        try:
            # Whether the input needs a gradient is a property of the model, the same on every rank; what a rank's batch
            # holds is not, so nothing else decides whether to communicate.
            fingerprint = sync.fingerprint() if needs[0] else None
            sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
                grad_output, input, mean, invstd, weight, fingerprint, *through
            )
            grad_input = grad_residual = None
            if needs[3]:
                grad_residual = grad if masking is None or activation is not None else masking.clear_outputs(grad)
            if needs[0] and is_fixed:
                # Elementwise factors alone, because zero sums would make NaN of infinite deviations.
                grad_input = ops.batch_norm_elemt(grad, weight, None, torch.zeros_like(mean), invstd, *mask)
            elif needs[0]:
                elementwise = ops.reference if torch.compiler.is_compiling() else ops
                sums = sync.all_reduce(sums)
                if clamped is not None:
                    ops.clear_clamped(sums, clamped)
                arguments = grad, input, weight, mean, invstd, sums, count, *sync.of_sums()
                if masking is not None:
                    positions, zeroes = masking
                    grad_input = elementwise.batch_norm_backward_elemt(*arguments, mask=positions, zeroes=zeroes)
                elif grad is grad_output or residual is not None:
                    grad_input = elementwise.batch_norm_backward_elemt(*arguments, **again)
                else:
                    grad_input = grad
                    ops.batch_norm_backward_elemt_(*arguments)
                sync.check_sums()
        except RuntimeError as error:
            ops.raise_torchs(error)
            raise
        return grad_input, grad_weight if needs[1] else None, grad_bias if needs[2] else None, grad_residual, *_NONE


# None gradients for the call and for statistics that are given; extra ones are ignored.
_NONE = (None,) * 5

_apply = apply_of(_SyncBatchNorm)
