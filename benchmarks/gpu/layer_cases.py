"""Whole layers on a group of one rank, sync path forced: ours, and torch.nn.SyncBatchNorm's own autograd function.

Of three kinds: ``layer``; ``fused``, with SiLU and a residual, beside torch's layer and what torch has for these;
``masked``, ours with a mask beside ours without, as torch has none.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import bagua_syncbn

from ..core.timing import Function, no_wait
from .counts import count, trace
from .inputs import Cycle, Pool
from .one_rank import OneRankGroup
from .op_cases import EPS, MOMENTUM
from .shapes import Case
from .timer import measure

Layer = Callable[[Tensor], Tensor]
Made = tuple[Layer, list[Tensor]]  # with its parameters
EXTRA_KINDS = ("fused", "masked")


def make_ours(
    channels: int, device: torch.device, communicator: OneRankGroup, activation: str | None = None
) -> tuple[bagua_syncbn.SyncBatchNorm, list[Tensor]]:
    layer = bagua_syncbn.SyncBatchNorm(
        channels, EPS, MOMENTUM, device=device, process_group=communicator, activation=activation
    )
    return layer, list(layer.parameters())


def make_torchs(channels: int, device: torch.device) -> Made:
    """As torch.nn.SyncBatchNorm.forward does with several ranks; on a CPU, where it does not run, F.batch_norm."""
    layer = torch.nn.SyncBatchNorm(channels, EPS, MOMENTUM, device=device)
    parameters = list(layer.parameters())

    def synced(x: Tensor) -> Tensor:
        from torch.nn.modules._functions import SyncBatchNorm

        layer.num_batches_tracked.add_(1)
        output: Tensor = SyncBatchNorm.apply(
            x, layer.weight, layer.bias, layer.running_mean, layer.running_var, EPS, MOMENTUM, dist.group.WORLD, 1
        )
        return output

    def stand_in(x: Tensor) -> Tensor:
        layer.num_batches_tracked.add_(1)
        return F.batch_norm(x.float(), layer.running_mean, layer.running_var, *parameters, True, MOMENTUM, EPS).to(
            x.dtype
        )

    return synced if device.type == "cuda" else stand_in, parameters


def make_layers(kind: str, x: Tensor, residual: Tensor, communicator: OneRankGroup) -> dict[str, Made]:
    """Returns two layers for inputs like ``x``, ours first."""
    arguments = x.size(1), x.device
    if kind == "layer":
        return {"ours": make_ours(*arguments, communicator), "torch": make_torchs(*arguments)}
    ours, parameters = make_ours(*arguments, communicator, "silu" if kind == "fused" else None)
    if kind == "masked":
        mask = torch.rand(x.size(0), 1, *x.shape[2:], device=x.device) < 0.75
        unmasked, others = make_ours(*arguments, communicator)
        return {"ours": (lambda x: ours(x, mask=mask), parameters), "unmasked": (unmasked, others)}
    theirs, others = make_torchs(*arguments)
    return {
        "ours": (lambda x: ours(x, residual), parameters),
        "torch": (lambda x: F.silu(theirs(x) + residual), others),
    }


def measure_layer(
    case: Case, pool: Pool, communicator: OneRankGroup, seconds: float, kind: str = "layer"
) -> dict[str, Any]:
    """Returns the samples of forward passes and of whole steps. The host's work is part of what is compared."""
    cycle = Cycle([(x.detach().requires_grad_(), dy) for x, dy in pool.sets(case)])

    def forward(layer: Layer) -> Function:
        return lambda: layer(cycle.next()[0])

    def step(layer: Layer, parameters: list[Tensor]) -> Function:
        def run() -> None:
            x, dy = cycle.next()
            torch.autograd.grad(layer(x), (x, *parameters), dy)

        return run

    functions: dict[str, Function] = {}
    for name, (layer, parameters) in make_layers(kind, *cycle.first, communicator).items():
        functions[f"{name} forward"] = forward(layer)
        functions[f"{name} step"] = step(layer, parameters)
    samples, _ = measure(functions, pool.device, runs_ahead=False, seconds=seconds)
    return {"kind": kind, **case.record(), "microseconds": samples}


def count_layer(case: Case, pool: Pool, communicator: OneRankGroup) -> dict[str, Any]:
    """Returns launches, collectives and waits of one forward and one backward pass, as the profiler sees them."""
    x, dy = pool.sets(case)[0]
    x = x.detach().requires_grad_()
    wait = torch.cuda.synchronize if x.is_cuda else no_wait
    counted = {}
    for name, (layer, parameters) in make_layers("layer", x, dy, communicator).items():
        for _ in range(3):  # memory, counters of the stream, kernels, and what the ranks expect after each message
            layer(x)
            torch.autograd.grad(layer(x), (x, *parameters), dy)
        counted[f"{name} forward"] = count(trace(partial(layer, x), wait))
        backward = partial(torch.autograd.grad, layer(x), (x, *parameters), dy)
        counted[f"{name} backward"] = count(trace(backward, wait))
    return {"kind": "counts", **case.record(), "counts": counted}
