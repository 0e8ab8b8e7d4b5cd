"""Measures the ops and whole layers on a device; writes one line of JSON for each case as soon as it is measured.

    python -m benchmarks.gpu.measure --output cases.jsonl
    python -m benchmarks.gpu.measure --device cpu --dry-run --output cases.jsonl    # the program, not the kernels

What raises is recorded with its case and does not end the run; what does not fit the time is counted at the end.
"""

import argparse
import faulthandler
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache as cache_result
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from . import shapes
from .inputs import Pool
from .layer_cases import EXTRA_KINDS, count_layer, measure_layer
from .one_rank import OneRankGroup
from .op_cases import measure_copy, measure_ops

Work = tuple[str, Callable[[], dict[str, Any]]]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="a few tiny inputs")
    parser.add_argument("--seconds", type=float, default=150.0, help="for all of it; the rest is left out")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


def join_alone(device: torch.device, store: str) -> OneRankGroup:
    """Initializes a job of one rank, which needs no network."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    options = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=0, world_size=1, timeout=timedelta(seconds=60), **options
    )
    return OneRankGroup()


def plan(networks: dict[str, Any], device: torch.device, store: str, seconds: float) -> Iterator[Work]:
    """What is to be measured, the most telling first."""
    cases = list(shapes.cases(networks))
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 2**16
    largest = max(case.size for case in cases)
    pool = Pool(device, cache, largest)
    network = cases[0].network  # of which layers with an activation and with a mask are measured too
    each = seconds / (2 * len(cases) + len(EXTRA_KINDS) * sum(case.network == network for case in cases))
    yield "copy", partial(measure_copy, device, max(8 * cache, largest), seconds / 50)
    # Made by the first case that needs it: a failure is then that case's, and the ops are measured still.
    alone = cache_result(partial(join_alone, device, store))
    for case in cases[:2] + cases[-2:]:
        yield f"counts {case}", lambda case=case: count_layer(case, pool, alone())  # type: ignore[misc]
    for case in cases:
        yield f"ops {case}", partial(measure_ops, case, pool, each)
        for kind in ("layer", *(EXTRA_KINDS if case.network == network else ())):
            yield f"{kind} {case}", lambda case=case, kind=kind: measure_layer(case, pool, alone(), each, kind)  # type: ignore[misc]


def run(works: Iterator[Work], deadline: float, output: TextIO) -> int:
    """Does the work until the deadline; returns how many cases raised."""
    left = errors = 0
    for what, work in works:
        if time.monotonic() > deadline:
            left += 1
            continue
        try:
            result = work()
        except Exception as error:
            traceback.print_exc()
            errors += 1
            line = next(iter(str(error).splitlines()), "")
            result = {"kind": "error", "what": what, "error": f"{type(error).__name__}: {line}"}
            if "CUDA error" in str(error):  # the context is lost, and each further call would say the same
                deadline = 0.0
        output.write(json.dumps(result) + "\n")
        output.flush()
    output.write(json.dumps({"kind": "end", "left_out": left, "errors": errors}) + "\n")
    return errors


def main() -> None:
    arguments = parse_arguments()
    faulthandler.register(signal.SIGTERM, chain=True)  # one who ends this from outside wants to know where it was
    deadline = time.monotonic() + arguments.seconds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    networks = shapes.TINY if arguments.dry_run else shapes.NETWORKS
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, arguments.output.open("w", encoding="utf-8") as output:
        works = plan(networks, device, f"{directory}/store", 0.8 * arguments.seconds)
        errors = run(works, deadline, output)
    # Without ending the job in order: all that counts is written, and destroying a communicator can hang.
    os._exit(min(errors, 1))


if __name__ == "__main__":
    main()
