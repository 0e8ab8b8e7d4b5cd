"""Normalization by given statistics, as one autograd function.

With an activation, ``y = act(z)`` and ``z = bn(x) + residual``. Backward then goes by ``g = grad_output * act'(z)``,
for which x, the residual and the statistics make ``z`` once more: ``g`` is the gradient of the residual, and takes the
place of ``grad_output`` in the step without activation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import handle_error
from ..torch_internals.autograd import apply_of, has_transforms, is_batched, level_of_duals, untraced, unwrapped
from .call import Normalization, follow
from .derivatives import differentiable_backward


def normalize(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, by: Normalization
) -> Tensor:
    """Returns ``input`` normalized by the statistics of ``by``.

    Backward takes one sum over the ranks of its exchange, through which gradients pass the statistics of all ranks.
    Without an exchange the statistics are constants.
    """
    if by.exchange is not None and by.exchange.is_traced:
        _make_it_one_node()
        # The compiler plans what to fuse, and what to repeat in backward.
        alone = Normalization(by.options._replace(activation=None), by.exchange, by.layer, by.masking, by.statistics)
        output: Tensor = _Normalize.apply(*_without_second_derivatives(input, weight, bias), None, alone)
        return follow(output, residual, by.options, by.masking)
    # A transform that has ended may have left a wrapper around a tensor.
    weight, bias = weight if weight is None else unwrapped(weight), bias if bias is None else unwrapped(bias)
    residual = residual if residual is None else unwrapped(residual)
    return _apply(unwrapped(input), weight, bias, residual, by)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        by: Normalization,
    ) -> Tensor:
        assert by.statistics is not None
        mean, invstd, count = by.statistics
        ctx.by = by
        activation, exchange, masking = by.options.activation, by.exchange, by.masking
        if activation is None:
            ctx.save_for_backward(input, weight, None, None, mean, invstd, count)
            follows: tuple[Any, ...] = () if residual is None else (residual,)
        else:
            ctx.save_for_backward(input, weight, bias, residual, mean, invstd, count)
            follows = after(activation, residual)
        # torch.compile fuses the definitions of the ops with what is around them.
        elementwise: Any = ops.reference if exchange is not None and exchange.is_traced else ops
        output: Tensor = elementwise.batch_norm_elemt(input, weight, bias, mean, invstd, *follows)
        # Not in place: a selective checkpoint may have kept the output of the op.
        return output if masking is None else masking.clear_outputs(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, residual, mean, invstd, count = ctx.saved_tensors
        needs, by = ctx.needs_input_grad, ctx.by
        exchange, masking = by.exchange, by.masking
        is_traced = exchange is not None and exchange.is_traced
        elementwise: Any = ops.reference if is_traced else ops
        try:
            # create_graph=True; torch.func and forward mode; is_grads_batched=True
            if torch.is_grad_enabled() or (
                not is_traced and (has_transforms() or level_of_duals() >= 0 or is_batched(grad_output))
            ):
                tensors, statistics = (input, weight, bias, residual), (mean, invstd, count)
                return *differentiable_backward(grad_output, tensors, needs[:4], by, statistics), None
            ctx.recipes = None  # all operations that save the output ran before
            if masking is not None and masking.zeroes:
                # No gradient passes through a zero, whatever input and residual hold there.
                grad_output, input = masking.clear(grad_output), masking.clear(input)
                residual = None if residual is None else masking.clear(residual)
            if not is_traced and grad_output.stride() != input.stride():
                grad_output = ops.laid_out_as(input, grad_output)
            grad, through = grad_output, ()
            again: dict[str, Any] = {}
            if by.options.activation is not None:
                grad, through, again = through_activation(grad_output, input, bias, residual, by)
            # Whether the input needs a gradient is a property of the model, the same on every rank; what a rank's batch
            # holds is not, so nothing else decides whether to communicate.
            fingerprint = exchange.fingerprint() if needs[0] and exchange is not None else None
            sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
                grad_output, input, mean, invstd, weight, fingerprint, *through
            )
            grad_input, grad_residual = None, grad if needs[3] else None
            if needs[0] and exchange is None:
                # Elementwise factors alone, because zero sums would make NaN of infinite deviations.
                grad_input = ops.batch_norm_elemt(grad, weight, None, torch.zeros_like(mean), invstd)
            elif needs[0]:
                sums, ranks, fault, number = exchange.sum(sums)
                if by.options.eps_mode != "plus":
                    ops.clear_clamped(sums, invstd, by.options)
                arguments = grad, input, weight, mean, invstd, sums, count, ranks, fault, number
                if masking is not None:
                    grad_input = elementwise.batch_norm_backward_elemt(*arguments, mask=masking.positions)
                elif grad is grad_output or residual is not None:
                    grad_input = elementwise.batch_norm_backward_elemt(*arguments, **again)
                else:
                    grad_input = grad
                    ops.batch_norm_backward_elemt(*arguments, grad_input=grad)
                exchange.check()
        except Exception as error:
            handle_error(error, None if exchange is None else (exchange.communicator, by.layer))
            raise
        grad_weight, grad_bias = grad_weight if needs[1] else None, grad_bias if needs[2] else None
        return grad_input, grad_weight, grad_bias, grad_residual, None


def _without_second_derivatives(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns ``tensors``. Their gradients under ``create_graph=True`` raise when they are differentiated.

    Compiled code runs ``_Normalize.backward`` without gradients, so ``backend="eager"`` would silently leave second
    derivatives out. This function is one node of the graph: that backend calls it as it is here, and other backends,
    which refuse second derivatives by themselves, trace through it and find nothing to compute.
    """
    return _Refusing.apply(*tensors)  # type: ignore[no-any-return]


@untraced
def _make_it_one_node() -> None:
    torch.compiler.allow_in_graph(_without_second_derivatives)  # not at import, because it imports the compiler


class _Refusing(torch.autograd.Function):
    """Identity for :func:`_without_second_derivatives`."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor if tensor is None else tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grads
        return tuple(grad if grad is None else _Refused.apply(grad.detach().requires_grad_()) for grad in grads)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        raise RuntimeError(
            "sync_batch_norm: compiled code has no second derivatives; call the model without torch.compile if its "
            "loss contains a gradient (create_graph=True)"
        )


def after(activation: ops.Activation | None, residual: Tensor | None) -> tuple[Any, ...]:
    """Returns residual and activation as trailing arguments of ``batch_norm_elemt``."""
    return (residual,) if activation is None else (residual, activation.code, activation.parameter)


def through_activation(
    grad_output: Tensor, input: Tensor, bias: Tensor | None, residual: Tensor | None, by: Normalization
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Prepares the gradient ``g`` before the activation of ``by``.

    Returns the tensor that receives it, which is ``grad_output`` where it is not stored; the trailing arguments with
    which ``batch_norm_backward_reduce`` makes it; and those with which ``batch_norm_backward_elemt`` makes it again.
    """
    activation = by.options.activation
    code, parameter = activation.code, activation.parameter
    is_alone = by.masking is None and residual is None and by.exchange is not None
    if is_alone and ops.recompute_is_cheaper(input, activation):
        again = {"bias": bias, "activation": code, "parameter": parameter}
        return grad_output, (bias, None, code, parameter), again
    grad = torch.empty_like(input)
    return grad, (bias, residual, code, parameter, grad), {}


# Faster than torch's own ``apply``; for unwrapped tensors, outside of transforms.
_apply: Callable[..., Tensor] = apply_of(_Normalize)
