"""How much other programs used the processor while something was measured."""

import os
import time
from pathlib import Path

# A case is disturbed when other processes, or other machines on the same host, used more than this many cores.
QUIET_CORES = 0.15


class Load:
    """Measures how many cores other programs use, from its creation on."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.monotonic(), _busy_seconds(), time.process_time()

    def own_seconds(self) -> float:
        return time.process_time() - self._own

    def foreign_cores(self, own_seconds: float) -> float | None:
        """Returns the mean number of cores in use, less those of the processes that used ``own_seconds``."""
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
