"""Starts the ranks of a job on this machine; each runs ``benchmarks.ranks.rank``."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from ..core.records import ROOT


def launch(world_size: int, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs the job's sections on so many ranks and yields the cases as they are measured."""
    with tempfile.TemporaryDirectory(prefix="bagua_syncbn_bench_") as directory:
        command = [sys.executable, "-m", "benchmarks.ranks.rank", "--store", f"{directory}/store"]
        command += ["--world-size", str(world_size), "--job", json.dumps(job), "--rank"]
        output = [subprocess.PIPE, *[subprocess.DEVNULL] * (world_size - 1)]
        # The ranks import this package from here, wherever they are started.
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        processes = [
            subprocess.Popen(
                [*command, str(rank)],
                stdout=stdout,
                text=True,
                env=os.environ | {"PYTHONPATH": paths},
            )
            for rank, stdout in enumerate(output)
        ]
        try:
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                yield json.loads(line)
            statuses = [process.wait(timeout=60) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(statuses):
            sys.exit(f"ranks: expected exit status 0 of all, got {statuses}")
