"""Training step of a layer's replicas as a single autograd node.

Autograd runs the node once all outputs have gradients, so that no thread waits in backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _ops as ops
from .._groups import LOCAL
from .._step.by_torch import LocalStep
from .._step.call import Call, Normalization, Statistics
from .._step.derivatives import differentiable_batch_norm, gradients_of
from .._step.exchange import Exchange
from .._step.normalize import activation_args, epilogue_args
from .._step.steps import RankStep
from .._torch.autograd import is_batched, is_transforming, is_without_data
from ..functional import step_of
from .replicas import Replicas, TensorSequence, in_streams, stream_of

_EXCHANGE = Exchange(LOCAL)


@dataclass(frozen=True, eq=False)
class Replica:
    """Attachment of a replica's layer: computes training calls jointly with the peers."""

    replicas: Replicas
    rank: int
    layer: str

    def __call__(self, go: Callable[[Call], Tensor], call: Call) -> Tensor:
        if call.group is None or self.replicas.size == 1 or is_without_data(call.input):
            return go(call)
        if call.has_mask:
            raise RuntimeError(f"{self.layer}: masks are not supported in replicas; use one process per device")
        step = step_of(call)
        if not isinstance(step, LocalStep):
            raise RuntimeError(
                f"{self.layer}: replicas cannot synchronize over several ranks; use one device per rank, or "
                "process_group=bagua_syncbn.communicators.LOCAL to synchronize the replicas of each process"
            )
        norm = Normalization(RankStep(step.options, _EXCHANGE), call.layer)
        records = torch.is_grad_enabled()
        tensors = call[:4] if records else [tensor if tensor is None else tensor.detach() for tensor in call[:4]]
        row = ops.batch_norm_stats(call.input.detach())
        output: Any = self.replicas.meet(self.rank, self.layer, [*tensors, row], partial(_forward, norm, call))[0]
        return output if records else output.detach()


def _forward(norm: Normalization, call: Call, sent: Sequence[Any]) -> list[TensorSequence]:
    """Returns each replica's output; updates the buffers of ``call``.

    ``sent`` has each replica's input, weight, bias, residual and row of statistics.
    """
    received = ops.Received(torch.stack([row.to(sent[0][0].device) for *_, row in sent]))
    merge = call.accumulate or ops.merge_stats
    merged = merge(received, call.buffers, norm.step.options)
    statistics = [[value.to(input.device) for value in merged] for input, *_ in sent]
    tensors = [tensor for *own, _ in sent for tensor in own]
    # Replica 0 may run without gradients while a peer needs gradients.
    with torch.set_grad_enabled(any(tensor is not None and tensor.requires_grad for tensor in tensors)):
        outputs = _Replicated.apply(norm, statistics, *tensors)
    return [[output] for output in outputs]


def _by_replica(values: Sequence[Any], width: int) -> list[Sequence[Any]]:
    return [values[start : start + width] for start in range(0, len(values), width)]


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, norm: Normalization, statistics: Sequence[Sequence[Tensor]], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Returns each replica's output. ``tensors`` are each replica's input, weight, bias and residual."""
        activation = norm.step.options.activation
        outputs, kept = [], []
        for (input, weight, bias, residual), own in zip(_by_replica(tensors, 4), statistics, strict=True):
            outputs.append(ops.batch_norm_elemt(input, weight, bias, *own[:2], *epilogue_args(activation, residual)))
            kept += [input, weight, *((None, None) if activation is None else (bias, residual)), *own]
        ctx.norm, ctx.streams = norm, [stream_of(output) for output in outputs]
        ctx.save_for_backward(*kept)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        with in_streams(ctx.streams):  # autograd sets the stream of only one device
            return None, None, *_gradients(ctx, grad_outputs)


def _gradients(ctx: Any, grad_outputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Returns the gradients of ``tensors`` in :meth:`_Replicated.forward`."""
    norm, needed, rows = ctx.norm, ctx.needs_input_grad[2:], _by_replica(ctx.saved_tensors, 7)
    if torch.is_grad_enabled() or is_transforming() or any(map(is_batched, grad_outputs)):
        compute = partial(_differentiable, norm=norm)
        return gradients_of(compute, grad_outputs, [row[:4] for row in rows], needed, norm.step.options)
    reduced: list[Any] = []
    for grad_output, (input, weight, bias, residual, mean, invstd, _) in zip(grad_outputs, rows, strict=True):
        grad, reduce_args, elemt_args = activation_args(grad_output, input, bias, residual, norm)
        found = ops.batch_norm_backward_reduce(grad_output, input, mean, invstd, weight, None, *reduce_args)
        reduced.append((grad, elemt_args, *found))
    device = rows[0][0].device
    total = torch.stack([sums.to(device) for _, _, sums, _, _ in reduced]).sum(0)  # always in the same order
    ops.clear_clamped(total, rows[0][5], norm.step.options)
    grads: list[Tensor | None] = []
    for row, needs, (grad, elemt_args, _, *of_parameters) in zip(rows, _by_replica(needed, 4), reduced, strict=True):
        input, weight, _, _, mean, invstd, count = row
        grad_input = None
        if needs[0]:
            arguments = grad, input, weight, mean, invstd, total.to(input.device), count
            grad_input = ops.batch_norm_backward_elemt(*arguments, **elemt_args)
            grad_input = elemt_args.get("grad_input", grad_input)
        own = grad_input, *of_parameters, grad
        grads += [value if need else None for value, need in zip(own, needs, strict=True)]
    return grads


def _differentiable(rows: Sequence[Any], norm: Normalization) -> list[Tensor]:
    """Returns all replicas' outputs, computed by torch operations that are differentiable any number of times."""
    device, dtype = rows[0][0].device, ops.accumulate_dtype(rows[0][0].dtype)
    values = torch.cat([input.transpose(0, 1).flatten(1).to(device, dtype) for input, *_ in rows], 1)
    var, mean = torch.var_mean(values, 1, correction=0)
    statistics = mean, ops.inverse_deviation(var, norm.step.options), torch.full((), values.size(1), device=device)
    constants = Normalization(RankStep(norm.step.options), None)

    def gather(input: Tensor) -> Statistics:
        return tuple(value.to(input.device) for value in statistics)  # pyrefly: ignore[bad-return]

    return [differentiable_batch_norm(*row, constants, gather) for row in rows]  # pyrefly: ignore[bad-argument-count]
