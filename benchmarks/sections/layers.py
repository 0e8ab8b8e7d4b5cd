"""Section layers: single layers of all packages, timed in turn in the same rank processes on the same batch."""

import itertools
import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import Shape, layouts, make_batch
from ..machine import thread_counts
from ..peers import OVER_GLOO, Maker
from ..recorded import Case, Results, across_cases, elements, marked, of_section, ratios, table, table_of_ratios, where
from ..timing import time_workload
from .training import step_times

# Per rank: ResNet-50 with several batch sizes, a U-Net's first layer, 3-D, and shapes of published results.
SHAPES: tuple[Shape, ...] = (
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

# Inputs of at least this size (except one) are measured on at most two ranks, in one layout and with one thread.
_HUGE = 25_000_000
_MEASURED_IN_FULL = (32, 256, 56, 56)


def cases(job: dict[str, Any], world_size: int) -> list[tuple[Shape, str, int]]:
    """Returns shape, layout and threads of each case. Includes interleaved layouts on two ranks, and several threads on
    one and two ranks, which would otherwise leave cores idle."""
    chosen = []
    for shape in map(tuple, job["shapes"] or SHAPES):
        huge = math.prod(shape) >= _HUGE and shape != _MEASURED_IN_FULL
        if huge and world_size > 2:
            continue
        simple = job["quick"] or huge or world_size > 2
        chosen_layouts = layouts(shape)[: 2 if world_size == 2 and not simple else 1]
        threads = [1] if simple or job["device"] != "cpu" else thread_counts(world_size)
        chosen += itertools.product([shape], chosen_layouts, threads)
    return chosen


def step_of(layer: nn.Module, x: Tensor, grad_output: Tensor) -> Callable[[], object]:
    # y.backward() would also time the accumulation of gradients.
    return lambda: torch.autograd.grad(layer(x), (x, *layer.parameters()), grad_output)


def measure(
    shape: Shape, layout: str, threads: int, job: dict[str, Any], makers: dict[str, Maker], device: torch.device
) -> Case:
    torch.set_num_threads(threads)
    x, grad_output = (make_batch(shape, layout).to(device) for _ in range(2))
    layers = {name: make(shape[1], len(shape)).to(device) for name, make in makers.items()}
    workload = {name: step_of(layer, x.requires_grad_(), grad_output) for name, layer in layers.items()}
    return {"shape": shape, "layout": layout, "threads": threads, **time_workload(workload, job)}


_SYNCHRONIZED = "ours", OVER_GLOO, "naive", "fairscale", "torch_sync"


def synchronized(results: Results) -> tuple[list[str], list[Case]]:
    """Returns the synchronized peers in any case, and the single-threaded cases."""
    measured = of_section(results, "layers")
    names = {name for case in measured for name in case["microseconds"]}
    return [name for name in _SYNCHRONIZED if name in names], [case for case in measured if case["threads"] == 1]


def _over(cases: list[Case], name: str) -> str:
    return across_cases([median(ratios(case, name, "local")) for case in cases if name in case["microseconds"]])


def headline_table(results: Results) -> str:
    """Single-threaded ranks, all inputs, relative to the unsynchronized layer: geometric mean (range)."""
    peers, shown = synchronized(results)

    def row(ranks: int) -> list[str]:
        cases = [case for case in shown if case["ranks"] == ranks]
        return [marked(ranks, results), str(len(cases)), *(_over(cases, name) for name in peers)]

    return table(["ranks", "inputs", *peers], map(row, sorted({case["ranks"] for case in shown})))


def summary_table(results: Results) -> str:
    """Steps over two ranks, relative to the unsynchronized layer; geometric means of layers."""
    peers, shown = synchronized(results)
    cases = [case for case in shown if case["ranks"] == 2]
    kinds = {
        "layers, inputs of a million values and more": [case for case in cases if elements(case) >= 1e6],
        "layers, smaller inputs": [case for case in cases if elements(case) < 1e6],
    }
    rows = [[what, *(_over(chosen, name) for name in peers)] for what, chosen in kinds.items()]
    if times := step_times(results).get(2):
        steps = [f"{median(times[name]) / median(times['local']):.2f}" for name in peers]
        rows.insert(0, ["a small ResNet, 64 images in total", *steps])
    names = [name.replace("ours", "bagua_syncbn") for name in peers]
    header = ["step time over two ranks, relative to nn.BatchNorm", *names]
    return f"{table(header, rows)}\n\n{where(results)}; small messages {results['settings']['exchange']}."


def layers_table(results: Results) -> str:
    """Time of each peer's step, relative to the unsynchronized layer: median (minimum; quartiles)."""
    return table_of_ratios(of_section(results, "layers"), "local")


TABLES = {"layers": layers_table, "headline": headline_table, "summary": summary_table}
