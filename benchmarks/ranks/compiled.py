"""Section compiled: a residual block on ranks, eager and compiled, against the same without synchronization."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua_syncbn.communicators import spec_of

from ..core.batches import Shape, make_batch
from ..core.timing import Workload
from ..peers import Maker
from .gathering import time_on_ranks
from .training import Block

SHAPES: tuple[Shape, ...] = ((8, 64, 56, 56),)


def cases(job: dict[str, Any], world_size: int) -> list[tuple[Shape]]:
    return [(shape,) for shape in job["shapes"] or SHAPES if len(shape) == 4]


def _step(block: nn.Module, x: Tensor, grad_output: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(block(x), (x, *block.parameters()), grad_output)


def measure(shape: Shape, job: dict[str, Any], makers: dict[str, Maker], device: torch.device) -> dict[str, Any]:
    torch.set_num_threads(1)
    channels = shape[1]
    x, grad_output = (make_batch(shape, "planar").to(device) for _ in range(2))
    workload: Workload = {}
    for name in ("ours", "local"):
        block = Block(makers[name], channels, channels, 1).to(device)
        workload[name] = _step(block, x.requires_grad_(), grad_output)
        workload[f"{name}, compiled"] = _step(torch.compile(block, fullgraph=True), x, grad_output)
    communicator = spec_of(None).communicator()
    packed, sums = torch.zeros(2 * channels + 2, device=device), torch.zeros(2 * channels, device=device)

    def exchange() -> None:
        for _ in range(2):  # layers in the block
            communicator.all_gather(packed)
            communicator.all_reduce(sums)

    workload["collectives"] = exchange
    case = {"section": "compiled", "ranks": dist.get_world_size(), "device": device.type, "shape": shape}
    return case | time_on_ranks(workload, job)
