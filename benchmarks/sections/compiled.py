"""Section compiled: a residual block on ranks, eager and compiled, synchronized and unsynchronized."""

from typing import Any

import torch

from bagua_syncbn._groups import spec_of

from ..batches import Shape, make_batch
from ..peers import Maker
from ..recorded import Case, Results, marked, of_section, shape_of, table
from ..timing import Workload, time_workload
from .layers import step_of
from .training import Block

SHAPES: tuple[Shape, ...] = ((8, 64, 56, 56),)


def cases(job: dict[str, Any], world_size: int) -> list[tuple[Shape]]:
    return [(shape,) for shape in job["shapes"] or SHAPES if len(shape) == 4]


def measure(shape: Shape, job: dict[str, Any], makers: dict[str, Maker], device: torch.device) -> Case:
    torch.set_num_threads(1)
    channels = shape[1]
    x, grad_output = (make_batch(shape, "planar").to(device) for _ in range(2))
    workload: Workload = {}
    for name in ("ours", "local"):
        block = Block(makers[name], channels, channels, 1).to(device)
        workload[name] = step_of(block, x.requires_grad_(), grad_output)
        workload[f"{name}, compiled"] = step_of(torch.compile(block, fullgraph=True), x, grad_output)
    communicator = spec_of(None).communicator()
    packed, sums = torch.zeros(2 * channels + 2, device=device), torch.zeros(2 * channels, device=device)

    def exchange() -> None:
        for _ in range(2):  # layers in the block
            communicator.all_gather(packed)
            communicator.all_reduce(sums)

    workload["collectives"] = exchange
    return {"shape": shape, **time_workload(workload, job)}


def compiled_table(results: Results) -> str:
    """A residual block: our minimum step time, divided by the unsynchronized block's plus the messages'."""

    def row(case: Case) -> list[str]:
        least = {name: min(samples) for name, samples in case["microseconds"].items()}
        shown = [
            f"{least[f'ours{kind}'] / (least[f'local{kind}'] + least['collectives']):.2f}"
            for kind in ("", ", compiled")
        ]
        return [marked(case["ranks"], results), shape_of(case), *shown]

    header = ["ranks", "input of each", "ours / (local + messages)", "compiled"]
    return table(header, map(row, of_section(results, "compiled")))


TABLES = {"compiled": compiled_table}
