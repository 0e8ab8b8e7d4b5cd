"""Timing in rounds: each round runs all functions of a workload in turn, so that disturbances affect all equally."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bagua_syncbn._groups import spec_of
from bagua_syncbn.communicators.shared import SharedCommunicator

Function = Callable[[], object]
Workload = dict[str, Function]
Timer = Callable[[Function, int], float]  # seconds per call, from the function and the number of calls

# A sample has enough calls to take this long, so that the clock and the loop are negligible.
_SAMPLE_SECONDS = 2e-4
_MAX_CALLS = 50

Round = dict[str, float]  # seconds per call, by function


def gather(value: Any) -> list[Any]:
    """Returns the values of all ranks; without a job, this process's value."""
    if not dist.is_initialized():
        return [value]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def start_together() -> None:
    """Waits for all ranks. They leave gloo's barrier up to 100 µs apart, a sum through shared memory within 1 µs."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
        communicator = spec_of(None).communicator()
        if isinstance(communicator, SharedCommunicator):
            communicator.all_reduce(torch.zeros(1))


def host_seconds(function: Function, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def run_round(workload: Workload, names: list[str], calls: dict[str, int], timer: Timer) -> Round:
    seconds = {}
    for name in names:
        start_together()
        seconds[name] = timer(workload[name], calls.get(name, 1))
    return seconds


def plan(workload: Workload, job: dict[str, Any], timer: Timer) -> tuple[dict[str, int], int]:
    """Warms up. Returns each function's calls per sample, and the number of rounds that fit the job's time budget."""
    names = list(workload)
    for _ in range(2):
        run_round(workload, names, {}, timer)
    seconds = run_round(workload, names, {}, timer)
    calls = {name: max(1, min(_MAX_CALLS, int(_SAMPLE_SECONDS / max(seconds[name], 1e-7)))) for name in names}
    expected = sum(calls[name] * seconds[name] for name in names)
    return calls, max(job["least"], min(job["most"], int(job["seconds"] / expected)))


def digits(value: float) -> float:
    return float(f"{value:.4g}")


def time_workload(workload: Workload, job: dict[str, Any], timer: Timer = host_seconds) -> dict[str, Any]:
    """Times a workload in this process, or on all ranks of a job.

    Returns the microseconds of each function in each round, as means over ranks. Every other round runs in reverse
    order, so that a function does not always follow the same function.
    """
    calls, rounds = gather(plan(workload, job, timer))[0]  # equal on all ranks
    orders = list(workload), list(workload)[::-1]
    start_together()
    for order in orders:  # warms up
        run_round(workload, order, calls, timer)
    ranks = gather([run_round(workload, orders[number % 2], calls, timer) for number in range(rounds)])
    parts = list(zip(*ranks, strict=True))  # each round's times, by rank
    means = {name: [sum(part[name] for part in each) / len(each) for each in parts] for name in workload}
    return {"microseconds": {name: [digits(1e6 * seconds) for seconds in means[name]] for name in means}}
