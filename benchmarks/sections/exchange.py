"""Section exchange: a message between ranks on a host, through shared memory and through collectives."""

from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bagua_syncbn._groups import spec_of
from bagua_syncbn.communicators import TorchCommunicator
from bagua_syncbn.communicators.shared import SharedCommunicator

from ..peers import Maker
from ..recorded import Case, Results, marked, of_section, table
from ..timing import Workload, time_workload

# Bytes per rank: a few channels, about 500 channels, and the limit of shared memory.
SIZES = (256, 4096, 65536)
_WAYS = "shared memory", "collectives"


def cases(job: dict[str, Any], world_size: int) -> list[tuple[int]]:
    return [(size,) for size in SIZES] if world_size > 1 and job["device"] == "cpu" else []


def measure(size: int, job: dict[str, Any], makers: dict[str, Maker], device: torch.device) -> Case:
    torch.set_num_threads(1)
    group = dist.new_group()
    communicators = {"collectives": TorchCommunicator(group)}
    shared = spec_of(group).communicator()
    if isinstance(shared, SharedCommunicator):
        communicators["shared memory"] = shared
    packed = torch.zeros(size // 4)
    workload: Workload = {}
    for name, communicator in communicators.items():
        workload[f"gather, {name}"] = lambda communicator=communicator: communicator.all_gather(packed)  # type: ignore[misc]
        workload[f"sum, {name}"] = lambda communicator=communicator: communicator.all_reduce(packed)  # type: ignore[misc]
    return {"bytes": size, **time_workload(workload, job)}


def exchange_table(results: Results) -> str:
    """A message per rank: median (minimum) microseconds."""

    def cell(case: Case, name: str) -> str:
        times = case["microseconds"].get(name)
        return f"{median(times):,.1f} ({min(times):,.1f})" if times else ""

    def row(case: Case) -> list[str]:
        return [marked(case["ranks"], results), f"{case['bytes']:,}", *(cell(case, name) for name in names)]

    names = [f"{kind}, {way}" for kind in ("gather", "sum") for way in _WAYS]
    return table(["ranks", "bytes of each", *names], map(row, of_section(results, "exchange")))


def messages_line(results: Results) -> str:
    """Messages over two ranks, from the fastest to the slowest size."""
    cases = [case for case in of_section(results, "exchange") if case["ranks"] == 2]

    def span(kind: str, way: str) -> str:
        times = [median(measured) for case in cases if (measured := case["microseconds"].get(f"{kind}, {way}"))]
        return f"{min(times):,.0f} to {max(times):,.0f} µs to {kind}" if times else "not measured"

    ways = ", ".join(f"{span('gather', way)} and {span('sum', way)} through {way}" for way in _WAYS)
    return f"A message of {SIZES[0]} to {SIZES[-1]:,} bytes over two ranks took {ways} (medians)."


TABLES = {"exchange": exchange_table, "messages": messages_line}
