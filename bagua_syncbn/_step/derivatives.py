r"""Differentiable form of the step, for derivatives of any order in backward and in forward mode.

Two functions communicate, and their derivatives use only these two functions::

    x --> _Merged --> mean, invstd --> (x - mean) * invstd * weight + bias --> y       _AllReduce: sum over ranks

The rest is plain torch. Second derivatives, forward-mode differentiation and :mod:`torch.func` use this form. It stores
more tensors of the input's size than the training step in ``normalize``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import _ops as ops
from .._errors import notifies_peers
from .._ops.options import Options
from .._torch.autograd import is_batched, untraced
from .call import Normalization, Statistics, apply_epilogue


def peers_of_backward(ctx: Any, *_: Any) -> tuple[Any, Any] | None:
    """Returns the communicator and the layer of a backward; None if it does not communicate."""
    exchange, layer = ctx.norm.step.exchange, ctx.norm.layer
    return None if exchange is None else (exchange.communicator, layer)


_notifies_peers = notifies_peers(peers_of_backward)


def differentiable_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Normalization,
    gather: Callable[[Tensor], Statistics],
) -> Tensor:
    """Computes :func:`~bagua_syncbn.sync_batch_norm` with ``norm``, differentiable any number of times.

    ``gather`` returns the statistics of all ranks.
    """
    wide = input.to(ops.accumulate_dtype(input.dtype))
    if norm.masking is not None:
        wide = norm.masking.clear_outputs(wide)
    mean, invstd, _ = gather(wide) if norm.step.exchange is None else _Merged.apply(wide, norm, gather)
    output = (wide - ops.per_channel(mean, wide)) * ops.per_channel(invstd, wide)
    if weight is not None:
        output = output * ops.per_channel(weight.to(wide.dtype), wide)
    if bias is not None:
        output = output + ops.per_channel(bias.to(wide.dtype), wide)
    return apply_epilogue(output, residual, norm.step.options, norm.masking).to(input.dtype)


def gradients_of(
    compute: Callable[[Sequence[Any]], Sequence[Tensor]],
    grad_outputs: Sequence[Tensor],
    rows: Sequence[Sequence[Tensor | None]],
    needs_grad: Sequence[bool],
    options: Options,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of ``compute`` (maps ``rows`` to outputs) with respect to all tensors in the rows.

    Rows are (input, weight, bias, residual). If there is no activation, bias and residual may be None, because no
    gradient depends on their values. The gradients are differentiable if gradients are enabled.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        if options.activation is None:
            rows = [_with_zeros(input, weight, needs_grad[3]) for input, weight, *_ in rows]
        # Views, so that autograd stops here: tensors may depend on each other.
        views = [[None if tensor is None else tensor.view_as(tensor) for tensor in row] for row in rows]
        outputs = compute(views)
    pairs = zip((view for row in views for view in row), needs_grad, strict=True)
    wanted = [view for view, needed in pairs if view is not None and needed]
    grads = iter(torch.autograd.grad(outputs, wanted, grad_outputs, create_graph=create_graph))
    return tuple(next(grads) if needed else None for needed in needs_grad)


def _with_zeros(input: Any, weight: Tensor | None, has_residual: bool) -> tuple[Tensor | None, ...]:
    dtype = ops.accumulate_dtype(input.dtype)
    bias = input.new_zeros(input.size(1), dtype=dtype, requires_grad=True)
    return input, weight, bias, torch.zeros_like(input, requires_grad=True) if has_residual else None


def _refuse_vmap(*_: Any) -> NoReturn:
    raise RuntimeError(
        "sync_batch_norm: collectives cannot be batched by torch.func.vmap or is_grads_batched; call the model once "
        "per sample, or vmap it in eval() or after revert_sync_batchnorm"
    )


class _Merged(torch.autograd.Function):
    r"""Mean and inverse deviation of all ranks' batches, as functions of this rank's batch.

    With N values per channel over all ranks, :math:`\partial\mu / \partial x_i = 1 / N` and
    :math:`\partial\sigma^{-1} / \partial x_i = -\sigma^{-3} (x_i - \mu) / N`. An all-reduce adds up the ranks' shares
    of the two gradients in backward, and of the two tangents in forward mode.
    """

    vmap = staticmethod(_refuse_vmap)

    @staticmethod
    def forward(input: Tensor, norm: Normalization, gather: Callable[[Tensor], Statistics]) -> Statistics:
        mean, invstd, count = gather(input)
        # Cloned, because norm owns the tensors. Derivatives divide by the count.
        return mean.clone(), invstd.clone(), count.clamp(min=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Statistics) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(inputs[0], *output)
        ctx.save_for_forward(inputs[0], *output)
        ctx.norm = inputs[1]

    @staticmethod
    @_notifies_peers
    def backward(ctx: Any, grad_mean: Tensor, grad_invstd: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        input, mean, invstd, count = ctx.saved_tensors
        grad_mean, grad_invstd = _all_reduce(torch.cat([grad_mean, grad_invstd]), ctx.norm).chunk(2)
        slope = _slope(invstd, ctx.norm.step.options) * grad_invstd
        centered = input - ops.per_channel(mean, input)
        grad_input = (ops.per_channel(grad_mean, input) + centered * ops.per_channel(slope, input)) / count
        return _cleared(grad_input, ctx.norm), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if tangent is None:
            return None, None, None
        input, mean, invstd, count = ctx.saved_tensors
        tangent = _cleared(tangent, ctx.norm)
        # Clears both factors, because NaN times 0 is NaN.
        centered = _cleared(input - ops.per_channel(mean, input), ctx.norm)
        dims = ops.reduced_dims(input)
        total = _all_reduce(torch.cat([tangent.sum(dims), (centered * tangent).sum(dims)]), ctx.norm) / count
        tangent_mean, covariance = total.chunk(2)
        return tangent_mean, _slope(invstd, ctx.norm.step.options) * covariance, None


def _slope(invstd: Tensor, options: Options) -> Tensor:
    """Returns the derivative of the inverse deviation with respect to half the variance; 0 where eps replaces the
    variance."""
    clamped = ops.is_clamped(invstd, options)
    slope = -(invstd**3)
    return slope if clamped is None else slope.masked_fill(clamped, 0)


def _cleared(values: Tensor, norm: Normalization) -> Tensor:
    """Returns ``values`` (N, C, \\*) with 0 at masked positions."""
    return values if norm.masking is None else norm.masking.clear(values)


def _all_reduce(values: Tensor, norm: Normalization) -> Tensor:
    """Returns the sum over ranks of ``values``, differentiably."""
    assert norm.step.exchange is not None
    if norm.step.exchange.communicator.size == 1:
        return values
    if not torch.compiler.is_compiling() and is_batched(values):
        _refuse_vmap()
    total: Tensor = _AllReduce.apply(values, norm)
    return total


class _AllReduce(torch.autograd.Function):
    """Sum over ranks. The derivative is the same function."""

    vmap = staticmethod(_refuse_vmap)

    @staticmethod
    def forward(values: Tensor, norm: Normalization) -> Tensor:
        assert norm.step.exchange is not None
        return norm.step.exchange.total(values.clone(), norm.number)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.norm = inputs[1]

    @staticmethod
    @_notifies_peers
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad_output, ctx.norm), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _all_reduce(tangent, ctx.norm)


def once_differentiable(output: Tensor) -> Tensor:
    """Returns ``output`` of compiled code, such that backward with ``create_graph=True`` raises.

    Compiled code computes gradients without a graph. ``backend="eager"`` would silently omit second derivatives; other
    backends raise an error anyway.
    """
    _allow_in_graph()
    return _once_differentiable(output)


def _once_differentiable(output: Tensor) -> Tensor:
    return _OnceDifferentiable.apply(output)


@untraced
def _allow_in_graph() -> None:
    torch.compiler.allow_in_graph(_once_differentiable)  # not at import, because it imports the compiler


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "sync_batch_norm: compiled code has no second derivatives; call the model without torch.compile for "
                "gradients with create_graph=True"
            )
        return grad_output
