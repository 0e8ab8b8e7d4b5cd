"""Timing in rounds: every function of a workload in turn, so that what disturbs one disturbs all alike."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bagua_syncbn.communicators.shared import SharedCommunicator
from bagua_syncbn.groups import spec_of

Function = Callable[[], object]
Workload = dict[str, Function]
Timer = Callable[[Function, int], float]  # seconds for one of so many calls

# A sample is made of as many calls as take this long, so that the clock and the loop weigh little.
_SAMPLE_SECONDS = 2e-4
_MAX_CALLS = 50

Round = dict[str, float]  # seconds for one call of each function


class Plan(NamedTuple):
    """How often to run a workload; the ranks of a job must agree on it."""

    calls: dict[str, int]  # in one sample
    rounds: int


def gather(value: Any) -> list[Any]:
    """Returns the values of all ranks; of a process without ranks its own."""
    if not dist.is_initialized():
        return [value]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def start_together() -> None:
    """Waits for all ranks. A barrier of gloo lets them go some 100 µs apart, shared memory less than one."""
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


def run_round(workload: Workload, names: list[str], calls: dict[str, int], timer: Timer = host_seconds) -> Round:
    seconds = {}
    for name in names:
        start_together()
        seconds[name] = timer(workload[name], calls.get(name, 1))
    return seconds


def plan(workload: Workload, job: dict[str, Any], timer: Timer = host_seconds) -> Plan:
    """Warms up and plans rounds that take about the job's seconds together, at least and at most so many."""
    names = list(workload)
    for _ in range(2):
        run_round(workload, names, {}, timer)
    seconds = run_round(workload, names, {}, timer)
    calls = {name: max(1, min(_MAX_CALLS, int(_SAMPLE_SECONDS / max(seconds[name], 1e-7)))) for name in names}
    expected = sum(calls[name] * seconds[name] for name in names)
    return Plan(calls, max(job["least"], min(job["most"], int(job["seconds"] / expected))))


def run(workload: Workload, chosen: Plan, timer: Timer = host_seconds) -> list[Round]:
    """Runs the rounds, every other one backwards: no function always finds the cache as one other leaves it."""
    names = list(workload)
    for order in (names, names[::-1]):
        run_round(workload, order, chosen.calls, timer)
    return [run_round(workload, names[:: (-1) ** i], chosen.calls, timer) for i in range(chosen.rounds)]


def record(ranks: list[list[Round]]) -> dict[str, Any]:
    """Returns what is kept of the rounds: microseconds of each function, the means over ranks."""
    rounds = list(zip(*ranks, strict=True))
    means = {name: [sum(part[name] for part in parts) / len(parts) for parts in rounds] for name in ranks[0][0]}
    return {"microseconds": {name: [digits(1e6 * seconds) for seconds in means[name]] for name in means}}


def digits(value: float) -> float:
    return float(f"{value:.4g}")


def time_workload(workload: Workload, job: dict[str, Any], timer: Timer = host_seconds) -> dict[str, Any]:
    """Times a workload in this process, or on all ranks together; returns what is recorded, the means over ranks."""
    chosen = gather(plan(workload, job, timer))[0]
    start_together()
    return record(gather(run(workload, chosen, timer)))
