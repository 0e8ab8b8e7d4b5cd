"""Values of all ranks, and the times of a case over all ranks."""

from typing import Any

import torch
import torch.distributed as dist

from bagua_syncbn.communicators import SharedCommunicator, spec_of

from ..core import disturbance, timing
from ..core.timing import Workload


def gather(value: Any) -> list[Any]:
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def start_together() -> None:
    """Waits for all ranks. A barrier of gloo lets them go some 100 µs apart, shared memory less than one."""
    dist.barrier()
    communicator = spec_of(None).communicator()
    if isinstance(communicator, SharedCommunicator):
        communicator.all_reduce(torch.zeros(1))


def time_on_ranks(workload: Workload, job: dict[str, Any]) -> dict[str, Any]:
    """Times a workload on all ranks together and returns what is recorded of it: the means over the ranks."""
    chosen = gather(timing.plan(workload, job["seconds"], job["least"], job["most"], start_together))[0]
    start_together()
    load = disturbance.Load()
    measured = timing.merge(gather(timing.run(workload, chosen, start_together)))
    foreign_cores = load.foreign_cores(sum(gather(load.own_seconds())))
    return {
        # Rank 0's for all: they must agree on whether it was disturbed.
        "foreign_cores": gather(foreign_cores)[0],
        **timing.record(measured, job["keeps_memory"]),
    }
