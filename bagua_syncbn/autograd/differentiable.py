r"""The step once more, from parts that can be differentiated any number of times, in backward and in forward mode.

All that crosses between ranks is in two functions, and the derivatives of each are made of these two functions again::

    x --> _Merged --> mean, invstd --> (x - mean) * invstd * weight + bias --> y       _AllReduce: sum over ranks

The rest is plain torch. Second derivatives, forward-mode differentiation and :mod:`torch.func` take this path; it holds
more intermediate tensors of the input's size than the step that runs in training.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..sync import tell_peers
from ..torch_internals import is_grads_batch
from .epilogue import Epilogue
from .exchange import Alone, AnyExchange, Given


def differentiable_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: ops.MergeOptions,
    exchange: AnyExchange,
    merged: ops.MergedStats | None = None,
    epilogue: Epilogue | None = None,
) -> Tensor:
    """Training of :func:`~bagua_syncbn.sync_batch_norm`; ``merged`` are the statistics of one made before.

    Where they are given there is no communication, and no buffer changes.
    """
    wide = input.to(ops.accumulate_dtype(input.dtype))
    masking = exchange.masking
    if masking is not None and masking.zeroes:
        wide = masking.clear(wide)
    if merged is not None and isinstance(exchange, Given):
        mean, invstd, *_ = merged
    else:
        mean, invstd, _, _ = _Merged.apply(wide, options, exchange, merged)
    output = (wide - ops.per_channel(mean, wide)) * ops.per_channel(invstd, wide)
    if weight is not None:
        output = output * ops.per_channel(weight.to(wide.dtype), wide)
    if bias is not None:
        output = output + ops.per_channel(bias.to(wide.dtype), wide)
    if epilogue is not None:
        output = epilogue.after(output)
    if masking is not None and masking.zeroes:
        output = masking.clear(output)
    return output.to(input.dtype)


def differentiable_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    merged: ops.MergedStats,
    exchange: AnyExchange,
    needs_grad: Sequence[bool],
    epilogue: Epilogue | None = None,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of input, weight, bias and residual as functions of the tensors; None if not needed.

    Autograd makes them from :func:`differentiable_batch_norm`, so that no formula is written twice. They are functions
    where gradients are enabled, and constants elsewhere. ``grad_output`` may be a batch of gradients, where this rank
    is alone.
    """
    create_graph = torch.is_grad_enabled()
    residual = None if epilogue is None else epilogue.residual
    unused = ops.MergeOptions(None, None, None, None, 0.0, "plus")
    with torch.enable_grad():
        # Views, so that autograd ends at this use of each: one may depend on another.
        input = input.view_as(input)
        weight, bias, residual = (None if t is None else t.view_as(t) for t in (weight, bias, residual))
        epilogue = None if epilogue is None else epilogue._replace(residual=residual)
        output = differentiable_batch_norm(input, weight, bias, unused, exchange, merged, epilogue)
    tensors = (input, weight, bias, residual)
    wanted = [tensor for tensor, needed in zip(tensors, needs_grad, strict=True) if tensor is not None and needed]
    grads = iter(torch.autograd.grad(output, wanted, grad_output, create_graph=create_graph))
    return tuple(next(grads) if needed else None for needed in needs_grad)


class _Merged(torch.autograd.Function):
    r"""Mean and inverse deviation of all ranks' batches, as functions of this rank's.

    With N values per channel in all, :math:`\partial\mu / \partial x_i = 1 / N` and :math:`\partial\sigma^{-1} /
    \partial x_i = -\sigma^{-3} (x_i - \mu) / N`. An all-reduce adds up the
    ranks' shares of the gradients of the two, and one the ranks' shares of their tangents.
    """

    @staticmethod
    def forward(
        input: Tensor,
        options: ops.MergeOptions,
        exchange: AnyExchange,
        merged: ops.MergedStats | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, invstd, count, clamped = exchange.statistics(input, options) if merged is None else merged
        clamped = torch.zeros_like(mean, dtype=torch.bool) if clamped is None else clamped
        # Clones, because a function must not return tensors that are kept elsewhere.
        return mean.clone(), invstd.clone(), count.clone(), clamped.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(inputs[0], *output)
        ctx.save_for_forward(inputs[0], *output)
        ctx.exchange = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_invstd: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        input, mean, invstd, count, clamped = ctx.saved_tensors
        total = _all_reduce(torch.cat([grad_mean, grad_invstd]), ctx.exchange)
        grad_mean, grad_invstd = total.chunk(2)
        slope = (-(invstd**3) * grad_invstd).masked_fill(clamped, 0)
        centered = input - ops.per_channel(mean, input)
        grad_input = (ops.per_channel(grad_mean, input) + centered * ops.per_channel(slope, input)) / count
        return _of_statistics(grad_input, ctx.exchange), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if tangent is None:
            return None, None, None, None
        input, mean, invstd, count, clamped = ctx.saved_tensors
        centered = input - ops.per_channel(mean, input)
        dims = ops.reduced_dims(input)
        tangent = _of_statistics(tangent, ctx.exchange)
        centered = _of_statistics(centered, ctx.exchange)
        total = _all_reduce(torch.cat([tangent.sum(dims), (centered * tangent).sum(dims)]), ctx.exchange) / count
        tangent_mean, covariance = total.chunk(2)
        return tangent_mean, (-(invstd**3) * covariance).masked_fill(clamped, 0), None, None

    @staticmethod
    def vmap(_info: Any, _in_dims: Any, _input: Any, _options: Any, exchange: AnyExchange, _merged: Any) -> None:
        raise _no_vmap(exchange)


def _of_statistics(values: Tensor, exchange: AnyExchange) -> Tensor:
    """Returns ``values`` (N, C, \\*), 0 where the input has no share in the statistics."""
    return values if exchange.masking is None else exchange.masking.clear(values)


def _all_reduce(packed: Tensor, exchange: AnyExchange) -> Tensor:
    """Returns the sum over ranks of ``packed``, as a function of it."""
    if isinstance(exchange, Alone):
        return exchange.total(packed)
    if is_grads_batch(packed):
        raise _no_vmap(exchange)
    total: Tensor = _AllReduce.apply(packed, exchange)
    return total


class _AllReduce(torch.autograd.Function):
    """The sum over ranks, whose derivative is the sum over ranks."""

    @staticmethod
    def forward(packed: Tensor, exchange: AnyExchange) -> Tensor:
        return exchange.total(packed.clone())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.exchange = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad_output, ctx.exchange), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _all_reduce(tangent, ctx.exchange)

    @staticmethod
    def vmap(_info: Any, _in_dims: Any, _packed: Any, exchange: AnyExchange) -> None:
        raise _no_vmap(exchange)


def _no_vmap(exchange: AnyExchange) -> RuntimeError:
    refusal = RuntimeError(
        "sync_batch_norm: expected no torch.func.vmap over training and no is_grads_batched in its backward pass with "
        "the statistics of a group, because its collectives cannot be batched; call it once for each sample of the "
        "batch, or vmap the model in eval(), or after revert_sync_batchnorm"
    )
    if not isinstance(exchange, Alone):
        tell_peers(exchange.communicator, None, refusal)
    return refusal
