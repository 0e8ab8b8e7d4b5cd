"""How long functions take on a device: the clock, and rounds in which functions take turns."""

import time
from collections.abc import Callable
from typing import Protocol

import torch

Function = Callable[[], object]

# A sample is made of as many calls as take this long, so that what an event costs weighs little.
_SAMPLE_SECONDS = 3e-4
_MAX_CALLS = 20
_SAMPLES = 11
_MIN_SAMPLES = 3


class Clock(Protocol):
    """Times a number of calls."""

    def time(self, function: Function, calls: int, head_start: float) -> tuple[float, bool]:
        """Returns seconds of one call, and whether the device never waited for the host.

        The device idles for ``head_start`` seconds first, while the host runs ahead.
        """

    def wait(self) -> None:
        """Until the device has done all its work."""


class CudaClock:
    """CUDA events around the calls, on the current stream."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cycles_per_second = self._calibrate()

    def _calibrate(self) -> float | None:
        """Torch's kernel that waits for a number of cycles has no public name: None if it is not there any more."""
        if not hasattr(torch.cuda, "_sleep"):
            return None
        cycles = 10_000_000
        for _ in range(2):  # the first loads the kernel
            self._begin.record()
            torch.cuda._sleep(cycles)
            self._end.record()
            self._end.synchronize()
        return cycles / (self._begin.elapsed_time(self._end) * 1e-3)

    def time(self, function: Function, calls: int, head_start: float) -> tuple[float, bool]:
        if self._cycles_per_second is None:
            head_start = 0.0
        elif head_start > 0:
            torch.cuda._sleep(int(head_start * self._cycles_per_second))
        self._begin.record()
        for _ in range(calls):
            function()
        idle = not self._begin.query()  # still, with all calls behind it; not by the clock: cycles change their length
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e-3 / calls, idle

    def wait(self) -> None:
        torch.cuda.synchronize()


class HostClock:
    """For dry runs on a CPU, where calls are done when they return."""

    def time(self, function: Function, calls: int, head_start: float) -> tuple[float, bool]:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls, True

    def wait(self) -> None:
        pass


class Plan:
    """How to sample one function: calls in a sample, and seconds of head start."""

    def __init__(self, clock: Clock, function: Function, runs_ahead: bool) -> None:
        for _ in range(2):  # loads kernels, fills the allocator's pools, warms the interpreter
            function()
        clock.wait()
        start = time.perf_counter()
        function()
        host = time.perf_counter() - start
        clock.wait()
        seconds, _ = clock.time(function, 2, 0.0)
        self.seconds = max(seconds, 1e-7)
        self.calls = max(1, min(_MAX_CALLS, round(_SAMPLE_SECONDS / self.seconds)))
        self.head_start = min(2 * self.calls * host + 5e-5, 2e-2) if runs_ahead else 0.0
        self.ahead = True  # of all samples

    @property
    def sample_seconds(self) -> float:
        return self.calls * self.seconds + self.head_start

    def sample(self, clock: Clock, function: Function) -> float:
        seconds, ahead = clock.time(function, self.calls, self.head_start)
        if not ahead and self.head_start:  # once more, with more
            self.head_start = min(3 * self.head_start, 5e-2)
            seconds, ahead = clock.time(function, self.calls, self.head_start)
        self.ahead &= ahead
        return seconds


def measure(
    clock: Clock, functions: dict[str, Function], runs_ahead: bool, seconds: float
) -> tuple[dict[str, list[float]], list[str]]:
    """Samples the functions in turn, so that what disturbs one disturbs the others alike.

    Args:
        runs_ahead: whether to measure the device alone, the host's work hidden behind a head start. Not for functions
            that wait for the device.
        seconds: to spend, about.

    Returns:
        microseconds of a call by function, and the functions in which the device waited for the host all the same.
    """
    plans = {name: Plan(clock, function, runs_ahead) for name, function in functions.items()}
    rounds = int(seconds / sum(plan.sample_seconds for plan in plans.values()))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(max(_MIN_SAMPLES, min(_SAMPLES, rounds))):
        for name, plan in plans.items():
            samples[name].append(round(plan.sample(clock, functions[name]) * 1e6, 3))
    behind = [name for name, plan in plans.items() if runs_ahead and not plan.ahead]
    return samples, behind
