"""What is measured, on which tensors. A workload is a dict of functions by name, to be timed in turn."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bagua_syncbn
from bagua_syncbn import ops

SHAPES: tuple[tuple[int, ...], ...] = (
    (8, 64, 56, 56),
    (16, 256, 14, 14),
    (2, 64, 112, 112),
    (4, 512, 7, 7),
    (64, 256),
    (2, 32, 48, 48, 48),
    (32, 256, 56, 56),
)

Workload = dict[str, Callable[[], object]]

_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def layouts(shape: tuple[int, ...]) -> list[str]:
    """Returns the layouts that a shape can have: the rows of (N, C) are interleaved whatever the memory format."""
    return ["planar", "interleaved"] if len(shape) in _MEMORY_FORMATS else ["interleaved"]


def make_batch(shape: tuple[int, ...], layout: str) -> Tensor:
    batch = torch.randn(shape)
    if layout == "interleaved" and len(shape) in _MEMORY_FORMATS:
        batch = batch.to(memory_format=_MEMORY_FORMATS[len(shape)])
    return batch


def make_ops(shape: tuple[int, ...], layout: str) -> Workload:
    """The four ops that touch every value, each on its own, and a copy of the input."""
    x, dy = make_batch(shape, layout), make_batch(shape, layout)
    copy = torch.empty_like(x)
    weight, bias = torch.rand(shape[1]), torch.rand(shape[1])
    stats = ops.batch_norm_stats(x)
    mean, invstd, count = ops.batch_norm_gather_stats(stats[None], None, None, None, 0.1, 1e-5)
    sums, _, _ = ops.batch_norm_backward_reduce(dy, x, mean, invstd, weight)
    return {
        "copy": lambda: copy.copy_(x),
        "stats": lambda: ops.batch_norm_stats(x),
        "elemt": lambda: ops.batch_norm_elemt(x, weight, bias, mean, invstd),
        "backward_reduce": lambda: ops.batch_norm_backward_reduce(dy, x, mean, invstd, weight),
        "backward_elemt": lambda: ops.batch_norm_backward_elemt(dy, x, weight, mean, invstd, sums, count),
    }


def make_local(shape: tuple[int, ...], layout: str) -> tuple[Workload, str]:
    """Forward and backward of one layer on one process; also returns what has computed ours."""
    x, dy = make_batch(shape, layout).requires_grad_(), make_batch(shape, layout)
    copy, source = torch.empty_like(dy), x.detach()
    weight, bias = torch.ones(shape[1], requires_grad=True), torch.zeros(shape[1], requires_grad=True)
    running_mean, running_var = torch.zeros(shape[1]), torch.ones(shape[1])

    def step(batch_norm: Callable[..., Tensor]) -> str:
        y = batch_norm(x, running_mean, running_var, weight, bias, True, 0.1, 1e-5)
        # Not y.backward(), which would also time that the gradients are added to those of the leaves.
        torch.autograd.grad(y, (x, weight, bias), dy)
        return type(y.grad_fn).__name__

    workload: Workload = {
        "ours": lambda: step(bagua_syncbn.sync_batch_norm),
        "torch": lambda: step(F.batch_norm),
        "copy": lambda: copy.copy_(source),
    }
    path = "F.batch_norm" if step(bagua_syncbn.sync_batch_norm) == step(F.batch_norm) else "ops"
    return workload, path


def make_synced(shape: tuple[int, ...], layout: str, communicator: Any, peer: type[nn.Module] | None) -> Workload:
    """Forward and backward of whole layers on one of several ranks, and what the synced one is made of."""
    x, dy = make_batch(shape, layout).requires_grad_(), make_batch(shape, layout)
    copy, source = torch.empty_like(dy), x.detach()
    packed, sums = torch.zeros(2 * shape[1] + 2), torch.zeros(2 * shape[1])

    def step(layer: nn.Module) -> Callable[[], object]:
        inputs = (x, layer.get_parameter("weight"), layer.get_parameter("bias"))
        return lambda: torch.autograd.grad(layer(x), inputs, dy)

    def collectives() -> None:
        communicator.all_gather(packed)
        communicator.all_reduce(sums)

    layer = _LAYERS[len(shape)]
    workload = {
        "ours": step(bagua_syncbn.convert_sync_batchnorm(layer(shape[1]))),
        "unsynced": step(layer(shape[1])),
        "copy": lambda: copy.copy_(source),
        "collectives": collectives,
    }
    if peer is not None:
        workload["fairscale"] = step(peer(shape[1]))  # its forward takes any number of dimensions
    return workload
