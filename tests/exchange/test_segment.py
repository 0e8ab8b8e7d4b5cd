"""Tests the shared memory without layers: checks each value of each message."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRESS = Path(__file__).with_name("stress.cpp")
SEGMENT = ROOT / "csrc" / "exchange" / "segment.cpp"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def build(folder, *flags):
    program = folder / "stress"
    command = ["g++", "-std=c++17", "-O1", "-g1", "-pthread", f"-I{ROOT / 'csrc'}", *flags, STRESS, SEGMENT]
    subprocess.run([*command, "-o", program], check=True)
    return program


def run(program, *arguments, seconds=300):
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=seconds)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def stress(tmp_path_factory):
    return build(tmp_path_factory.mktemp("stress"), "-O2")


@pytest.fixture(scope="module")
def sanitizer(tmp_path_factory):
    """The flag for ThreadSanitizer, if it works on this machine."""
    folder = tmp_path_factory.mktemp("sanitizer")
    (folder / "none.cpp").write_text("int main() {}")
    flag = "-fsanitize=thread"
    made = subprocess.run(["g++", flag, folder / "none.cpp", "-o", folder / "none"], capture_output=True)
    if made.returncode or subprocess.run([folder / "none"], capture_output=True).returncode:
        pytest.skip("needs ThreadSanitizer")
    return flag


@pytest.mark.parametrize(("ranks", "messages"), [
    (2, 5_000), (3, 3_000), (8, 500),
    *(pytest.param(ranks, 10_000_000, marks=pytest.mark.slow) for ranks in (2, 3)),
])  # fmt: skip
def test_each_value_of_each_message_arrives(stress, ranks, messages):
    assert run(stress, "threads", ranks, messages, ranks, seconds=3600) == (0, "")


def test_who_sleeps_is_woken(stress):
    assert run(stress, "sleepers", 3, 300, 1) == (0, "")


def test_ranks_that_end_stop_or_leave_are_told_from_those_that_are_late(stress):
    assert run(stress, "deaths") == (0, "")


@pytest.mark.parametrize("ranks", [2, 3])
def test_there_is_no_data_race(sanitizer, tmp_path, ranks):
    assert run(build(tmp_path, sanitizer), "threads", ranks, 300, ranks) == (0, "")
