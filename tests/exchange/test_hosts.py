"""Two hosts on one machine: namespaces for network, name, memory and processes, in which torchrun starts the ranks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM, ROOT = Path(__file__).with_name("on_hosts.py"), Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
NAMESPACES = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
BEGIN = """
hostname host{host}
mount -t tmpfs none /dev/shm
echo has its namespaces
read -r _
ip link set lo up
ip address add 10.77.0.{address}/24 dev veth
ip link set veth up
export GLOO_SOCKET_IFNAME=veth OMP_NUM_THREADS=1
"{python}" -m torch.distributed.run --nnodes 2 --node-rank {host} --nproc-per-node {ranks} \\
    --master-addr 10.77.0.1 --master-port 29577 "{program}"
"""


def problem():
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    if os.geteuid() != 0:
        return "needs root"
    tried = subprocess.run(["unshare", *NAMESPACES, "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    return f"needs the right to make namespaces: {tried.stderr.strip()}" if tried.returncode else ""


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(problem()), reason=problem() or "none")]


def answers_of(ranks):
    """Runs the program on two hosts, joined by a cable, with the given numbers of ranks; returns the ranks' results."""
    hosts = []
    for host, count in enumerate(ranks):
        names = {"host": host, "address": host + 1, "ranks": count, "python": sys.executable, "program": PROGRAM}
        command = ["unshare", *NAMESPACES, "sh", "-e", "-c", BEGIN.format(**names)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        hosts.append(subprocess.Popen(command, **pipes, cwd=ROOT, env=ENVIRONMENT))
    for process in hosts:
        assert process.stdout.readline() == "has its namespaces\n"
    one, other = (str(process.pid) for process in hosts)
    ends = ["veth", "netns", one, "type", "veth", "peer", "name", "veth", "netns", other]
    subprocess.run(["ip", "link", "add", *ends], check=True)
    try:
        for process in hosts:
            process.stdin.write("\n")
            process.stdin.flush()
        lines = [line for process in hosts for line in process.communicate(timeout=300)[0].splitlines()]
    finally:
        for process in hosts:
            process.kill()
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("ranks", [(2, 2), (1, 3), (4, 4)], ids=str)
def test_ranks_on_two_hosts_equal_one_process(ranks):
    answers = answers_of(ranks)
    assert sorted(answer["rank"] for answer in answers) == list(range(sum(ranks)))
    for answer in answers:
        on_host = range(ranks[0]) if answer["host"] == "0" else range(ranks[0], sum(ranks))
        assert answer["node"] == list(on_host)
        assert answer["over hosts"] == "HostsCommunicator"
        assert answer["on a host"] == ("SharedCommunicator" if len(on_host) > 1 else "LocalCommunicator")
