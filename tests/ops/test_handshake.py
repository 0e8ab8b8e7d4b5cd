"""How the blocks of a reduction learn which one is last, tried in all interleavings on a model of weak memory.

The emulator runs one thread at a time and its memory is always up to date, so it cannot see that a release or an
acquire is missing. Here a write becomes visible to other blocks at any later time, in any order, unless a release waits
for it; and a read may find what lay there before, unless an acquire came first. What the kernels do is read from their
source.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = (Path(__file__).parents[2] / "csrc" / "cuda" / "reduce.cuh").read_text()
THREADS = 2  # of a block: the one that counts up, and one more that has written a partial result

WRITES, AT_FIRST, COUNTS, AT_SECOND, READS, HAS_READ, HAS_LEFT = range(7)


class Program(NamedTuple):
    barrier_before: bool
    releases: bool
    acquires: bool
    barrier_after: bool


class State(NamedTuple):
    """Threads are (block, thread), and so is the partial result that each writes."""

    places: tuple  # where each thread is
    pending: frozenset = frozenset()  # written, and not visible to other blocks yet
    counted: tuple = ()  # the blocks that have counted up, in order
    acquired: frozenset = frozenset()  # threads that read what is visible, and nothing older


def read_program(source):
    body = source[source.index("bool arrives_last(") :]
    steps = re.findall(r"__syncthreads|count_up", body[: body.index("\n}")])
    order = re.search(r"atom\.(\w+)\.gpu", source)[1]
    return Program(
        barrier_before="__syncthreads" in steps[: steps.index("count_up")],
        releases=order in ("release", "acq_rel"),
        acquires=order in ("acquire", "acq_rel"),
        barrier_after="__syncthreads" in steps[steps.index("count_up") :],
    )


def steps_of(program, state, block, thread, blocks):
    """The states that a step of this thread leads to; raises AssertionError if the step itself is wrong."""
    at = THREADS * block + thread
    place = state.places[at]
    of_block = state.places[THREADS * block : THREADS * (block + 1)]

    def moved(to, **changes):
        return [state._replace(places=(*state.places[:at], to, *state.places[at + 1 :]), **changes)]

    if place == WRITES:
        return moved(AT_FIRST, pending=state.pending | {(block, thread)})
    if place == AT_FIRST:
        waits = program.barrier_before and min(of_block) < AT_FIRST
        return [] if waits else moved(COUNTS if thread == 0 else AT_SECOND)
    if place == COUNTS:
        known = {(block, other) for other in range(THREADS if program.barrier_before else 1)}
        if program.releases and known & state.pending:
            return []
        acquired = state.acquired | {(block, 0)} if program.acquires else state.acquired
        return moved(AT_SECOND, counted=(*state.counted, block), acquired=acquired)
    if place == AT_SECOND:
        if not program.barrier_after:
            return moved(READS)
        if min(of_block) < AT_SECOND:
            return []
        learns = {(block, thread)} if (block, 0) in state.acquired else set()
        return moved(READS, acquired=state.acquired | learns)
    if place == READS:
        if state.counted[-1:] != (block,) or len(state.counted) < blocks:
            return moved(HAS_LEFT)
        assert (block, thread) in state.acquired, "a read may find what lay there before"
        assert {written for written, _ in state.pending} <= {block}, "a partial result is not visible yet"
        return moved(HAS_READ)
    return []


def explore(program, blocks):
    """Goes through all states; returns how many there are."""
    first = State(places=(WRITES,) * (THREADS * blocks))
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        following = [state._replace(pending=state.pending - {write}) for write in state.pending]
        for at in range(THREADS * blocks):
            following += steps_of(program, state, *divmod(at, THREADS), blocks)
        if not following:
            ends = [state.places[THREADS * block : THREADS * (block + 1)] for block in state.counted]
            assert ends == [(HAS_LEFT,) * THREADS] * (blocks - 1) + [(HAS_READ,) * THREADS], "not the last block alone"
        todo += {new for new in following if new not in seen}
        seen.update(following)
    return len(seen)


@pytest.mark.parametrize("blocks", [2, 3])
def test_the_last_block_reads_all_partial_results_in_any_interleaving(blocks):
    assert explore(read_program(SOURCE), blocks) > 500


@pytest.mark.parametrize(("old", "new", "wrong"), [
    ("atom.acq_rel", "atom.acquire", "not visible yet"),
    ("atom.acq_rel", "atom.release", "what lay there before"),
    ("__shared__ bool last;\n  __syncthreads();", "__shared__ bool last;", "not visible yet"),
    ("  }\n  __syncthreads();\n  return last;", "  }\n  return last;", "not the last block|what lay there before"),
])  # fmt: skip
def test_what_is_left_out_is_found(old, new, wrong):
    assert old in SOURCE, "the handshake has changed: plant this bug anew"
    with pytest.raises(AssertionError, match=wrong):
        explore(read_program(SOURCE.replace(old, new)), blocks=2)
