"""Section ops: each op that reads the whole input, compared with copying the bytes that it must move."""

import itertools
from statistics import median
from typing import Any

import torch

from bagua_syncbn import ops

from ..batches import Shape, layouts, make_batch
from ..machine import thread_counts
from ..recorded import Case, Results, elements, input_of, of_section, ratios, spread, table
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
# Input sizes that each op must read or write; 2 for a copy.
MOVED = {"stats": 1, "elemt": 2, "backward_reduce": 2, "backward_elemt": 3}
COPY_MOVES = 2
_ELEMENT_SIZE = 4  # all inputs are float32


def cases(job: dict[str, Any]) -> list[tuple[Shape, str, int]]:
    shapes = job["shapes"] or SHAPES
    return [case for shape in shapes for case in itertools.product([shape], layouts(shape), thread_counts(1))]


def make(shape: Shape, layout: str) -> Workload:
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


def measure(shape: Shape, layout: str, threads: int, job: dict[str, Any]) -> Case:
    torch.set_num_threads(threads)
    case = {"shape": shape, "layout": layout, "threads": threads}
    return case | time_workload(make(shape, layout), job)


def copy_ratios(case: Case, op: str) -> list[float]:
    """Returns an op's time over the time to copy the bytes that it must move."""
    return ratios(case, op, "copy", COPY_MOVES / MOVED[op])


def ops_table(results: Results) -> str:
    """Each op over copying the bytes that it must move: median (minimum; quartiles)."""

    def row(case: Case) -> list[str]:
        rate = COPY_MOVES * _ELEMENT_SIZE * elements(case) / median(case["microseconds"]["copy"]) / 1e3
        return [*input_of(case), *(spread(copy_ratios(case, op)) for op in MOVED), f"{rate:.3g}"]

    return table(["input", "layout", "threads", *MOVED, "copy, GB/s"], map(row, of_section(results, "ops")))


TABLES = {"ops": ops_table}
