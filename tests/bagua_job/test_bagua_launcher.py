"""Bagua's launcher and torch's, with the example unchanged."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def launch(launcher, *command, **environment):
    """Runs a command on two ranks, without a GPU and with the library that Bagua's is linked against."""
    import nvidia.nccl

    nccl = Path(next(iter(nvidia.nccl.__path__))) / "lib"
    options = ["--nproc_per_node=2", f"--master_port={free_port()}"]
    if launcher == "bagua.distributed.launch":
        options.append(f"--bagua_service_port={free_port()}")
    variables = {"LD_LIBRARY_PATH": str(nccl), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
    finished = subprocess.run(
        [sys.executable, "-m", launcher, *options, *map(str, command)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.fixture(scope="module")
def losses_of_one_process(tmp_path_factory):
    output = tmp_path_factory.mktemp("digits") / "one.json"
    command = [sys.executable, ROOT / "examples" / "train_digits.py", "--steps", "8", "--dtype", "float64"]
    subprocess.run([*command, "--output", output], check=True, capture_output=True, timeout=300)
    return json.loads(output.read_text())["losses"]


def test_the_example(losses_of_one_process, tmp_path):
    output = tmp_path / "ranks.json"
    script = ROOT / "examples" / "train_digits.py"
    launch("bagua.distributed.launch", script, "--steps", 8, "--dtype", "float64", "--output", output)
    assert json.loads(output.read_text())["losses"] == pytest.approx(losses_of_one_process, rel=1e-9)


@pytest.mark.parametrize("launcher", ["bagua.distributed.launch", "torch.distributed.run"])
def test_a_bagua_job_by_the_launchers_variables(launcher, tmp_path):
    paths = os.pathsep.join([str(TESTS / "helpers"), os.environ.get("PYTHONPATH", "")])
    launch(launcher, TESTS / "bagua_job" / "launched.py", tmp_path, PYTHONPATH=paths)
    first, second = (torch.load(tmp_path / f"rank{rank}") for rank in range(2))
    assert first["1.num_batches_tracked"] == 3
    for name in first:
        assert torch.equal(first[name], second[name]), name
