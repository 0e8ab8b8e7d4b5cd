"""Two hosts on one machine: namespaces for network, name, memory and processes, in which torchrun starts the ranks.

``pytest -s`` shows what a step costs and how soon a death is told.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIME_OUT = 60
PROGRAM = Path(__file__).with_name("on_hosts.py")
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
    --master-addr 10.77.0.1 --master-port 29577 "{program}" {arguments}
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


class Hosts:
    """Two hosts, joined by a cable, that run the program until the end of the context."""

    def __init__(self, ranks, *arguments):
        self.processes = []
        for host, count in enumerate(ranks):
            script = BEGIN.format(
                host=host,
                address=host + 1,
                ranks=count,
                python=sys.executable,
                program=PROGRAM,
                arguments=" ".join(map(str, arguments)),
            )
            command = ["unshare", *NAMESPACES, "sh", "-e", "-c", script]
            self.processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROGRAM.parents[2]
                )
            )
        for process in self.processes:
            assert process.stdout.readline() == "has its namespaces\n"
        one, other = (str(process.pid) for process in self.processes)
        ends = ["veth", "netns", one, "type", "veth", "peer", "name", "veth", "netns", other]
        subprocess.run(["ip", "link", "add", *ends], check=True)
        for process in self.processes:
            process.stdin.write("\n")
            process.stdin.flush()

    def answers(self, host):
        """Returns what the ranks of a host have printed, once they have ended."""
        output, _ = self.processes[host].communicate(timeout=120)
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("ranks", [(2, 2), (1, 3), (4, 4)], ids=str)
def test_ranks_on_two_hosts_equal_one_process(ranks):
    with Hosts(ranks, "values", TIME_OUT) as hosts:
        answers = hosts.answers(0) + hosts.answers(1)
    assert sorted(answer["rank"] for answer in answers) == list(range(sum(ranks)))
    for answer in answers:
        assert answer["node"] == list(range(ranks[0]) if answer["host"] == "0" else range(ranks[0], sum(ranks)))
        assert max(answer["error"], answer["error on node"]) < 1e-12
        assert answer["same bits"]
        assert answer["way"] == "HostsCommunicator"
    over, within = (max(answer[name] or 0 for answer in answers) for name in ("ms over hosts", "ms on a host"))
    error = max(answer["error"] for answer in answers)
    print(f"\n{ranks} ranks, (4, 64, 14, 14): {over:.2f} ms over hosts, {within:.2f} ms on a host; error {error:.0e}")


@pytest.mark.parametrize("dies", ["host 0", "host 1", 0, 1, 2, 3])
def test_all_others_are_told_soon_of_a_host_or_a_rank_that_dies(dies):
    with Hosts((2, 2), "until_death", TIME_OUT, -1 if isinstance(dies, str) else dies) as hosts:
        if isinstance(dies, str):
            host = int(dies[-1])
            for process in hosts.processes:
                assert process.stdout.readline() == '"trains"\n'
            died = time.time()
            hosts.processes[host].kill()
            survivors = [rank for rank in range(4) if rank // 2 != host]
            answers = hosts.answers(1 - host)
        else:
            host, survivors = dies // 2, [rank for rank in range(4) if rank != dies]
            answers = hosts.answers(0) + hosts.answers(1)
            died = next(answer["at"] for answer in answers if answer["rank"] == dies)
            answers = [answer for answer in answers if answer["rank"] != dies]
    assert sorted(answer["rank"] for answer in answers) == survivors
    for answer in answers:
        assert "sync_batch_norm: collective failed in the" in answer["told"]
        if isinstance(dies, int) and (dies % 2 or answer["rank"] // 2 == host):
            assert f"rank {dies} of the group has ended" in answer["told"]
        else:  # a carrier, which the other host sees end
            assert f"[10.77.0.{host + 1}]" in answer["told"]
    took = max(answer["at"] for answer in answers) - died
    assert took < TIME_OUT / 6
    print(f"\n{dies} was missed within {took:.2f} s")
