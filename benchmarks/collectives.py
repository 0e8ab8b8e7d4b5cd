"""Section collectives: the two messages of a step on their own, over their size. The model of scale is fitted to it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bagua_syncbn.communicators import resolve_communicator

from . import machine, rounds, workloads
from .gathering import time_on_ranks
from .peers import Maker

# The messages of so many channels: 2C + 2 floats of each rank forward, 2C backward.
CHANNELS = (16, 64, 256, 1024, 4096, 16384)


def channels_of(job: dict[str, Any], world_size: int) -> tuple[int, ...]:
    """What is measured: nothing where there is nobody to talk to, and less for a first impression."""
    if world_size == 1 or (job["quick"] and world_size > machine.count_cores()):
        return ()
    return CHANNELS[1::2] if job["quick"] else CHANNELS


def measure(channels: int, job: dict[str, Any], device: torch.device) -> dict[str, Any]:
    torch.set_num_threads(1)
    workload = workloads.make_collectives(channels, resolve_communicator(None), device)
    return {
        "section": "collectives",
        "ranks": dist.get_world_size(),
        "device": device.type,
        "channels": channels,
        **time_on_ranks(workload, job | {"seconds": job["seconds"] / 2, "least": 2 * job["least"]}),
    }


def measure_all(
    job: dict[str, Any], makers: dict[str, Maker], device: torch.device, wait: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    for channels in channels_of(job, dist.get_world_size()):
        yield rounds.quietest(partial(measure, channels, job, device), job["attempts"], wait)
