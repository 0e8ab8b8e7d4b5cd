"""Timing in rounds: every function of a workload in turn, so that what disturbs one disturbs the others alike."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# A sample is made of as many calls as take this long, so that the clock and the loop weigh little.
_SAMPLE_SECONDS = 2e-4
_MAX_CALLS = 50

# More page faults than this in a round, and a part of its time went into mapping memory. The interpreter has one or two
# now and then.
_FAULTS = 2

# A case is disturbed when other processes, or other machines on the same host, used more than this many cores.
QUIET_CORES = 0.15


class Round(NamedTuple):
    seconds: dict[str, float]  # of one call
    faults: int


class Plan(NamedTuple):
    """How often to run a workload; the ranks of a job must agree on it."""

    calls: dict[str, int]  # in one sample
    rounds: int


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


def run_round(workload: dict[str, Callable[[], object]], names: list[str], calls: dict[str, int], sync: Any) -> Round:
    """Times each function once, as ``name`` in the round.

    One that has ``take_parts`` times parts of its calls itself, and returns their sums there: ``name part``.
    """
    seconds: dict[str, float] = {}
    faults = 0
    for name in names:
        function, count = workload[name], calls.get(name, 1)
        take_parts = getattr(function, "take_parts", dict)
        take_parts()
        sync()
        faults -= page_faults()
        start = time.perf_counter()
        for _ in range(count):
            function()
        seconds[name] = (time.perf_counter() - start) / count
        faults += page_faults()
        seconds |= {f"{name} {part}": total / count for part, total in take_parts().items()}
    return Round(seconds, faults)


def plan(workload: dict[str, Callable[[], object]], budget: float, least: int, most: int, sync: Any) -> Plan:
    """Warms up and plans rounds that take about ``budget`` seconds together, at least and at most so many."""
    names = list(workload)
    for _ in range(2):
        run_round(workload, names, {}, sync)
    seconds = run_round(workload, names, {}, sync).seconds
    calls = {name: max(1, min(_MAX_CALLS, int(_SAMPLE_SECONDS / seconds[name]))) for name in names}
    expected = sum(calls[name] * seconds[name] for name in names)
    return Plan(calls, max(least, min(most, int(budget / expected))))


def run(workload: dict[str, Callable[[], object]], chosen: Plan, sync: Any) -> list[Round]:
    """Runs the rounds, every other one backwards: no function always finds the cache as one other leaves it."""
    names = list(workload)
    for order in (names, names[::-1]):
        run_round(workload, order, chosen.calls, sync)
    return [run_round(workload, names[:: (-1) ** i], chosen.calls, sync) for i in range(chosen.rounds)]


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
        "microseconds": {name: [_digits(r.seconds[name] * 1e6) for r in kept] for name in kept[0].seconds},
        "faults": sorted(r.faults for r in kept)[len(kept) // 2],
        "dropped": len(rounds) - len(kept),
    }


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


class Load:
    """Measures how many cores others use, from its creation on."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.monotonic(), _busy_seconds(), time.process_time()

    def own_seconds(self) -> float:
        return time.process_time() - self._own

    def foreign_cores(self, own_seconds: float) -> float | None:
        """Returns the mean number of cores used by others than the processes that used ``own_seconds``."""
        if self._busy is None:
            return None
        busy = (_busy_seconds() or 0.0) - self._busy
        elapsed = time.monotonic() - self._start
        return round(max(0.0, busy - own_seconds) / elapsed, 3)


def _busy_seconds() -> float | None:
    """Processor time that this machine has used or that its host took away; None where the system does not say."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Patience:
    """Seconds that a run may spend waiting for others to be done with the processor, in all and at a time."""

    def __init__(self, seconds: float, at_a_time: float = 30.0) -> None:
        self._left, self._at_a_time = seconds, at_a_time

    def wait(self) -> bool:
        """Waits until others use hardly a core; returns whether it is worth measuring again."""
        if self._left <= 0:
            return False
        start = time.monotonic()
        quiet = False
        while not quiet and time.monotonic() - start < min(self._left, self._at_a_time):
            load = Load()
            time.sleep(0.5)
            quiet = (load.foreign_cores(load.own_seconds()) or 0.0) <= QUIET_CORES
        self._left -= time.monotonic() - start
        return True


def quietest(measure: Callable[[], dict[str, Any]], attempts: int, wait: Callable[[], bool]) -> dict[str, Any]:
    """Measures until an attempt was not disturbed, and returns the least disturbed one."""
    best = measure()
    for _ in range(attempts - 1):
        if best["foreign_cores"] is None or best["foreign_cores"] <= QUIET_CORES or not wait():
            break
        best = min(best, measure(), key=lambda result: result["foreign_cores"])
    return best
