"""Normalizes with given statistics: a single autograd function.

With an activation, ``y = act(z)`` and ``z = bn(x) + residual``. Backward recomputes ``z`` from x, the residual and the
statistics. The gradient of the residual is ``g = grad_output * act'(z)``. All other gradients are computed as without
an activation, from ``g`` instead of ``grad_output``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _ops as ops
from .._errors import handle_error
from .._torch.autograd import apply_of, has_transforms, is_batched, level_of_duals, unwrapped
from .call import Call, Normalization
from .derivatives import differentiable_batch_norm, gradients_of, once_differentiable, peers_of_backward

if TYPE_CHECKING:
    from .steps import Step


def normalize(call: Call, norm: Normalization) -> Tensor:
    """Returns the output of ``call``, normalized with ``norm.statistics``.

    Backward sums over the ranks of the exchange, because the statistics depend on all ranks' inputs. Without an
    exchange, the statistics are constants.
    """
    input, weight, bias, residual, *_ = call
    if not torch.is_grad_enabled():
        return _Normalize.forward(None, input, weight, bias, residual, norm)
    return _apply(  # a finished transform may have left a wrapper around a tensor
        unwrapped(input),
        weight if weight is None else unwrapped(weight),
        bias if bias is None else unwrapped(bias),
        residual if residual is None else unwrapped(residual),
        norm,
    )


def normalize_in_graph(call: Call, norm: Normalization) -> Tensor:
    """Returns the output of ``call`` without its residual, in a graph of torch.compile."""
    return once_differentiable(_Normalize.apply(call.input, call.weight, call.bias, None, norm))


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
        mean, invstd, count = norm.statistics
        activation = norm.step.options.activation
        if ctx is not None:
            ctx.norm = norm
            recomputed = (None, None) if activation is None else (bias, residual)
            ctx.save_for_backward(input, weight, *recomputed, mean, invstd, count)
        epilogue = () if activation is None and residual is None else epilogue_args(activation, residual)
        elemt = ops.reference.batch_norm_elemt if norm.step.is_compiled else ops.batch_norm_elemt
        output: Tensor = elemt(input, weight, bias, mean, invstd, *epilogue)
        # Not in place: a selective checkpoint may have saved the op's output.
        return output if norm.masking is None else norm.masking.clear_outputs(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, residual, mean, invstd, count = ctx.saved_tensors
        needs, norm = ctx.needs_input_grad, ctx.norm
        step, masking = norm.step, norm.masking
        try:
            # create_graph=True; torch.func and forward mode; is_grads_batched=True
            if torch.is_grad_enabled() or (
                not step.is_compiled and (has_transforms() or level_of_duals() >= 0 or is_batched(grad_output))
            ):
                statistics, row = (mean, invstd, count), (input, weight, bias, residual)
                compute_one = partial(differentiable_batch_norm, norm=norm, gather=lambda _: statistics)
                compute = lambda rows: [compute_one(*rows[0])]  # noqa: E731
                return *gradients_of(compute, [grad_output], [row], needs[:4], step.options), None
            ctx.recipes = None  # every operation that saves the output has already run
            if masking is not None and masking.zeroes:
                # No gradient passes through the zeros, even if input or residual hold NaN there.
                grad_output, input = masking.clear(grad_output), masking.clear(input)
                residual = None if residual is None else masking.clear(residual)
            if not step.is_compiled and grad_output.stride() != input.stride():
                grad_output = ops.laid_out_as(input, grad_output)
            grad, reduce_args, elemt_args = (
                (grad_output, (), {})
                if step.options.activation is None and masking is None
                else activation_args(grad_output, input, bias, residual, norm)
            )
            # Communicates only if needs[0]: the model determines it, so all ranks agree.
            exchange = step.exchange if needs[0] else None
            fingerprint = None if exchange is None else exchange.fingerprint(norm.number)
            sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
                grad_output, input, mean, invstd, weight, fingerprint, *reduce_args
            )
            if exchange is not None:
                tensors = grad, input, weight, mean, invstd, count
                grad_input = exchange.share(sums, "backward", norm.number, _input_gradient, step, *tensors, elemt_args)
                grad_input = elemt_args.get("grad_input", grad_input)
            elif needs[0]:
                # Not backward_elemt with zero sums: zero times an infinite invstd is NaN.
                grad_input = ops.batch_norm_elemt(grad, weight, None, torch.zeros_like(mean), invstd)
            else:
                grad_input = None
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


def _input_gradient(
    received: ops.Received,
    step: Step,
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    count: Tensor,
    elemt_args: dict[str, Any],
) -> Tensor:
    """Returns the gradient of the input, given the sums over ranks."""
    if step.options.eps_mode != "plus":
        ops.clear_clamped(received.message, invstd, step.options)
    elemt = ops.reference.batch_norm_backward_elemt if step.is_compiled else ops.batch_norm_backward_elemt
    return elemt(grad, input, weight, mean, invstd, received.message, count, *received[1:], **elemt_args)


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
    activation, masking = norm.step.options.activation, norm.masking
    elemt_args: dict[str, Any] = {} if masking is None else {"mask": masking.positions}
    if activation is None:
        return grad_output, (), elemt_args
    code, parameter = activation.code, activation.parameter
    can_recompute = masking is None and residual is None and norm.step.exchange is not None
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
