"""One rank of a job of the benchmarks; ``jobs.launch`` starts them. Rank 0 prints one line of JSON a case."""

import argparse
import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import peers
from . import compiled, exchange, layers, training

SECTIONS: dict[str, Any] = {"exchange": exchange, "layers": layers, "compiled": compiled, "training": training}


def choose_device(kind: str, rank: int) -> torch.device:
    if kind != "cuda":
        return torch.device(kind)
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--job", type=json.loads, required=True)
    arguments = parser.parse_args()
    job: dict[str, Any] = arguments.job
    warnings.filterwarnings("ignore", module="fairscale", category=UserWarning)
    device = choose_device(job["device"], arguments.rank)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{arguments.store}",
        rank=arguments.rank,
        world_size=arguments.world_size,
        timeout=timedelta(minutes=5),
    )
    torch.manual_seed(arguments.rank)

    def tell(case: dict[str, Any]) -> None:
        if arguments.rank == 0:
            print(json.dumps(case), flush=True)

    makers, skipped = peers.find(device)
    tell({"section": "peers", "ranks": arguments.world_size, "measured": list(makers), "skipped": skipped})
    for section, module in SECTIONS.items():
        for case in module.cases(job, arguments.world_size) if section in job["sections"] else ():
            tell(module.measure(*case, job, makers, device))
    # Without ending the job in order: with fairscale's layer in it, a rank now and then aborted while doing that. All
    # results are out.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
