"""Training step among replicas of one process: one node of autograd's graph for all replicas of a layer.

Replicas meet in forward, where the thread of replica 0 merges their statistics and normalizes for all. In backward no
thread waits, as it could wait for work that runs next on itself: autograd runs the node when the gradients of all
outputs are there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..checks import named
from ..functional import known_of, moved_by
from ..groups import LOCAL, GroupSpec
from ..step.call import Call, Normalization, Statistics, this_thread
from ..step.derivatives import differentiable_batch_norm, gradients_of
from ..step.exchange import LOCAL_EXCHANGE
from ..step.normalize import after, through_activation
from ..torch_internals.autograd import is_batched, is_transforming
from .replicas import Replicas, TensorSequence, in_streams


@dataclass(frozen=True, eq=False)
class Replica:
    """One layer of one replica; attached to the layer, it computes the layer's calls in training with its copies."""

    replicas: Replicas
    rank: int
    layer: str

    def __call__(self, go: Callable[[Call], Tensor], call: Call) -> Tensor:
        layer: Any = call.layer
        if not layer.training or self.replicas.size == 1:
            return go(call)
        spec: GroupSpec = call.process_group
        size = spec.communicator().size
        if size > 1:
            raise RuntimeError(
                f"process_group: expected a group of one where a layer is one of {self.replicas.size} replicas, got "
                f"one of {size} ranks; use one device for each rank, or set process_group to "
                "bagua_syncbn.communicators.LOCAL to synchronize the replicas of each process alone"
            )
        try:
            options = known_of(call._replace(process_group=LOCAL)).options
            if call.has_masks:
                raise RuntimeError("mask: expected none among replicas of one process; use one process for each device")
        except (TypeError, ValueError, RuntimeError) as error:
            raise named(error, layer) from None
        return self._normalize(call, Normalization(options, LOCAL_EXCHANGE, layer))

    def _normalize(self, call: Call, by: Normalization) -> Tensor:
        """Computes ``call`` with the other replicas. Only replica 0 updates its buffers."""

        def compute(rows: list[TensorSequence]) -> list[list[Tensor]]:
            tensors = [tensor for *row, _ in rows for tensor in row]
            moments: list[list[Tensor]] = []
            # Replica 0 may run without gradients while another replica needs them.
            with torch.set_grad_enabled(any(tensor is not None and tensor.requires_grad for tensor in tensors)):
                outputs = _Replicated.apply(by, buffers, [stats for *_, stats in rows], moments, *tensors)
            return [[output, *own] for output, own in zip(outputs, moments, strict=True)]

        buffers = moved_by(call)
        records = torch.is_grad_enabled()
        tensors = [t if t is None or records else t.detach() for t in call[:4]]
        stats = ops.batch_norm_stats(call.input.detach())
        output: Tensor
        output, mean, invstd = self.replicas.meet(self.rank, self.layer, [*tensors, stats], compute)
        if not records:
            return output.detach()
        hooks = this_thread.hooks
        if hooks is not None and hooks.see_output is not None:
            by.statistics = mean, invstd, mean.new_ones((), dtype=torch.int64)
            hooks.see_output(output, *call[:4], by)
        return output


def _in_rows(values: Sequence[Any], width: int) -> list[Sequence[Any]]:
    return [values[start : start + width] for start in range(0, len(values), width)]


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        by: Normalization,
        buffers: ops.Buffers,
        stats: list[Tensor],
        moments: list[list[Tensor]],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Returns the outputs of all replicas, for input, weight, bias and residual of one after the other.

        ``moments`` receives the mean and the inverse deviation on the device of each replica.
        """
        rows, outputs, kept = _in_rows(tensors, 4), [], []
        device = rows[0][0].device
        gathered = torch.stack([own.to(device) for own in stats])
        *merged, count = ops.merge_stats(gathered, buffers, by.options)
        for input, weight, bias, residual in rows:
            own = [moment.to(input.device) for moment in merged]
            moments.append(own)
            outputs.append(ops.batch_norm_elemt(input, weight, bias, *own, *after(by.options.activation, residual)))
            kept += [input, weight, *((None, None) if by.options.activation is None else (bias, residual)), *own]
        ctx.by = by
        devices = [row[0].device for row in rows]
        ctx.streams = [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]
        ctx.save_for_backward(count, *kept)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd itself sets the stream of one device alone.
        with in_streams(ctx.streams):
            return _Replicated._backward(ctx, *grad_outputs)

    @staticmethod
    def _backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # An output that is not in the loss has a gradient of 0; its input still affects the statistics of all.
        by, needed = ctx.by, ctx.needs_input_grad[4:]
        count, *kept = ctx.saved_tensors
        rows = _in_rows(kept, 6)
        if torch.is_grad_enabled() or is_transforming() or any(map(is_batched, grad_outputs)):

            def compute(views: Sequence[Any]) -> list[Tensor]:
                return _differentiable(views, by, count)

            rows_of_tensors = [row[:4] for row in rows]
            return *(None,) * 4, *gradients_of(compute, grad_outputs, rows_of_tensors, needed, by.options)
        ctx.recipes = None  # all operations that save the outputs ran before
        reduced, grads = [], []
        again: dict[str, Any]
        for grad_output, (input, weight, bias, residual, mean, invstd) in zip(grad_outputs, rows, strict=True):
            grad, through, again = grad_output, (), {}
            if by.options.activation is not None:
                grad, through, again = through_activation(grad_output, input, bias, residual, by)
            found = ops.batch_norm_backward_reduce(grad_output, input, mean, invstd, weight, None, *through)
            reduced.append((grad, again, *found))
        # Summed in the order of replicas, so that the bits do not depend on which device is ready first.
        total = torch.stack([sums.to(count.device) for _, _, sums, _, _ in reduced]).sum(0)
        ops.clear_clamped(total, kept[5].to(total.device), by.options)
        for row, needs, (grad, again, _, *of_parameters) in zip(rows, _in_rows(needed, 4), reduced, strict=True):
            input, weight, _, _, mean, invstd = row
            grad_input = None
            if needs[0]:
                arguments = mean, invstd, total.to(input.device), count.to(input.device)
                grad_input = ops.batch_norm_backward_elemt(grad, input, weight, *arguments, **again)
            own = grad_input, *of_parameters, grad
            grads += [value if need else None for value, need in zip(own, needs, strict=True)]
        return *(None,) * 4, *grads


def _differentiable(rows: Sequence[Any], by: Normalization, count: Tensor) -> list[Tensor]:
    """Returns the outputs of replicas in operations of torch, differentiable any number of times."""
    options = by.options
    wide = [row[0].to(ops.accumulate_dtype(row[0].dtype)) for row in rows]
    dims = ops.reduced_dims(wide[0])

    def mean_of(values: list[Tensor]) -> Tensor:
        return torch.stack([value.sum(dims).to(count.device) for value in values]).sum(0) / count

    def per_channel(values: Tensor, like: Tensor) -> Tensor:
        return ops.per_channel(values.to(like.device), like)

    mean = mean_of(wide)
    var = mean_of([(input - per_channel(mean, input)).square() for input in wide])
    invstd = ops.inverse_deviation(var, options)

    def of_all(input: Tensor) -> Statistics:
        return mean.to(input.device), invstd.to(input.device), count

    constants = Normalization(options, None, None)
    return [differentiable_batch_norm(*row, constants, of_all) for row in rows]  # type: ignore[call-arg]
