"""How long calls take on a CUDA device, the host's work hidden or not; what is timed takes turns, see core/timing."""

import time
from collections.abc import Callable
from typing import Any

import torch

from ..core import timing
from ..core.timing import Function, Workload

_LEAST, _MOST = 3, 11
_MOST_HEAD_START = 5e-2


class DeviceTimer:
    """CUDA events around the calls, on the current stream.

    Args:
        runs_ahead: let the device idle first for as long as the host needs to queue the calls, so that only the device
            is timed. Not for functions that wait for the device.

    Attributes:
        behind: the functions in which the device waited for the host all the same.
    """

    def __init__(self, runs_ahead: bool) -> None:
        self.behind: set[Function] = set()
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Torch's kernel that waits for a number of cycles has no public name: it may be gone.
        self._sleeps = runs_ahead and hasattr(torch.cuda, "_sleep")
        self._runs_ahead = runs_ahead
        self._cycles = self._calibrate() if self._sleeps else 0.0
        self._host: dict[Function, float] = {}  # seconds of one call

    def _calibrate(self) -> float:
        """Returns cycles in a second."""
        for _ in range(2):  # the first loads the kernel
            self._begin.record()
            torch.cuda._sleep(10_000_000)
            self._end.record()
            self._end.synchronize()
        return 1e10 / self._begin.elapsed_time(self._end)

    def __call__(self, function: Function, calls: int) -> float:
        if self._sleeps and function in self._host:
            seconds = min(2 * calls * self._host[function] + 5e-5, _MOST_HEAD_START)
            torch.cuda._sleep(int(seconds * self._cycles))
        self._begin.record()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        host = (time.perf_counter() - start) / calls
        ahead = not self._begin.query()  # not by the clock: cycles change their length
        self._end.record()
        self._end.synchronize()
        (self.behind.discard if ahead else self.behind.add)(function)
        # What a first call loads is not the host's work in the next; one that was behind needs more of a head start.
        self._host[function] = min(host, self._host.get(function, host)) if ahead else host
        return self._begin.elapsed_time(self._end) * 1e-3 / calls


def measure(
    functions: Workload, device: torch.device, runs_ahead: bool, seconds: float
) -> tuple[dict[str, list[float]], list[str]]:
    """Samples the functions in turn for about so many seconds; on a CPU, for dry runs, by the host's clock.

    Returns:
        microseconds of a call by function, and the functions in which the device waited for the host all the same.
    """
    on_device = DeviceTimer(runs_ahead) if device.type == "cuda" else None
    timer: Callable[[Function, int], float] = on_device or timing.time_on_host
    wait: Callable[[], Any] = torch.cuda.synchronize if on_device else timing.no_wait
    chosen = timing.plan(functions, seconds, _LEAST, _MOST, wait, timer)
    samples = timing.record(timing.run(functions, chosen, wait, timer), False)["microseconds"]
    behind = [name for name, call in functions.items() if on_device and runs_ahead and call in on_device.behind]
    return samples, behind
