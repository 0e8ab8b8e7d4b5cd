"""How much others used the processor while something was measured, and measuring again when it was too much."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A case is disturbed when other processes, or other machines on the same host, used more than this many cores.
QUIET_CORES = 0.15


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
