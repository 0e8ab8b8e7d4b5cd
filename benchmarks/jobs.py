"""Runs the sections in ``sections.ON_RANKS`` on several ranks of this machine."""

import os
import tempfile
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from . import peers, sections
from .recorded import Case


def launch(world_size: int, job: dict[str, Any]) -> Iterator[Case]:
    """Runs the job's sections on ``world_size`` ranks, and yields each case once measured."""
    measured = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="bagua_syncbn_bench_") as directory:
        given = world_size, f"file://{directory}/store", job, measured
        ranks = torch.multiprocessing.spawn(_run_rank, given, world_size, join=False, daemon=True)
        ended = False
        while not ended:
            ended = ranks.join(timeout=0.5)
            while not measured.empty():
                yield measured.get()


def _run_rank(rank: int, world_size: int, store: str, job: dict[str, Any], measured: Any) -> None:
    warnings.filterwarnings("ignore", module="fairscale", category=UserWarning)
    device = torch.device(job["device"], rank if job["device"] == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store, timedelta(minutes=5), world_size, rank)
    torch.manual_seed(rank)

    makers = peers.find(device)
    for name in filter(job["sections"].__contains__, sections.ON_RANKS):
        module = sections.ON_RANKS[name]
        for case in module.cases(job, world_size):
            found = module.measure(*case, job, makers, device)
            if rank == 0:
                measured.put({"section": name, "ranks": world_size, "device": device.type} | found)
    # Skips the regular exit, during which ranks sometimes aborted after fairscale's layer. All results have been sent.
    os._exit(0)
