r"""Differentiable form of the step, for derivatives of any order in backward and in forward mode.

Two functions hold all communication between ranks, and the derivatives of each consist of these two functions again::

    x --> _Merged --> mean, invstd --> (x - mean) * invstd * weight + bias --> y       _AllReduce: sum over ranks

The rest is plain torch. Second derivatives, forward-mode differentiation and :mod:`torch.func` use this form; it holds
more intermediate tensors of the input's size than the training step in ``normalize``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import notifies_peers, notify_peers
from ..options import Options
from ..torch_internals.autograd import is_batched
from .call import Normalization, Statistics, follow


def differentiable_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Normalization,
    gather: Callable[[Tensor], Statistics],
) -> Tensor:
    """Computes :func:`~bagua_syncbn.sync_batch_norm` by ``by``, differentiable any number of times.

    ``gather`` gathers the statistics of all ranks, or returns those that were gathered before.
    """
    wide = input.to(ops.accumulate_dtype(input.dtype))
    if norm.masking is not None:
        wide = norm.masking.clear_outputs(wide)
    if norm.exchange is None:
        mean, invstd, _ = gather(wide)
    else:
        mean, invstd, _ = _Merged.apply(wide, norm, gather)
    output = (wide - ops.per_channel(mean, wide)) * ops.per_channel(invstd, wide)
    if weight is not None:
        output = output * ops.per_channel(weight.to(wide.dtype), wide)
    if bias is not None:
        output = output + ops.per_channel(bias.to(wide.dtype), wide)
    return follow(output, residual, norm.options, norm.masking).to(input.dtype)


def differentiable_backward(
    grad_output: Tensor,
    tensors: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
    norm: Normalization,
    statistics: Statistics,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of ``tensors``: input, weight, bias and residual; None for those not needed.

    ``grad_output`` may be a batch of gradients if this rank is alone.
    """

    def compute(views: Sequence[Any]) -> list[Tensor]:
        return [differentiable_batch_norm(*views[0], norm, lambda _: statistics)]  # type: ignore[call-arg]

    return gradients_of(compute, [grad_output], [tensors], needs_grad, norm.options)


def gradients_of(
    compute: Callable[[Sequence[Any]], Sequence[Tensor]],
    grad_outputs: Sequence[Tensor],
    rows: Sequence[Sequence[Tensor | None]],
    needs_grad: Sequence[bool],
    options: Options,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the tensors of all ``rows``, of ``compute``, which takes rows and returns outputs.

    A row holds the input, weight, bias and residual of a replica. Bias and residual may be None without an activation,
    since no gradient depends on their values. Autograd derives the gradients, so that no formula is written twice. They
    are differentiable if gradients are enabled, and constants otherwise.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        if options.activation is None:
            rows = [_with_zeros(input, weight, needs_grad[3]) for input, weight, *_ in rows]  # type: ignore[arg-type]
        # Views, so that autograd stops at this use of each tensor, as one tensor may depend on another.
        views = [[None if tensor is None else tensor.view_as(tensor) for tensor in row] for row in rows]
        outputs = compute(views)
    pairs = zip((view for row in views for view in row), needs_grad, strict=True)
    wanted = [view for view, needed in pairs if view is not None and needed]
    grads = iter(torch.autograd.grad(outputs, wanted, grad_outputs, create_graph=create_graph))
    return tuple(next(grads) if needed else None for needed in needs_grad)


def _with_zeros(input: Tensor, weight: Tensor | None, has_residual: bool) -> tuple[Tensor | None, ...]:
    dtype = ops.accumulate_dtype(input.dtype)
    bias = input.new_zeros(input.size(1), dtype=dtype, requires_grad=True)
    return input, weight, bias, torch.zeros_like(input, requires_grad=True) if has_residual else None


def _peers_of_merged(ctx: Any, *_: Any) -> tuple[Any, Any]:
    return ctx.norm.exchange.communicator, ctx.norm.layer


class _Merged(torch.autograd.Function):
    r"""Mean and inverse deviation of all ranks' batches, as functions of this rank's batch.

    With N values per channel over all ranks, :math:`\partial\mu / \partial x_i = 1 / N` and
    :math:`\partial\sigma^{-1} / \partial x_i = -\sigma^{-3} (x_i - \mu) / N`. An all-reduce adds up the ranks' shares
    of the two gradients in backward, and of the two tangents in forward mode.
    """

    @staticmethod
    def forward(input: Tensor, norm: Normalization, gather: Callable[[Tensor], Statistics]) -> Statistics:
        mean, invstd, count = gather(input)
        # Cloned, because a function must not return tensors that other objects hold. Derivatives divide by the count.
        return mean.clone(), invstd.clone(), count.clamp(min=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Statistics) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(inputs[0], *output)
        ctx.save_for_forward(inputs[0], *output)
        ctx.norm = inputs[1]

    @staticmethod
    @notifies_peers(_peers_of_merged)
    def backward(ctx: Any, grad_mean: Tensor, grad_invstd: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        input, mean, invstd, count = ctx.saved_tensors
        total = _all_reduce(torch.cat([grad_mean, grad_invstd]), ctx.norm)
        grad_mean, grad_invstd = total.chunk(2)
        slope = _slope(invstd, ctx.norm.options) * grad_invstd
        centered = input - ops.per_channel(mean, input)
        grad_input = (ops.per_channel(grad_mean, input) + centered * ops.per_channel(slope, input)) / count
        return _counted(grad_input, ctx.norm), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if tangent is None:
            return None, None, None
        input, mean, invstd, count = ctx.saved_tensors
        centered = input - ops.per_channel(mean, input)
        dims = ops.reduced_dims(input)
        tangent = _counted(tangent, ctx.norm)
        centered = _counted(centered, ctx.norm)
        total = _all_reduce(torch.cat([tangent.sum(dims), (centered * tangent).sum(dims)]), ctx.norm) / count
        tangent_mean, covariance = total.chunk(2)
        return tangent_mean, _slope(invstd, ctx.norm.options) * covariance, None

    @staticmethod
    def vmap(_info: Any, _in_dims: Any, _input: Any, norm: Normalization, _gather: Any) -> None:
        raise _no_vmap(norm)


def _slope(invstd: Tensor, options: Options) -> Tensor:
    """Returns the derivative of the inverse deviation by half the variance, 0 where eps replaces the variance."""
    clamped = ops.is_clamped(invstd, options)
    slope = -(invstd**3)
    return slope if clamped is None else slope.masked_fill(clamped, 0)


def _counted(values: Tensor, norm: Normalization) -> Tensor:
    """Returns ``values`` (N, C, \\*) with 0 at positions that do not count for the statistics."""
    return values if norm.masking is None else norm.masking.clear(values)


def _all_reduce(values: Tensor, norm: Normalization) -> Tensor:
    """Returns the sum over ranks of ``values``, differentiably."""
    exchange = norm.exchange
    assert exchange is not None
    if exchange.communicator.size == 1:
        return values
    if not torch.compiler.is_compiling() and is_batched(values):
        raise _no_vmap(norm)
    total: Tensor = _AllReduce.apply(values, norm)
    return total


class _AllReduce(torch.autograd.Function):
    """Sum over ranks. Its derivative is again the sum over ranks."""

    @staticmethod
    def forward(values: Tensor, norm: Normalization) -> Tensor:
        assert norm.exchange is not None
        return norm.exchange.total(values.clone())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.norm = inputs[1]

    @staticmethod
    @notifies_peers(_peers_of_merged)
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad_output, ctx.norm), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _all_reduce(tangent, ctx.norm)

    @staticmethod
    def vmap(_info: Any, _in_dims: Any, _values: Any, norm: Normalization) -> None:
        raise _no_vmap(norm)


def _no_vmap(norm: Normalization) -> RuntimeError:
    refusal = RuntimeError(
        "sync_batch_norm: expected no torch.func.vmap over training and no is_grads_batched in its backward pass with "
        "the statistics of a group, because its collectives cannot be batched; call it once for each sample of the "
        "batch, or vmap the model in eval(), or after revert_sync_batchnorm"
    )
    assert norm.exchange is not None
    notify_peers(norm.exchange.communicator, norm.layer, refusal)
    return refusal
