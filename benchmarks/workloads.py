"""What is measured, on which tensors. A workload is a dict of functions by name, to be timed in turn."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bagua_syncbn
from bagua_syncbn import ops

Shape = tuple[int, ...]

# Of the sections ops and local.
SHAPES: tuple[Shape, ...] = (
    (8, 64, 56, 56),
    (16, 256, 14, 14),
    (2, 64, 112, 112),
    (4, 512, 7, 7),
    (64, 256),
    (2, 32, 48, 48, 48),
    (32, 256, 56, 56),
)

# Of the section layers, for each rank: ResNet-50 at several batches, a U-Net's first layer, 3-D, and those that others
# have published figures of.
LAYER_SHAPES: tuple[Shape, ...] = (
    (4, 32, 16, 16),
    (64, 256),
    (64, 2048),
    (4, 512, 7, 7),
    (16, 256, 14, 14),
    (2, 64, 112, 112),
    (8, 64, 56, 56),
    (50, 2048, 7, 7),
    (2, 32, 48, 48, 48),
    (1, 32, 512, 512),
    (32, 256, 56, 56),
    (32, 64, 112, 112),
    (64, 8, 224, 224),
)

Workload = dict[str, Callable[[], object]]

_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def parse_shape(text: str) -> Shape:
    shape = tuple(int(size) for size in text.split("x"))
    if not 2 <= len(shape) <= 5:
        raise ValueError(f"shape: expected 2 to 5 dimensions, got {text}")
    return shape


def layouts(shape: Shape) -> list[str]:
    """Returns the layouts that a shape can have: the rows of (N, C) are interleaved whatever the memory format."""
    return ["planar", "interleaved"] if len(shape) in _MEMORY_FORMATS else ["interleaved"]


def make_batch(shape: Shape, layout: str) -> Tensor:
    batch = torch.randn(shape)
    if layout == "interleaved" and len(shape) in _MEMORY_FORMATS:
        batch = batch.to(memory_format=_MEMORY_FORMATS[len(shape)])
    return batch


def make_ops(shape: Shape, layout: str) -> Workload:
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


def make_local(shape: Shape, layout: str) -> tuple[Workload, str]:
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


def make_collectives(channels: int, communicator: Any, device: torch.device) -> Workload:
    """The two messages of a synchronized step in float32, on their own."""
    packed = torch.zeros(2 * channels + 2, device=device)
    sums = torch.zeros(2 * channels, device=device)
    return {
        "all_gather": lambda: communicator.all_gather(packed),
        "all_reduce": lambda: communicator.all_reduce(sums),
    }
