"""Section exchange: one message between the ranks of a host, through shared memory and by the group's collectives."""

from typing import Any

import torch
import torch.distributed as dist

from bagua_syncbn.communicators import SharedCommunicator, TorchCommunicator, communicator_of

from ..core.timing import Workload
from ..peers import Maker
from .gathering import time_on_ranks

# Bytes of each rank: of a few channels, of some 500, and as large as shared memory carries.
SIZES = (256, 4096, 65536)


def cases(job: dict[str, Any], world_size: int) -> list[tuple[int]]:
    return [(size,) for size in SIZES] if world_size > 1 and job["device"] == "cpu" else []


def measure(size: int, job: dict[str, Any], makers: dict[str, Maker], device: torch.device) -> dict[str, Any]:
    torch.set_num_threads(1)
    group = dist.new_group()
    communicators = {"collectives": TorchCommunicator(group)}
    shared = communicator_of(group)
    if isinstance(shared, SharedCommunicator):
        communicators["shared memory"] = shared
    packed = torch.zeros(size // 4)
    workload: Workload = {}
    for name, communicator in communicators.items():
        workload[f"gather, {name}"] = lambda communicator=communicator: communicator.all_gather(packed)  # type: ignore[misc]
        workload[f"sum, {name}"] = lambda communicator=communicator: communicator.all_reduce(packed)  # type: ignore[misc]
    case = {"section": "exchange", "ranks": dist.get_world_size(), "device": device.type, "bytes": size}
    return case | time_on_ranks(workload, job)
