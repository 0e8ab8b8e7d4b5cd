"""Measures synchronization and its alternatives on this machine.

    python -m benchmarks                       # everything; writes build/bench/results.json and prints tables
    python -m benchmarks --quick               # rough results in two minutes
    python -m benchmarks --sections layers --ranks 2 --shapes 8x64x56x56
    python -m benchmarks --sections gpu --device cuda
    python -m benchmarks.report FILE...        # tables and charts of recorded results

docs/benchmarks.md describes the measurements. results.json has one line per case, with all samples.
"""

import argparse
import datetime
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import batches, jobs, machine, recorded, report
from .recorded import Case, Results
from .sections import IN_ONE_PROCESS, ON_RANKS, SECTIONS

OUTPUT = recorded.ROOT / "build" / "bench" / "results.json"

# The first shape's step is mostly messages, the second's mostly computation.
QUICK_SHAPES = [(4, 512, 7, 7), (8, 64, 56, 56)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_cpu = [name for name in SECTIONS if name != "gpu"]
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=on_cpu, help="(default: all but gpu)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8], help="(default: 1 2 4 8)")
    parser.add_argument("--shapes", nargs="+", type=batches.parse_shape, metavar="8x64x56x56")
    parser.add_argument("--quick", action="store_true", help="few shapes, few rounds")
    parser.add_argument("--seconds", type=float, help="per case (default: 1.5, --quick: 0.2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of ranks and gpu (default: cpu)")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE.json")
    arguments = parser.parse_args()
    on_ranks = any(name in ON_RANKS for name in arguments.sections)
    if on_ranks and arguments.device == "cuda" and max(arguments.ranks) > torch.cuda.device_count():
        parser.error(
            f"--ranks: expected at most {torch.cuda.device_count()} (one per device), got {max(arguments.ranks)}"
        )
    return arguments


def make_job(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments, with defaults that depend on ``--quick``."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if arguments.quick:
        return {"shapes": QUICK_SHAPES, "seconds": 0.2, "least": 3, "most": 40} | given
    return {"shapes": None, "seconds": 1.5, "least": 7, "most": 40} | given


def measure_all(job: dict[str, Any]) -> Iterator[Case]:
    for name in filter(job["sections"].__contains__, IN_ONE_PROCESS):
        module = IN_ONE_PROCESS[name]
        for case in module.cases(job):
            yield {"section": name} | module.measure(*case, job)
    for world_size in job["ranks"] if any(name in ON_RANKS for name in job["sections"]) else ():
        yield from jobs.launch(world_size, job)


def run(job: dict[str, Any]) -> Results:
    """Measures the sections of a job and prints a line for each case."""
    start = time.monotonic()
    measured = []
    for case in measure_all(job):
        measured.append(case)
        what = [case["section"], *([f"{case['ranks']} ranks"] if "ranks" in case else [])]
        print(f"{time.monotonic() - start:4.0f} s, case {len(measured)}: {', '.join(what)}", file=sys.stderr)
    return {
        "date": datetime.date.today().isoformat(),
        "versions": machine.describe_versions(),
        "machine": machine.describe_machine(),
        "settings": {
            "exchange": machine.describe_exchange(),
            "seconds": job["seconds"],
            "minutes": round((time.monotonic() - start) / 60, 1),
        },
        "cases": measured,
    }


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    measured = run(make_job(arguments))
    recorded.write(measured, arguments.output)
    print(report.report(measured))
    print(f"samples: {arguments.output}\ncharts: python -m benchmarks.report {arguments.output} --charts DIRECTORY")


if __name__ == "__main__":
    machine.keep_memory()
    main()
