"""Tests the shared memory without layers: checks each value of each message."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from bagua_syncbn.communicators import shared
from tests.helpers.own_groups import needs_shared_memory

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).with_name("stress.cpp"), ROOT / "csrc" / "exchange" / "segment.cpp"

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def stress(tmp_path_factory):
    """Returns a function that builds the program with a compiler option and runs it."""
    folder = tmp_path_factory.mktemp("stress")

    def run(option, *arguments):
        program = folder / option
        if not program.exists():
            command = ["g++", "-std=c++17", "-g1", "-pthread", f"-I{ROOT / 'csrc'}", option, *SOURCES, "-o", program]
            subprocess.run(command, check=True)
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=300)
        return done.returncode, done.stderr

    return run


@needs_compiler
@pytest.mark.parametrize(("ranks", "messages"), [
    (2, 5_000), (3, 3_000), (8, 500),
    # A message takes up to 1 ms on two busy cores, mostly to fill and check full slots.
    *(pytest.param(*size, marks=pytest.mark.slow) for size in ((2, 50_000), (3, 20_000))),
])  # fmt: skip
def test_each_value_of_each_message_arrives(stress, ranks, messages):
    assert stress("-O2", "threads", ranks, messages, ranks) == (0, "")


@needs_compiler
def test_sleeping_ranks_are_woken(stress):
    assert stress("-O2", "sleepers", 3, 300, 1) == (0, "")


@needs_compiler
def test_there_is_no_data_race(stress, tmp_path):
    option = "-fsanitize=thread"
    (tmp_path / "none.cpp").write_text("int main() {}")
    made = subprocess.run(["g++", option, tmp_path / "none.cpp", "-o", tmp_path / "none"], capture_output=True)
    if made.returncode or subprocess.run([tmp_path / "none"], capture_output=True).returncode:
        pytest.skip("needs ThreadSanitizer")
    assert stress(option, "threads", 3, 300, 3) == (0, "")


@needs_shared_memory
def test_the_last_message_of_a_rank_that_exits_arrives():
    native, name = shared.native_library(), "bagua_syncbn:test"
    own, peers = torch.ones(3), torch.zeros(2, 3)
    message = shared.GATHER, own.data_ptr(), 3, 4
    for _ in range(50):
        segment, place = native.map_segment(name, 2, 60.0, False, 0, "")
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            peer = native.map_segment(name, 2, 60.0, False, 1, place)[0]
            os.write(write, b"mapped")  # ranks map the memory before the first message
            native.publish(peer, *message)
            os._exit(0)
        os.read(read, 6)
        os.close(read)
        os.close(write)
        native.exchange(segment, *message, peers.data_ptr())
        os.waitpid(child, 0)
        assert peers.sum() == 6
