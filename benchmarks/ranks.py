"""Whole layers on two gloo ranks of this machine. ``cpu.py`` starts both; each runs this file."""

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import rounds
import torch
import torch.distributed as dist
import workloads
from torch import nn

from bagua_syncbn.communicators import resolve_communicator

WORLD_SIZE = 2


def launch(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Starts the ranks and yields the cases as they are measured."""
    with tempfile.TemporaryDirectory(prefix="bagua_syncbn_bench_") as directory:
        command = [sys.executable, __file__, "--store", f"{directory}/store", "--job", json.dumps(job), "--rank"]
        output = [subprocess.PIPE, *[subprocess.DEVNULL] * (WORLD_SIZE - 1)]
        processes = [
            subprocess.Popen([*command, str(rank)], stdout=stdout, text=True) for rank, stdout in enumerate(output)
        ]
        try:
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                yield json.loads(line)
            statuses = [process.wait(timeout=60) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(statuses):
            sys.exit(f"ranks: expected exit status 0 of all, got {statuses}")


def find_peer() -> type[nn.Module] | None:
    """Returns fairscale's synced layer, if it is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            peer: type[nn.Module] = importlib.import_module("fairscale.experimental.nn").SyncBatchNorm
        except ImportError:
            return None
    return peer


def gather(value: Any) -> list[Any]:
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def measure(shape: tuple[int, ...], layout: str, threads: int, job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(threads)
    workload = workloads.make_synced(shape, layout, resolve_communicator(None), find_peer())
    chosen = gather(rounds.plan(workload, job["seconds"], job["least"], job["most"], dist.barrier))[0]
    dist.barrier()
    load = rounds.Load()
    measured = rounds.merge(gather(rounds.run(workload, chosen, dist.barrier)))
    foreign_cores = load.foreign_cores(sum(gather(load.own_seconds())))
    return {
        "section": "ranks",
        "shape": shape,
        "layout": layout,
        "threads": threads,
        # Rank 0's for all: they must agree on whether it was disturbed.
        "foreign_cores": gather(foreign_cores)[0],
        **rounds.record(measured, job["keeps_memory"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--job", type=json.loads, required=True)
    arguments = parser.parse_args()
    job = arguments.job
    warnings.filterwarnings("ignore", module="fairscale", category=UserWarning)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.store}",
        rank=arguments.rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(minutes=5),
    )
    torch.manual_seed(arguments.rank)
    patience = rounds.Patience(job["patience"])

    def wait() -> bool:
        # Rank 0 decides for all whether to measure again.
        return bool(gather(patience.wait() if arguments.rank == 0 else None)[0])

    for shape in map(tuple, job["shapes"]):
        for layout, threads in itertools.product(workloads.layouts(shape), job["threads"]):
            case = rounds.quietest(partial(measure, shape, layout, threads, job), job["attempts"], wait)
            if arguments.rank == 0:
                print(json.dumps(case), flush=True)
    # Without ending the job in order: with fairscale's layer in it, a rank now and then aborted while doing that. All
    # results are out.
    os._exit(0)


if __name__ == "__main__":
    main()
