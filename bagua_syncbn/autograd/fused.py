"""The step with what follows the normalization: y = act(bn(x) + residual).

Backward keeps x, the residual and the statistics, and makes ``z = bn(x) + residual`` from them once more. With
``g = grad_output * act'(z)``, which is the gradient of the residual, it is the step without activation for ``g``. The
pass that adds up gradients makes ``g``. Without a residual it is not stored but made once more by the second pass,
where that is faster; elsewhere the gradient of x takes its place in memory on CPU. Without an activation
``g`` is ``grad_output``, and not even the residual is kept.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..torch_internals import is_transformed
from .differentiable import differentiable_backward
from .epilogue import Epilogue
from .exchange import Alone, AnyExchange, Exchange, Given


def fused_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epilogue: Epilogue,
    merged: ops.MergedStats,
    exchange: AnyExchange,
) -> Tensor:
    """Normalizes by the statistics ``merged``, and does what follows."""
    activation = epilogue.activation or ops.IDENTITY
    output: Tensor = _FusedBatchNorm.apply(input, weight, bias, epilogue.residual, activation, *merged, exchange)
    return output


def fused_evaluation(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, epilogue: Epilogue, mean: Tensor, invstd: Tensor
) -> Tensor:
    """Normalizes by running statistics, which are constants, and does what follows."""
    count = torch.ones((), dtype=torch.int64, device=input.device)
    return fused_batch_norm(input, weight, bias, epilogue, (mean, invstd, count, None), Given())


class _FusedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: ops.Activation,
        mean: Tensor,
        invstd: Tensor,
        count: Tensor,
        clamped: Tensor | None,
        exchange: AnyExchange,
    ) -> Tensor:
        code, parameter = ctx.act = activation.code, activation.parameter
        ctx.save_for_backward(input, weight, bias, residual if code else None, mean, invstd, count, clamped)
        ctx.activation, ctx.exchange = activation, exchange
        output: Tensor = ops.batch_norm_act_elemt(input, weight, bias, mean, invstd, residual, code, parameter)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        is_more = torch.is_grad_enabled() or is_transformed(grad_output)
        gradients = _differentiable_gradients if is_more else _gradients
        needs_grad = ctx.needs_input_grad[:4]
        grads = gradients(ctx, grad_output)
        return *(grad if needed else None for grad, needed in zip(grads, needs_grad, strict=True)), *[None] * 6


def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of input, weight, bias and residual."""
    ctx.recipe = None  # whoever saves the output has come before
    input, weight, bias, residual, mean, invstd, count, clamped = ctx.saved_tensors
    exchange: Exchange | Alone = ctx.exchange
    fingerprint = exchange.fingerprint() if ctx.needs_input_grad[0] else None
    grad = ops.laid_out_as(input, grad_output)
    op: Any = ops.batch_norm_backward_elemt
    code, parameter = ctx.act
    if code == 0:
        sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(grad, input, mean, invstd, weight, fingerprint)
    else:
        is_given = isinstance(exchange, Given)
        twice = (
            not is_given and residual is None and exchange.masking is None and ops.outrun_memory(input, ctx.activation)
        )
        sums, grad_weight, grad_bias, stored = ops.batch_norm_act_backward_reduce(
            grad, input, mean, invstd, weight, bias, residual, code, parameter, fingerprint, not twice
        )
        if twice:
            op = partial(_once_more, bias, code, parameter)
        else:
            grad = stored
            op = _in_place if residual is None and input.device.type == "cpu" else op
    grad_input = None
    if ctx.needs_input_grad[0] and isinstance(exchange, Given):
        # Nothing passes through statistics that are given: no deviation, which may be infinite, is multiplied by zero.
        grad_input = ops.batch_norm_elemt(grad, weight, None, torch.zeros_like(mean), invstd)
    elif ctx.needs_input_grad[0]:
        sums = ops.clear_clamped(exchange.all_reduce(sums), clamped)
        grad_input = exchange.backward_elemt(grad, input, weight, mean, invstd, sums, count, op=op)
    return grad_input, grad_weight, grad_bias, grad


def _once_more(bias: Tensor | None, code: int, parameter: float, *arguments: Any) -> Tensor:
    tensors, last = arguments[:7], arguments[7:]
    grad_input: Tensor = ops.batch_norm_act_backward_elemt(*tensors, bias, code, parameter, *last)
    return grad_input


def _in_place(grad: Tensor, *arguments: Any) -> Tensor:
    ops.batch_norm_backward_elemt_(grad, *arguments)
    return grad


def _differentiable_gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, bias, residual, *merged = ctx.saved_tensors
    needs_grad = [*ctx.needs_input_grad[:3], residual is not None and ctx.needs_input_grad[3]]
    epilogue = Epilogue(ctx.activation, residual)
    *grads, grad_residual = differentiable_backward(
        grad_output, input, weight, bias, (*merged,), ctx.exchange, needs_grad, epilogue
    )
    return *grads, grad_output if residual is None else grad_residual
