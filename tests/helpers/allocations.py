"""Requests to torch's allocator, as its own profiler reports them. Memory that bypasses it is not seen."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.autograd.profiler import profile, record_function

_MARK = "bagua_syncbn_tests::second"


class Allocations(NamedTuple):
    peak: int  # bytes beyond what was allocated before, at most
    sizes: tuple[list[int], list[int]]  # bytes of each allocation, in the first and the second function


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Some builds of torch report there, past Python, that profiling starts and stops."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def record_allocations(
    first: Callable[[], object], second: Callable[[object], object], device: torch.device
) -> Allocations:
    """Runs ``second`` on the result of ``first``, and records what both allocate on ``device``."""
    with _without_stderr(), profile(profile_memory=True, use_device="cuda" if device.type == "cuda" else None) as prof:
        result = first()
        with record_function(_MARK):
            kept = second(result)
        del result, kept
    events = sorted(prof.kineto_results.events(), key=lambda event: event.start_ns())
    border = next(event.start_ns() for event in events if event.name() == _MARK)
    sizes: tuple[list[int], list[int]] = ([], [])
    allocated = peak = 0
    for event in events:
        if event.name() != "[memory]" or event.device_type().name.lower() != device.type:
            continue
        allocated += event.nbytes()
        peak = max(peak, allocated)
        if event.nbytes() > 0:
            sizes[event.start_ns() >= border].append(event.nbytes())
    return Allocations(peak, sizes)
