"""Section local: each op compared with copying the input, and a step in one process compared with ``F.batch_norm``."""

import itertools
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bagua_syncbn
from bagua_syncbn import _ops as ops
from bagua_syncbn._step import by_torch

from ..batches import Shape, layouts, make_batch
from ..machine import thread_counts
from ..recorded import Case, Results, across_cases, elements, of_section, ratios, table, table_of_ratios
from ..timing import Workload, time_workload

SHAPES: tuple[Shape, ...] = (
    (8, 64, 56, 56),
    (16, 256, 14, 14),
    (2, 64, 112, 112),
    (4, 512, 7, 7),
    (64, 256),
    (2, 32, 48, 48, 48),
    (32, 256, 56, 56),
)
# Memory traffic of each op, in sizes of the input; a copy has 2: one read and one write.
MOVED = {"stats": 1, "elemt": 2, "backward_reduce": 2, "backward_elemt": 3}
# The smallest inputs that our kernels compute in one process; F.batch_norm computes smaller ones.
LEAST = {"planar": by_torch._WORTHWHILE_PLANAR, "interleaved": by_torch._WORTHWHILE_INTERLEAVED}


def cases(job: dict[str, Any]) -> list[tuple[Shape, str, int]]:
    shapes = job["shapes"] or SHAPES
    return [case for shape in shapes for case in itertools.product([shape], layouts(shape), thread_counts(1))]


def make_ops(inputs: list[tuple[Tensor, Tensor]], with_atens: bool = False) -> Workload:
    """Returns our ops, a copy of the input, and ATen's kernels, called as in torch.nn.SyncBatchNorm.

    Calls use the pairs of x and dy in turn.
    """
    x, dy = inputs[0]
    weight, bias = torch.randn(2, x.size(1), device=x.device).unbind()
    running, batches = (torch.zeros_like(bias), torch.ones_like(bias)), torch.tensor(0, device=x.device)
    packed = ops.batch_norm_stats(x)[None]
    mean, invstd, count = ops.batch_norm_gather_stats(packed, None, None, None, 0.1, 1e-5)
    factors, gather = (mean, invstd, weight), torch.batch_norm_gather_stats_with_counts
    sums = ops.batch_norm_backward_reduce(dy, x, *factors)[0]
    wide, narrow, parts, copy = count.view(1).float(), count.view(1).int(), sums.chunk(2), torch.empty_like(x)
    calls: dict[str, Any] = {
        "copy": lambda x, dy: copy.copy_(x),
        "stats": lambda x, dy: ops.batch_norm_stats(x),
        "gather_stats": lambda x, dy: ops.batch_norm_gather_stats(packed, *running, batches, 0.1, 1e-5),
        "elemt": lambda x, dy: ops.batch_norm_elemt(x, weight, bias, mean, invstd),
        "backward_reduce": lambda x, dy: ops.batch_norm_backward_reduce(dy, x, *factors),
        "backward_elemt": lambda x, dy: ops.batch_norm_backward_elemt(dy, x, weight, mean, invstd, sums, count),
    }
    if with_atens:
        calls |= {
            "aten stats": lambda x, dy: torch.batch_norm_stats(x, 1e-5),
            "aten gather_stats": lambda x, dy: gather(x, mean[None], invstd[None], *running, 0.1, 1e-5, wide),
            "aten elemt": lambda x, dy: torch.batch_norm_elemt(x, weight, bias, mean, invstd, 1e-5),
            "aten backward_reduce": lambda x, dy: torch.batch_norm_backward_reduce(dy, x, *factors, True, True, True),
            "aten backward_elemt": lambda x, dy: torch.batch_norm_backward_elemt(dy, x, *factors, *parts, narrow),
        }
    following = itertools.cycle(inputs)
    return {name: lambda call=call: call(*next(following)) for name, call in calls.items()}


def make_steps(x: Tensor, dy: Tensor) -> Workload:
    """Returns forward and backward through autograd, computed by us and by torch."""
    weight, bias = torch.ones(x.size(1), requires_grad=True), torch.zeros(x.size(1), requires_grad=True)
    running_mean, running_var = torch.zeros(x.size(1)), torch.ones(x.size(1))

    def step(batch_norm: Callable[..., Tensor]) -> Callable[[], object]:
        # y.backward() would also time the accumulation of gradients.
        return lambda: torch.autograd.grad(
            batch_norm(x, running_mean, running_var, weight, bias, True, 0.1, 1e-5), (x, weight, bias), dy
        )

    return {"ours": step(bagua_syncbn.sync_batch_norm), "torch": step(F.batch_norm)}


def measure(shape: Shape, layout: str, threads: int, job: dict[str, Any]) -> Case:
    torch.set_num_threads(threads)
    x, dy = make_batch(shape, layout), make_batch(shape, layout)
    workload = make_ops([(x, dy)]) | make_steps(x.clone().requires_grad_(), dy)
    return {"shape": shape, "layout": layout, "threads": threads, **time_workload(workload, job)}


def copy_ratios(case: Case, op: str) -> list[float]:
    """Returns an op's time, relative to copying the bytes that it must move."""
    return ratios(case, op, "copy", 2 / MOVED[op])


def local_table(results: Results) -> str:
    """Times of our ops and both steps, relative to copying the input: median (minimum; quartiles). A copy moves twice
    the bytes of stats, and two thirds of the bytes of backward_elemt.
    """
    return table_of_ratios(of_section(results, "local"), "copy")


def process_table(results: Results) -> str:
    """Summary of one process: geometric mean over inputs (range)."""
    measured = [case for case in of_section(results, "local") if "ours" in case["microseconds"]]
    kinds = {
        f"{layout}, {kind}": [c for c in measured if c["layout"] == layout and (elements(c) >= least) == is_native]
        for layout, least in LEAST.items()
        for kind, is_native in ((f"{least:,} values and more", True), ("fewer values", False))
    }
    rows = [
        [
            f"step / `F.batch_norm`, {what}",
            len(chosen),
            across_cases([median(ratios(case, "ours", "torch")) for case in chosen]),
        ]
        for what, chosen in kinds.items()
        if chosen
    ]
    if alone := [case for case in of_section(results, "local") if "stats" in case["microseconds"]]:
        copied = [median(copy_ratios(case, op)) for case in alone for op in MOVED]
        rows.insert(0, ["each op / copying as many bytes", len(alone), across_cases(copied)])
    return table(["", "inputs", "ratio"], rows)


TABLES = {"local": local_table, "process": process_table}
