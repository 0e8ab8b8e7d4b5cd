"""Section host: host time of a step, as a layer and as a bare autograd function with the same ops."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import bagua_syncbn
from bagua_syncbn import _ops as ops
from bagua_syncbn.communicators import Communicator
from tests.helpers.one_rank import Twin

from ..batches import Shape
from ..recorded import Case, Results, of_section, table_of_ratios
from ..timing import Workload, time_workload

# Small inputs, so that host time dominates.
SHAPES: tuple[Shape, ...] = ((8, 16, 4), (64, 256), (4, 32, 16, 16))


def cases(job: dict[str, Any]) -> list[tuple[Shape]]:
    return [(shape,) for shape in SHAPES]


class BareStep(torch.autograd.Function):
    """Runs the five ops and both collectives with minimal Python: no layer, checks or options."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        var: Tensor,
        batches: Tensor,
        peer: Communicator,
    ) -> Tensor:
        gathered = peer.all_gather(ops.batch_norm_stats(x))
        moments = ops.batch_norm_gather_stats(gathered, mean, var, batches, 0.1, 1e-5)
        ctx.save_for_backward(x, weight, *moments)
        ctx.peer = peer
        return ops.batch_norm_elemt(x, weight, bias, moments[0], moments[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        sums, grad_weight, grad_bias = ops.batch_norm_backward_reduce(dy, x, mean, invstd, weight)
        sums = ctx.peer.all_reduce(sums)
        grad_input = ops.batch_norm_backward_elemt(dy, x, weight, mean, invstd, sums, count)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def make(shape: Shape) -> Workload:
    """Returns the layer and the bare function on the same input and communicator."""
    x, dy, peer = torch.randn(shape, requires_grad=True), torch.randn(shape), Twin()
    layer = bagua_syncbn.SyncBatchNorm(shape[1], process_group=peer)
    parameters = list(layer.parameters())
    buffers = [buffer.clone() for buffer in layer.buffers()]

    def step(normalize: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(normalize(x), (x, *parameters), dy)

    return {"layer": step(layer), "bare": step(lambda x: BareStep.apply(x, *parameters, *buffers, peer))}


def measure(shape: Shape, job: dict[str, Any]) -> Case:
    torch.set_num_threads(1)
    often = {"least": 3 * job["least"], "most": 20 * job["most"]}
    return {"shape": shape, **time_workload(make(shape), job | often)}


def host_table(results: Results) -> str:
    """A step with small input, dominated by the host: time relative to a bare autograd function with the same five ops.
    Median (minimum; quartiles).
    """
    return table_of_ratios(of_section(results, "host"), "bare")


TABLES = {"host": host_table}
