"""Section local: a step in one process, forward and backward through autograd, compared with ``F.batch_norm``."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bagua_syncbn

from ..batches import Shape, make_batch
from ..recorded import (
    Case,
    Results,
    across_cases,
    elements,
    input_of,
    milliseconds,
    of_section,
    ratios,
    spread,
    table,
)
from ..timing import Workload, time_workload
from . import ops
from .ops import cases  # noqa: F401 - the same inputs


def make(shape: Shape, layout: str) -> tuple[Workload, str]:
    """Returns the workload, and the implementation that computes our step."""
    x, dy = make_batch(shape, layout).requires_grad_(), make_batch(shape, layout)
    weight, bias = torch.ones(shape[1], requires_grad=True), torch.zeros(shape[1], requires_grad=True)
    running_mean, running_var = torch.zeros(shape[1]), torch.ones(shape[1])

    def step(batch_norm: Callable[..., Tensor]) -> str:
        y = batch_norm(x, running_mean, running_var, weight, bias, True, 0.1, 1e-5)
        # y.backward() would also time the accumulation of gradients.
        torch.autograd.grad(y, (x, weight, bias), dy)
        return type(y.grad_fn).__name__

    workload: Workload = {"ours": lambda: step(bagua_syncbn.sync_batch_norm), "torch": lambda: step(F.batch_norm)}
    path = "F.batch_norm" if step(bagua_syncbn.sync_batch_norm) == step(F.batch_norm) else "ops"
    return workload, path


def measure(shape: Shape, layout: str, threads: int, job: dict[str, Any]) -> Case:
    torch.set_num_threads(threads)
    workload, path = make(shape, layout)
    case = {"shape": shape, "layout": layout, "threads": threads, "path": path}
    return case | time_workload(workload, job)


def local_table(results: Results) -> str:
    """Our step in one process over F.batch_norm's step: median (minimum; quartiles)."""

    def row(case: Case) -> list[str]:
        times = [milliseconds(case, name) for name in ("ours", "torch")]
        return [*input_of(case), case["path"], spread(ratios(case, "ours", "torch")), *times]

    header = ["input", "layout", "threads", "computed by", "ours / torch", "ours, ms", "torch, ms"]
    return table(header, map(row, of_section(results, "local")))


def process_table(results: Results) -> str:
    """Summary of one process: geometric mean over inputs (minimum to maximum)."""
    measured = of_section(results, "local")
    large = [case for case in measured if elements(case) >= 1e6]
    kinds = {
        "a million values and more, planar": [case for case in large if case["layout"] == "planar"],
        "a million values and more, interleaved": [case for case in large if case["layout"] != "planar"],
        "fewer values": [case for case in measured if elements(case) < 1e6],
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
    if alone := of_section(results, "ops"):
        copied = [median(ops.copy_ratios(case, op)) for case in alone for op in ops.MOVED]
        rows.insert(0, ["each op / copying as many bytes", len(alone), across_cases(copied)])
    return table(["", "inputs", "ratio"], rows)


TABLES = {"local": local_table, "process": process_table}
