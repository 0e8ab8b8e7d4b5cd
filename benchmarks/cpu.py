"""How fast the package is on this processor, as ratios within one run.

    python benchmarks/cpu.py                                       # everything, three minutes if nothing disturbs it
    python benchmarks/cpu.py --quick
    python benchmarks/cpu.py --default-malloc --sections local
    python benchmarks/cpu.py --report benchmarks/results/*.json --into docs/benchmarks.md

docs/benchmarks.md says what is measured and how. Every case has its own line in the file of results.

By default malloc keeps the memory that is freed, as allocators made for training jobs do (jemalloc, tcmalloc; torch's
own on GPUs): a step then finds the memory of the step before. glibc returns large blocks to the system, and every step
pays for mapping its output and gradient again, whoever computes them. ``--default-malloc`` measures that.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ranks
import rounds
import tables
import torch
import workloads
from tqdm import tqdm

import bagua_syncbn
from bagua_syncbn import ops

OUTPUT = Path(__file__).resolve().parent.parent / "build" / "bench" / "cpu.json"

SECTIONS = ("ops", "local", "ranks")

# glibc refuses a threshold above 32 MiB from which blocks are mapped one by one, so that mapping is turned off; freed
# memory at the end of the heap is then kept up to 16 GiB.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**29),
}

# Seconds to wait for others to be done with the processor: in the measurements of one process, and in those of ranks.
PATIENCE = 120.0


def parse_shape(text: str) -> tuple[int, ...]:
    shape = tuple(int(size) for size in text.split("x"))
    if not 2 <= len(shape) <= 5:
        raise ValueError(f"shape: expected 2 to 5 dimensions, got {text}")
    return shape


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=list(workloads.SHAPES), metavar="8x64x56x56")
    parser.add_argument("--quick", action="store_true", help="few rounds, and no second attempt when disturbed")
    parser.add_argument("--seconds", type=float, help="for the rounds of a case (default: 2, --quick: 0.2)")
    parser.add_argument("--default-malloc", action="store_true", help="let malloc return memory to the system")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument(
        "--report", nargs="+", type=Path, metavar="FILE", help="measure nothing; print recorded results"
    )
    parser.add_argument("--into", type=Path, metavar="PAGE", help="with --report, write the tables into this page")
    return parser.parse_args()


def keep_memory() -> None:
    """Starts this program again with a malloc that keeps memory, unless it has been: glibc reads this once."""
    if not all(os.environ.get(name) == value for name, value in KEEP_MEMORY.items()):
        os.execve(sys.executable, sys.orig_argv, os.environ | KEEP_MEMORY)


def read_caches() -> list[tuple[str, int]]:
    """Returns name and size of the caches of the first core, nearest first; nothing where the system does not say."""
    units = {"K": 2**10, "M": 2**20}
    caches = []
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size = ((cache / name).read_text().strip() for name in ("type", "level", "size"))
        if kind != "Instruction":
            caches.append((f"L{level}", int(size[:-1]) * units[size[-1]]))
    return caches


def describe_machine() -> dict[str, Any]:
    caches = read_caches()
    facts = {}
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {
        "processor": facts.get("model name") or platform.processor() or platform.machine(),
        "cores": count_cores(),
        "virtual": "hypervisor" in facts.get("flags", "").split(),
        "caches": [f"{name} {size // 2**10} KiB" for name, size in caches],
        "last_level_cache": caches[-1][1] if caches else None,
        "system": platform.system(),
    }


def describe_versions() -> dict[str, str]:
    versions = {
        "bagua_syncbn": f"{bagua_syncbn.__version__} ({ops.KERNELS})",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if ranks.find_peer() is not None:
        versions["fairscale"] = importlib.metadata.version("fairscale")
    return versions


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(section: str, shape: tuple[int, ...], layout: str, threads: int, job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(threads)
    path = {}
    if section == "ops":
        workload = workloads.make_ops(shape, layout)
    else:
        workload, path["path"] = workloads.make_local(shape, layout)
    chosen = rounds.plan(workload, job["seconds"], job["least"], job["most"], lambda: None)
    load = rounds.Load()
    measured = rounds.run(workload, chosen, lambda: None)
    return {
        "section": section,
        "shape": shape,
        "layout": layout,
        "threads": threads,
        **path,
        "foreign_cores": load.foreign_cores(load.own_seconds()),
        **rounds.record(measured, job["keeps_memory"]),
    }


def measure_all(sections: list[str], job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    patience = rounds.Patience(job["patience"])
    for section in ("ops", "local"):
        for shape, layout, threads in cases(job["shapes"], thread_counts(1)) if section in sections else ():
            attempt = partial(measure, section, shape, layout, threads, job)
            yield rounds.quietest(attempt, job["attempts"], patience.wait)
    if "ranks" in sections:
        # More rounds, since how long the ranks wait for each other varies more than how long they compute.
        more = {"seconds": 1.5 * job["seconds"], "most": 2 * job["most"]}
        yield from ranks.launch(job | more | {"threads": thread_counts(ranks.WORLD_SIZE)})


def cases(shapes: list[tuple[int, ...]], threads: list[int]) -> list[tuple[tuple[int, ...], str, int]]:
    return [(shape, layout, count) for shape in shapes for layout in workloads.layouts(shape) for count in threads]


def thread_counts(processes: int) -> list[int]:
    """One, and as many as there are cores for each of so many processes."""
    return sorted({1, max(1, count_cores() // processes)})


def make_job(arguments: argparse.Namespace) -> dict[str, Any]:
    quick = arguments.quick
    return {
        "shapes": arguments.shapes,
        "keeps_memory": not arguments.default_malloc,
        "seconds": arguments.seconds if arguments.seconds is not None else 0.2 if quick else 2.0,
        "least": 3 if quick else 11,
        "most": 40,
        "attempts": 1 if quick else 4,
        "patience": PATIENCE,
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures what the arguments ask for, under a progress bar."""
    start = time.monotonic()
    job = make_job(arguments)
    counts = {"ops": 1, "local": 1, "ranks": ranks.WORLD_SIZE}
    total = sum(len(cases(arguments.shapes, thread_counts(counts[section]))) for section in arguments.sections)
    measured = []
    with tqdm(total=total, unit="case") as bar:
        for case in measure_all(arguments.sections, job):
            measured.append(case)
            bar.set_description(f"{case['section']} {'x'.join(map(str, case['shape']))}")
            bar.update()
    return {
        "date": datetime.date.today().isoformat(),
        "versions": describe_versions(),
        "machine": describe_machine(),
        "settings": {
            "keeps_memory": job["keeps_memory"],
            "seconds": job["seconds"],
            "minutes": round((time.monotonic() - start) / 60, 1),
        },
        "cases": measured,
    }


def write(results: dict[str, Any], path: Path) -> None:
    """Writes the results with one case to a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {name: value for name, value in results.items() if name != "cases"}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in results["cases"])
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "cases": [\n{lines}\n]}}\n', encoding="utf-8")


def show(files: list[Path], page: Path | None) -> None:
    results = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    if page is not None:
        page.write_text(tables.update_page(page.read_text(encoding="utf-8"), results), encoding="utf-8")
        return
    for name, recorded in results.items():
        print(f"# {name}\n\n{tables.report(recorded)}")


def main() -> None:
    arguments = parse_arguments()
    if arguments.report:
        show(arguments.report, arguments.into)
        return
    if not arguments.default_malloc:
        keep_memory()
    torch.manual_seed(0)
    results = run(arguments)
    write(results, arguments.output)
    print(tables.report(results))
    print(f"samples: {arguments.output}")


if __name__ == "__main__":
    main()
