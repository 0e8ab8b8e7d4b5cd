"""Timing in rounds: every function of a workload in turn, so that what disturbs one disturbs all alike."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .disturbance import Load

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

Function = Callable[[], object]
Workload = dict[str, Function]
# Returns the seconds of one of so many calls.
Timer = Callable[[Function, int], float]

# A sample is made of as many calls as take this long, so that the clock and the loop weigh little.
_SAMPLE_SECONDS = 2e-4
_MAX_CALLS = 50

# More page faults than this in a round, and a part of its time went into mapping memory. The interpreter has one or two
# now and then.
_FAULTS = 2


class Round(NamedTuple):
    seconds: dict[str, float]  # for one call
    faults: int


class Plan(NamedTuple):
    """How often to run a workload; the ranks of a job must agree on it."""

    calls: dict[str, int]  # in one sample
    rounds: int


def no_wait() -> None:
    pass


def time_on_host(function: Function, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


def run_round(
    workload: Workload,
    names: list[str],
    calls: dict[str, int],
    wait: Callable[[], object] = no_wait,
    timer: Timer = time_on_host,
) -> Round:
    """Times each function once, as ``name`` in the round.

    One that has ``take_parts`` times parts of its calls itself, and returns their sums there: ``name part``.
    """
    seconds: dict[str, float] = {}
    faults = 0
    for name in names:
        function, count = workload[name], calls.get(name, 1)
        take_parts = getattr(function, "take_parts", dict)
        take_parts()
        wait()
        faults -= page_faults()
        seconds[name] = timer(function, count)
        faults += page_faults()
        seconds |= {f"{name} {part}": total / count for part, total in take_parts().items()}
    return Round(seconds, faults)


def plan(
    workload: Workload,
    budget: float,
    least: int,
    most: int,
    wait: Callable[[], object] = no_wait,
    timer: Timer = time_on_host,
) -> Plan:
    """Warms up and plans rounds that take about ``budget`` seconds together, at least and at most so many."""
    names = list(workload)
    for _ in range(2):
        run_round(workload, names, {}, wait, timer)
    seconds = run_round(workload, names, {}, wait, timer).seconds
    calls = {name: max(1, min(_MAX_CALLS, int(_SAMPLE_SECONDS / max(seconds[name], 1e-7)))) for name in names}
    expected = sum(calls[name] * seconds[name] for name in names)
    return Plan(calls, max(least, min(most, int(budget / expected))))


def run(
    workload: Workload, chosen: Plan, wait: Callable[[], object] = no_wait, timer: Timer = time_on_host
) -> list[Round]:
    """Runs the rounds, every other one backwards: no function always finds the cache as one other leaves it."""
    names = list(workload)
    for order in (names, names[::-1]):
        run_round(workload, order, chosen.calls, wait, timer)
    return [run_round(workload, names[:: (-1) ** i], chosen.calls, wait, timer) for i in range(chosen.rounds)]


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


def time_alone(workload: Workload, job: dict[str, Any]) -> dict[str, Any]:
    """Times a workload in this process and returns what is recorded of it."""
    chosen = plan(workload, job["seconds"], job["least"], job["most"])
    load = Load()
    measured = run(workload, chosen)
    return {"foreign_cores": load.foreign_cores(load.own_seconds()), **record(measured, job["keeps_memory"])}
