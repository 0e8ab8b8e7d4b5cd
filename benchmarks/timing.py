"""Timing in rounds: every function of a workload in turn, so that what disturbs one disturbs all alike."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bagua_syncbn.communicators import SharedCommunicator, spec_of

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

Function = Callable[[], object]
Workload = dict[str, Function]

# A sample is made of as many calls as take this long, so that the clock and the loop weigh little.
_SAMPLE_SECONDS = 2e-4
_MAX_CALLS = 50

# More page faults than this in a round, and a part of its time went into mapping memory. The interpreter has one or two
# now and then.
_FAULTS = 2

# A case is disturbed when other processes, or other machines on the same host, used more than this many cores.
QUIET_CORES = 0.15


class Round(NamedTuple):
    seconds: dict[str, float]  # for one call
    faults: int


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


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


def run_round(
    workload: Workload, names: list[str], calls: dict[str, int], timer: Callable[[Function, int], float] = host_seconds
) -> Round:
    seconds, faults = {}, 0
    for name in names:
        start_together()
        faults -= page_faults()
        seconds[name] = timer(workload[name], calls.get(name, 1))
        faults += page_faults()
    return Round(seconds, faults)


def plan(workload: Workload, job: dict[str, Any]) -> Plan:
    """Warms up and plans rounds that take about the job's seconds together, at least and at most so many."""
    names = list(workload)
    for _ in range(2):
        run_round(workload, names, {})
    seconds = run_round(workload, names, {}).seconds
    calls = {name: max(1, min(_MAX_CALLS, int(_SAMPLE_SECONDS / max(seconds[name], 1e-7)))) for name in names}
    expected = sum(calls[name] * seconds[name] for name in names)
    return Plan(calls, max(job["least"], min(job["most"], int(job["seconds"] / expected))))


def run(workload: Workload, chosen: Plan, timer: Callable[[Function, int], float] = host_seconds) -> list[Round]:
    """Runs the rounds, every other one backwards: no function always finds the cache as one other leaves it."""
    names = list(workload)
    for order in (names, names[::-1]):
        run_round(workload, order, chosen.calls, timer)
    return [run_round(workload, names[:: (-1) ** i], chosen.calls, timer) for i in range(chosen.rounds)]


def merge(ranks: list[list[Round]]) -> list[Round]:
    """Averages the times of a round over the ranks, and adds up the page faults."""
    return [
        Round(
            {name: sum(part.seconds[name] for part in parts) / len(parts) for name in parts[0].seconds},
            sum(part.faults for part in parts),
        )
        for parts in zip(*ranks, strict=True)
    ]


def record(rounds: list[Round], keeps_memory: bool) -> dict[str, Any]:
    """Returns what is kept of the rounds: microseconds of each, less the rounds that mapped memory if none should."""
    kept = [r for r in rounds if r.faults <= _FAULTS] if keeps_memory else rounds
    if 3 * len(kept) < len(rounds):  # better disturbed times, which show by their faults, than hardly any
        kept = rounds
    return {
        "microseconds": {name: [digits(r.seconds[name] * 1e6) for r in kept] for name in kept[0].seconds},
        "faults": sorted(r.faults for r in kept)[len(kept) // 2],
        "dropped": len(rounds) - len(kept),
    }


def digits(value: float) -> float:
    return float(f"{value:.4g}")


class Load:
    """Measures how many cores other programs use, from its creation on."""

    def __init__(self) -> None:
        self._start = _clocks()

    def foreign_cores(self) -> float | None:
        """Returns the mean number of cores in use, less those of the ranks; None where the system does not say."""
        elapsed, own, busy = (now - then for now, then in zip(_clocks(), self._start, strict=True))
        cores = (busy - sum(gather(own))) / elapsed
        return None if math.isnan(cores) else round(max(0.0, cores), 3)


def _clocks() -> tuple[float, float, float]:
    """Seconds, processor time of this process, and that which this machine has used or its host has taken away."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        busy = math.nan
    return time.monotonic(), time.process_time(), busy


def time_workload(workload: Workload, job: dict[str, Any]) -> dict[str, Any]:
    """Times a workload in this process, or on all ranks together; returns what is recorded, the means over ranks."""
    chosen = gather(plan(workload, job))[0]
    start_together()
    load = Load()
    measured = merge(gather(run(workload, chosen)))
    return {"foreign_cores": load.foreign_cores(), **record(measured, job["keeps_memory"])}
