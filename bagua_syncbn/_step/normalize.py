"""Gathers statistics and normalizes, with a single autograd function.

With an activation, ``y = act(z)`` and ``z = bn(x) + residual``. Backward recomputes ``z`` from x, the residual and the
statistics. The gradient of the residual is ``g = grad_output * act'(z)``. All other gradients are computed as without
an activation, from ``g`` instead of ``grad_output``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _ops as ops
from .._errors import handle_error
from .._torch.autograd import apply_of, has_transforms, is_batched, level_of_duals, unwrapped
from .call import Call, Normalization, Statistics, apply_epilogue
from .derivatives import differentiable_batch_norm, gradients_of, once_differentiable, peers_of_backward


def batch_statistics(input: Tensor, call: Call, norm: Normalization) -> Statistics:
    """Gathers the statistics of all ranks' inputs, and updates the buffers of ``call``.

    ``input`` is the input of ``call``; autograd does not record the statistics.
    """
    exchange, options = norm.exchange, norm.options
    assert exchange is not None
    norm.number, *header = exchange.open()
    mask = None if norm.masking is None else norm.masking.positions
    row = ops.batch_norm_stats(input, *header, mask, exchange.summed)
    received = exchange.send(row, "forward", norm.number)
    # Inlines call.tracked_buffers.
    buffers = call.buffers if call.accumulate is None and call.buffers.running_mean is not None else ops.NO_BUFFERS
    if call.accumulate is not None:
        call.accumulate(received, options)
    if call.mode == "compiled":
        # Separate from the statistics: a graph that recomputes them in backward must not read updated buffers.
        ops.update_buffers(received, buffers, options)
        return ops.merge_stats(received, ops.NO_BUFFERS, options)
    statistics = ops.merge_stats(received, buffers, options)
    exchange.check(norm.number, received.message)
    return statistics


def normalize(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, norm: Normalization
) -> Tensor:
    """Returns ``input``, normalized with the statistics of ``norm``.

    Backward sums over the ranks of the exchange, because the statistics depend on all ranks' inputs. Without an
    exchange, the statistics are constants.
    """
    if norm.is_traced:
        # Leaves activation and residual to the compiler, which decides what to fuse and recompute.
        plain = replace(norm, options=norm.options._replace(activation=None))
        output: Tensor = _Normalize.apply(input, weight, bias, None, plain)
        return apply_epilogue(once_differentiable(output), residual, norm.options, norm.masking)
    if not torch.is_grad_enabled():
        return _Normalize.forward(None, input, weight, bias, residual, norm)
    # A finished transform may have left a wrapper around a tensor.
    weight, bias = weight if weight is None else unwrapped(weight), bias if bias is None else unwrapped(bias)
    residual = residual if residual is None else unwrapped(residual)
    return _apply(unwrapped(input), weight, bias, residual, norm)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        norm: Normalization,
    ) -> Tensor:
        """Returns the output. If gradients are disabled, it is called directly, with None as ``ctx``."""
        assert norm.statistics is not None
        activation, masking = norm.options.activation, norm.masking
        if ctx is not None:
            ctx.norm = norm
            kept = (input, weight, None, None) if activation is None else (input, weight, bias, residual)
            ctx.save_for_backward(*kept, *norm.statistics)
        epilogue = () if activation is None and residual is None else epilogue_args(activation, residual)
        elemt = ops.reference.batch_norm_elemt if norm.is_traced else ops.batch_norm_elemt
        output: Tensor = elemt(input, weight, bias, norm.statistics[0], norm.statistics[1], *epilogue)
        # Not in place: a selective checkpoint may have saved the op's output.
        return output if masking is None else masking.clear_outputs(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, residual, mean, invstd, count = ctx.saved_tensors
        needs, norm = ctx.needs_input_grad, ctx.norm
        exchange, masking = norm.exchange, norm.masking
        try:
            # create_graph=True; torch.func and forward mode; is_grads_batched=True
            if torch.is_grad_enabled() or (
                not norm.is_traced and (has_transforms() or level_of_duals() >= 0 or is_batched(grad_output))
            ):
                statistics, row = (mean, invstd, count), (input, weight, bias, residual)
                compute_one = partial(differentiable_batch_norm, norm=norm, gather=lambda _: statistics)
                compute = lambda rows: [compute_one(*rows[0])]  # noqa: E731
                return *gradients_of(compute, [grad_output], [row], needs[:4], norm.options), None
            ctx.recipes = None  # every operation that saves the output has already run
            if masking is not None and masking.zeroes:
                # No gradient passes through the zeros, even if input or residual hold NaN there.
                grad_output, input = masking.clear(grad_output), masking.clear(input)
                residual = None if residual is None else masking.clear(residual)
            if not norm.is_traced and grad_output.stride() != input.stride():
                grad_output = ops.laid_out_as(input, grad_output)
            grad, reduce_args, elemt_args = (
                (grad_output, (), {})
                if norm.options.activation is None and masking is None
                else activation_args(grad_output, input, bias, residual, norm)
            )
            # Communicates only if needs[0]: the model determines it, so all ranks agree.
            fingerprint = exchange.fingerprint(norm.number) if needs[0] and exchange is not None else None
            sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
                grad_output, input, mean, invstd, weight, fingerprint, *reduce_args
            )
            if not needs[0]:
                grad_input = None
            elif exchange is None:
                # Not backward_elemt with zero sums: zero times an infinite invstd is NaN.
                grad_input = ops.batch_norm_elemt(grad, weight, None, torch.zeros_like(mean), invstd)
            else:
                sums, *header_args = exchange.send(sums, "backward", norm.number)
                if norm.options.eps_mode != "plus":
                    ops.clear_clamped(sums, invstd, norm.options)
                elemt = ops.reference.batch_norm_backward_elemt if norm.is_traced else ops.batch_norm_backward_elemt
                grad_input = elemt(grad, input, weight, mean, invstd, sums, count, *header_args, **elemt_args)
                grad_input = elemt_args.get("grad_input", grad_input)
                exchange.check(norm.number)
        except Exception as error:
            handle_error(error, peers_of_backward, ctx, grad_output)
            raise
        return (
            grad_input,
            grad_weight if needs[1] else None,
            grad_bias if needs[2] else None,
            grad if needs[3] else None,
            None,
        )


def epilogue_args(activation: ops.Activation | None, residual: Tensor | None) -> tuple[Any, ...]:
    """Returns the trailing ``batch_norm_elemt`` arguments for residual and activation."""
    return (residual,) if activation is None else (residual, activation.code, activation.parameter)


def activation_args(
    grad_output: Tensor, input: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Normalization
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Decides how the two ops of backward get ``g``.

    Returns:
        - the tensor that holds ``g``, or ``grad_output`` if both ops compute it
        - trailing arguments of ``batch_norm_backward_reduce``
        - keyword arguments of ``batch_norm_backward_elemt``; with ``grad_input``, the op writes the result there
    """
    activation, masking = norm.options.activation, norm.masking
    elemt_args: dict[str, Any] = {} if masking is None else {"mask": masking.positions}
    if activation is None:
        return grad_output, (), elemt_args
    code, parameter = activation.code, activation.parameter
    can_recompute = masking is None and residual is None and norm.exchange is not None
    if can_recompute and _recompute_is_cheaper(input, activation):
        elemt_args = {"bias": bias, "activation": code, "parameter": parameter}
        return grad_output, (bias, None, code, parameter), elemt_args
    grad = torch.empty_like(input)
    if masking is None and residual is None:  # nothing else reads g
        elemt_args = {"grad_input": grad}
    return grad, (bias, residual, code, parameter, grad), elemt_args


def _recompute_is_cheaper(input: Tensor, activation: ops.Activation) -> bool:
    """Returns whether computing the activation twice in backward is faster than storing its gradient between passes."""
    on_gpu = ops.KERNELS.endswith("cuda") and input.device.type == "cuda"
    return on_gpu or (ops.KERNELS != "reference" and input.device.type == "cpu" and activation.is_cheap)


# Faster than Function.apply. Valid only for unwrapped tensors outside of transforms.
_apply: Callable[..., Tensor] = apply_of(_Normalize)
