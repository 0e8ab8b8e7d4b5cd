"""Training step among replicas of one process, by the same ops and without collectives in backward.

Sums of gradients cross between replicas along edges of autograd's graph. Each replica has its own ``_Statistics`` and
``_Normalize``, and all replicas share one ``_Merge``::

    x --> _Statistics --> statistics --\\                  /--> merged --> _Normalize --> y
               \\                         >--> _Merge -->--<                          /
                \\                       /                 \\                         /
                 \\       the other replicas             the other replicas        /
                  \\--> x ----------------------------------------------------->--/

In backward these edges carry the values that the next node needs, not gradients: ``_Normalize`` passes the replica's
sums to ``_Merge``, ``_Merge`` passes the sums of all replicas to ``_Statistics``, and the gradient of y goes along x.
Autograd runs a node when all of its inputs are there, whether it uses a thread for each device or one for all.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..communicators.replicas import Replica
from ..options import Options
from ..torch_internals import is_transformed
from .recomputation import note_output


def replicated_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    buffers: ops.Buffers,
    options: Options,
    replica: Replica,
) -> Tensor:
    """Computes :func:`~bagua_syncbn.sync_batch_norm` in training in a replica. Only replica 0 updates its buffers."""

    def merge(statistics: list[Tensor]) -> Sequence[Sequence[Tensor]]:
        # Replica 0 may run without gradients while another replica needs them.
        with torch.set_grad_enabled(any(packed.requires_grad for packed in statistics)):
            count, *merged = _Merge.apply(buffers, options, *statistics)
        return [(own, count) for own in merged]

    totals = _Totals()
    # _Statistics needs the weight only for the gradient of the input; _Normalize makes the gradient of the weight.
    input, statistics = _Statistics.apply(input, None if weight is None else weight.detach(), totals)
    merged, count = replica.meet(statistics, merge)
    totals.merged, totals.count = merged.detach(), count
    output: Tensor = _Normalize.apply(input, weight, bias, merged, residual, options.activation)
    mean, invstd = merged.detach().chunk(2)
    note_output(output, replica.layer, input, weight, bias, mean, invstd, residual, options.activation)
    return output


class _Totals:
    """Values that ``_Statistics`` needs in backward but only exist after its forward: ``merged`` (2C) and ``count``."""

    merged: Tensor
    count: Tensor


class _NoSecondDerivative(torch.autograd.Function):
    """Returns its first argument as a function of all arguments, whose derivative raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        raise RuntimeError(
            "sync_batch_norm: expected first derivatives only among replicas of one process, got an attempt to "
            "differentiate twice; use one process for each device"
        )


_Backward = Callable[..., tuple[Tensor | None, ...]]


def _once_differentiable(backward: _Backward) -> _Backward:
    """Makes second derivatives raise, unlike torch's decorator also where only saved tensors require gradients."""

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if any(map(is_transformed, grads)):
            raise RuntimeError(
                "sync_batch_norm: expected neither is_grads_batched nor torch.func in a backward pass among replicas "
                "of one process; call backward once for each gradient"
            )
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        sources = [tensor for tensor in (*ctx.saved_tensors, *grads) if tensor is not None and tensor.requires_grad]
        return tuple(None if result is None else _NoSecondDerivative.apply(result, *sources) for result in results)

    return wrapper


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, totals: _Totals) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(input, weight)
        ctx.totals = totals
        # Detached, because autograd returns a view of a returned input, which may lose the memory format.
        return input.detach(), ops.batch_norm_stats(input)

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, grad_output: Tensor, sums: Tensor) -> tuple[Tensor | None, ...]:
        # An output that is not in the loss has a grad_output of 0; its input still affects the statistics of all.
        input, weight = ctx.saved_tensors
        mean, invstd = ctx.totals.merged.chunk(2)
        sums = sums[: 2 * input.size(1)]
        return (
            ops.batch_norm_backward_elemt(grad_output, input, weight, mean, invstd, sums, ctx.totals.count),
            None,
            None,
        )


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        buffers: ops.Buffers,
        options: Options,
        *statistics: Tensor,
    ) -> tuple[Tensor, ...]:
        """Returns the count, and the merged statistics ``[mean (C) | invstd (C)]`` once for each replica."""
        mean, invstd, count, ctx.clamped = ops.merge_stats(torch.stack(statistics), buffers, options)
        ctx.mark_non_differentiable(count)
        return count, *(torch.cat([mean, invstd]) for _ in statistics)

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, _: Tensor, *sums: Tensor) -> tuple[Tensor | None, ...]:
        # Summed in the order of replicas, so that the bits do not depend on which device is ready first.
        total = ops.clear_clamped(torch.stack(sums).sum(0), ctx.clamped)
        total = F.pad(total, (0, 2))  # to the size of statistics, whose last two values are the count
        return None, None, *[total] * len(sums)


class _Normalize(torch.autograd.Function):
    """Normalization with activation and residual. The gradient of the normalized values goes along x."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        merged: Tensor,
        residual: Tensor | None,
        activation: ops.Activation | None,
    ) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(input, weight, merged, *((None, None) if activation is None else (bias, residual)))
        code, parameter = (0, 0.0) if activation is None else (activation.code, activation.parameter)
        output: Tensor = ops.batch_norm_elemt(
            input, weight, bias, *merged.chunk(2), residual=residual, activation=code, parameter=parameter
        )
        return output

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        ctx.recipe = None  # all operations that save the output ran before
        input, weight, merged, bias, residual = ctx.saved_tensors
        grad, through = grad_output, {}
        if ctx.activation is not None:
            code, parameter = ctx.activation.code, ctx.activation.parameter
            grad = torch.empty_like(input)
            through = {"bias": bias, "residual": residual, "activation": code, "parameter": parameter, "grad": grad}
        sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(
            grad_output, input, *merged.chunk(2), weight, **through
        )
        grads = (grad, grad_weight, grad_bias, sums, grad, None)
        return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=True))
