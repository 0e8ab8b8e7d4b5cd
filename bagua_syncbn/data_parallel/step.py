"""Training step among replicas of one process: one node of autograd's graph for all replicas of a layer.

Replicas meet in forward, where the thread of replica 0 merges their statistics and normalizes for all. In backward no
thread waits, as it could wait for work that runs next on itself: autograd runs the node when the gradients of all
outputs are there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..checks import is_distributed, named
from ..functional import checks_of
from ..groups import LOCAL, GroupSpec, spec_of
from ..step.call import Call, Normalization, Statistics
from ..step.derivatives import differentiable_batch_norm, gradients_of
from ..step.exchange import Exchange
from ..step.normalize import activation_args, epilogue_args
from ..threads import this_thread
from ..torch_internals.autograd import is_batched, is_transforming
from .replicas import Replicas, TensorSequence, in_streams, stream_of

_LOCAL_GROUP, _EXCHANGE = spec_of(LOCAL), Exchange(LOCAL)


@dataclass(frozen=True, eq=False)
class Replica:
    """One layer of one replica; attached to the layer, it computes the layer's calls in training with its copies."""

    replicas: Replicas
    rank: int
    layer: str

    def __call__(self, go: Callable[[Call], Tensor], call: Call) -> Tensor:
        layer: Any = call.layer
        if not call.synchronizes or self.replicas.size == 1:
            return go(call)
        spec: GroupSpec = call.group
        size = spec.communicator().size
        if size > 1:
            raise RuntimeError(
                f"process_group: expected a group of one where a layer is one of {self.replicas.size} replicas, got "
                f"one of {size} ranks; use one device for each rank, or set process_group to "
                "bagua_syncbn.communicators.LOCAL to synchronize the replicas of each process alone"
            )
        try:
            if type(call.input) is not Tensor and is_distributed(call.input):
                raise TypeError(
                    "input: expected a tensor of this process, because the layer is one of several replicas, got "
                    f"{type(call.input).__name__}; use one process for each device"
                )
            options = checks_of(call._replace(group=_LOCAL_GROUP)).options
            if call.has_masks:
                raise RuntimeError("mask: expected none among replicas of one process; use one process for each device")
        except (TypeError, ValueError, RuntimeError) as error:
            raise named(error, layer) from None
        norm = Normalization(options, _EXCHANGE, layer)
        records = torch.is_grad_enabled()
        tensors = [tensor if tensor is None or records else tensor.detach() for tensor in call[:4]]
        row = ops.batch_norm_stats(call.input.detach())
        compute = partial(_normalize, norm, call)
        output: Any
        output, *statistics = self.replicas.meet(self.rank, self.layer, [*tensors, row], compute)
        if not records:
            return output.detach()  # type: ignore[no-any-return]
        if this_thread.see_output is not None:
            norm.statistics = tuple(statistics)  # type: ignore[assignment]
            this_thread.see_output(output, *call[:4], norm)
        return output  # type: ignore[no-any-return]


def _normalize(norm: Normalization, call: Call, brought: Sequence[Any]) -> list[TensorSequence]:
    """Returns output and statistics for each replica, on its device; updates the buffers of ``call``.

    ``brought`` has input, weight, bias, residual and row of each.
    """
    device = brought[0][0].device
    rows, buffers = torch.stack([row.to(device) for *_, row in brought]), call.tracked_buffers
    if call.accumulate is not None:
        call.accumulate(rows, 1, buffers, norm.options)
        buffers = ops.NO_BUFFERS
    merged = ops.merge_stats(rows, buffers, norm.options)
    statistics = [[value.to(input.device) for value in merged] for input, *_ in brought]
    tensors = [tensor for *own, _ in brought for tensor in own]
    # Replica 0 may run without gradients while another replica needs them.
    with torch.set_grad_enabled(any(tensor is not None and tensor.requires_grad for tensor in tensors)):
        outputs = _Replicated.apply(norm, statistics, *tensors)
    return [[output, *own] for output, own in zip(outputs, statistics, strict=True)]


def _in_rows(values: Sequence[Any], width: int) -> list[Sequence[Any]]:
    return [values[start : start + width] for start in range(0, len(values), width)]


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, norm: Normalization, statistics: Sequence[Sequence[Tensor]], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Returns the outputs of all replicas, for input, weight, bias and residual of one after the other."""
        activation = norm.options.activation
        outputs, kept = [], []
        for row, own in zip(_in_rows(tensors, 4), statistics, strict=True):
            input, weight, bias, residual = row
            outputs.append(ops.batch_norm_elemt(input, weight, bias, *own[:2], *epilogue_args(activation, residual)))
            kept += [input, weight, *((None, None) if activation is None else (bias, residual)), *own]
        ctx.norm, ctx.streams = norm, [stream_of(output) for output in outputs]
        ctx.save_for_backward(*kept)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd itself sets the stream of one device alone.
        with in_streams(ctx.streams):
            return None, None, *_gradients(ctx, grad_outputs)


def _gradients(ctx: Any, grad_outputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Returns the gradients of all tensors of all replicas.

    An output that is not in the loss has a gradient of 0; its input still affects the statistics of all.
    """
    norm, needed, rows = ctx.norm, ctx.needs_input_grad[2:], _in_rows(ctx.saved_tensors, 7)
    if torch.is_grad_enabled() or is_transforming() or any(map(is_batched, grad_outputs)):
        compute = partial(_differentiable, norm=norm)
        return gradients_of(compute, grad_outputs, [row[:4] for row in rows], needed, norm.options)
    ctx.recipes = None  # all operations that save the outputs ran before
    reduced: list[Any] = []
    for grad_output, (input, weight, bias, residual, mean, invstd, _) in zip(grad_outputs, rows, strict=True):
        grad, reduce_args, elemt_args = activation_args(grad_output, input, bias, residual, norm)
        found = ops.batch_norm_backward_reduce(grad_output, input, mean, invstd, weight, None, *reduce_args)
        reduced.append((grad, elemt_args, *found))
    # Summed in the order of replicas, so that the bits do not depend on which device is ready first.
    device = rows[0][0].device
    total = torch.stack([sums.to(device) for _, _, sums, _, _ in reduced]).sum(0)
    ops.clear_clamped(total, rows[0][5], norm.options)
    grads: list[Tensor | None] = []
    for row, needs, (grad, elemt_args, _, *of_parameters) in zip(rows, _in_rows(needed, 4), reduced, strict=True):
        input, weight, _, _, mean, invstd, count = row
        grad_input = None
        if needs[0]:
            arguments = mean, invstd, total.to(input.device), count
            grad_input = ops.batch_norm_backward_elemt(grad, input, weight, *arguments, **elemt_args)
            grad_input = elemt_args.get("grad_input", grad_input)
        own = grad_input, *of_parameters, grad
        grads += [value if need else None for value, need in zip(own, needs, strict=True)]
    return grads


def _differentiable(rows: Sequence[Any], norm: Normalization) -> list[Tensor]:
    """Returns the outputs of replicas in operations of torch, differentiable any number of times."""
    device, dtype = rows[0][0].device, ops.accumulate_dtype(rows[0][0].dtype)
    values = torch.cat([input.transpose(0, 1).flatten(1).to(device, dtype) for input, *_ in rows], 1)
    var, mean = torch.var_mean(values, 1, correction=0)
    statistics = mean, ops.inverse_deviation(var, norm.options), torch.full((), values.size(1), device=device)
    constants = Normalization(norm.options, None, None)

    def gather(input: Tensor) -> Statistics:
        return tuple(value.to(input.device) for value in statistics)  # type: ignore[return-value]

    return [differentiable_batch_norm(*row, constants, gather) for row in rows]  # type: ignore[call-arg]
