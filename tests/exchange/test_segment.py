"""The shared memory of a group's ranks, by itself: each message is checked, and each order, turn and lock is needed."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRESS = Path(__file__).with_name("stress.cpp")
SOURCES = ROOT / "csrc" / "exchange"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def build(folder, *flags, planted=("", "")):
    """Compiles the stress test, with all places that hold the first text of ``planted`` changed to the second."""
    sources = folder / "exchange"
    sources.mkdir(parents=True)
    before, after = planted
    found = 0
    for source in ("segment.h", "segment.cpp"):
        text = (SOURCES / source).read_text()
        found += text.count(before)
        (sources / source).write_text(text.replace(before, after) if before else text)
    assert found, f"expected {before!r} in the sources"
    program = folder / "stress"
    command = ["g++", "-std=c++17", "-O1", "-g1", "-pthread", f"-I{folder}", *flags, STRESS, sources / "segment.cpp"]
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
    """The flag of ThreadSanitizer, where it runs."""
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


ORDERS = {
    "a message is published before it is written": (
        "slot.sequence.store(published_, std::memory_order_seq_cst)",
        "slot.sequence.store(published_, std::memory_order_relaxed)",
    ),
    "a message is read before it is seen": (
        "word.load(std::memory_order_acquire)",
        "word.load(std::memory_order_relaxed)",
    ),
}
FAULTS = {
    "a turn too few": ("kTurns = 2 * kAhead", "kTurns = 2 * kAhead - 1", "threads 2 20000 1"),
    "a message too far ahead": ("collected_ == kAhead)", "collected_ == kAhead + 1)", "threads 2 100 1"),
    "no rank is waited for": ("rank < ranks(); ++rank) {\n    const Outcome", "rank < 1; ++rank) {\n    const Outcome",
                              "threads 3 2000 1"),
    "sleepers are not woken": ("!= 0) futex_wake_all(slot.sequence)", "< 0) return false", "sleepers 3 300 1"),
    "a lock that children inherit": ("F_SETLK", "F_OFD_SETLK", "deaths"),
    "no lock is looked at": ("&& !memory_->is_locked(rank)", "&& false", "deaths"),
    "a rank that has ended is not asked for its last message": (
        "if (slot.sequence.load(std::memory_order_acquire) == sequence) return Outcome::kCollected;\n    if (has_left)",
        "if (has_left)", "deaths"),
    "who leaves says so to nobody": ("seat.has_left.exchange(1", "seat.has_left.exchange(0", "deaths"),
    "no time-out": ("Clock::now() >= end", "false", "deaths"),
    "a child takes itself for its parent": ("forks.fetch_add(1)", "forks.fetch_add(0)", "deaths"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_each_memory_order_is_needed(sanitizer, tmp_path, name):
    status, said = run(build(tmp_path, sanitizer, planted=ORDERS[name]), "threads", 2, 1_000, 1)
    assert status != 0
    assert "data race" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_caught(tmp_path, name):
    before, after, arguments = FAULTS[name]
    try:
        status, said = run(build(tmp_path, planted=(before, after)), *arguments.split(), seconds=30)
    except subprocess.TimeoutExpired:
        return
    assert status != 0
    assert "wrong" in said
