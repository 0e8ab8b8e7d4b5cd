"""Starts the ranks of a job on this machine; each runs ``benchmarks.ranks.rank``."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from ..core.records import ROOT


def make_environment(world_size: int) -> dict[str, str]:
    """What a launcher sets for all ranks alike; Bagua reads it."""
    ports = []
    with socket.socket() as first, socket.socket() as second:
        for sock in (first, second):
            sock.bind(("127.0.0.1", 0))
            ports.append(str(sock.getsockname()[1]))
    size = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "NODE_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[0], "BAGUA_SERVICE_PORT": ports[1]}
    # The ranks import this package from here, wherever they are started.
    return size | address | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def launch(world_size: int, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs the job's sections on so many ranks and yields the cases as they are measured."""
    with tempfile.TemporaryDirectory(prefix="bagua_syncbn_bench_") as directory:
        command = [sys.executable, "-m", "benchmarks.ranks.rank", "--store", f"{directory}/store"]
        command += ["--world-size", str(world_size), "--job", json.dumps(job), "--rank"]
        output = [subprocess.PIPE, *[subprocess.DEVNULL] * (world_size - 1)]
        shared = make_environment(world_size)
        processes = [
            subprocess.Popen(
                [*command, str(rank)],
                stdout=stdout,
                text=True,
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
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
