"""Sections ops and local: each op against copying, and the step of one process against ``F.batch_norm``."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from . import machine, rounds, workloads
from .workloads import Shape


def cases(job: dict[str, Any]) -> list[tuple[str, Shape, str, int]]:
    return [
        (section, shape, layout, threads)
        for section in ("ops", "local")
        if section in job["sections"]
        for shape in job["shapes"] or workloads.SHAPES
        for layout in workloads.layouts(shape)
        for threads in machine.thread_counts(1)
    ]


def measure(section: str, shape: Shape, layout: str, threads: int, job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(threads)
    path = {}
    if section == "ops":
        workload = workloads.make_ops(shape, layout)
    else:
        workload, path["path"] = workloads.make_local(shape, layout)
    chosen = rounds.plan(workload, job["seconds"], job["least"], job["most"], lambda: None)
    load = rounds.Load()
    measured = rounds.run(workload, chosen, lambda: None)
    return {
        "section": section,
        "shape": shape,
        "layout": layout,
        "threads": threads,
        **path,
        "foreign_cores": load.foreign_cores(load.own_seconds()),
        **rounds.record(measured, job["keeps_memory"]),
    }


def measure_all(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    patience = rounds.Patience(job["patience"])
    for case in cases(job):
        yield rounds.quietest(partial(measure, *case, job), job["attempts"], patience.wait)
