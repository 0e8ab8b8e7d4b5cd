"""A Bagua job started by Bagua's launcher and by torch's."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("launched.py")


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("launcher", ["bagua.distributed.launch", "torch.distributed.run"])
def test_a_bagua_job_by_the_launchers_variables(launcher, tmp_path):
    """On two ranks, without a GPU and with the library that Bagua's is linked against."""
    import nvidia.nccl

    options = ["--nproc_per_node=2", f"--master_port={free_port()}"]
    if launcher == "bagua.distributed.launch":
        options.append(f"--bagua_service_port={free_port()}")
    nccl = str(Path(next(iter(nvidia.nccl.__path__))) / "lib")
    variables = {"LD_LIBRARY_PATH": nccl, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(sys.path)  # of all packages "tests", ours first
    command = [sys.executable, "-m", launcher, *options, str(PROGRAM), str(tmp_path)]
    finished = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}") for rank in range(2))
    assert first["1.num_batches_tracked"] == 3
    for name in first:
        assert torch.equal(first[name], second[name]), name
