"""Sections ops and local: each op against copying, and the step of one process against ``F.batch_norm``."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bagua_syncbn
from bagua_syncbn import ops

from ..core import timing
from ..core.batches import Shape, layouts, make_batch
from ..core.machine import thread_counts
from ..core.timing import Workload

SHAPES: tuple[Shape, ...] = (
    (8, 64, 56, 56),
    (16, 256, 14, 14),
    (2, 64, 112, 112),
    (4, 512, 7, 7),
    (64, 256),
    (2, 32, 48, 48, 48),
    (32, 256, 56, 56),
)


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


def cases(job: dict[str, Any]) -> list[tuple[str, Shape, str, int]]:
    return [
        (section, shape, layout, threads)
        for section in ("ops", "local")
        if section in job["sections"]
        for shape in job["shapes"] or SHAPES
        for layout in layouts(shape)
        for threads in thread_counts(1)
    ]


def measure(section: str, shape: Shape, layout: str, threads: int, job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(threads)
    case = {"section": section, "shape": shape, "layout": layout, "threads": threads}
    if section == "ops":
        workload = make_ops(shape, layout)
    else:
        workload, case["path"] = make_local(shape, layout)
    return case | timing.time_alone(workload, job)
