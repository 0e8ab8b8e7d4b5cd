"""First uses of groups: if ranks are missing, interrupted or fail, all ranks promptly raise a clear error."""

import itertools
import socket
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_syncbn import SyncBatchNorm1d, convert_sync_batchnorm
from bagua_syncbn.communicators import RankGroup, meeting
from bagua_syncbn.communicators.meeting import Meeting
from tests.faults.test_watch import logged
from tests.helpers.own_groups import WaitingRoom, forget_groups, join, mean_over, needs_shared_memory

SECONDS = 5.0  # timeout of a job with a rank that never arrives


@pytest.fixture
def store(request, tmp_path):
    if request.param == "file":
        return "file", str(tmp_path / "store")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return "tcp", probe.getsockname()[1]


@pytest.fixture
def new_jobs(pool):
    """The pool; the functions start their own jobs."""
    pool.forget_job()
    yield pool
    pool.forget_job()


# A group of both ranks, and its description in messages.
KINDS = {
    "everyone": (lambda pair: None, "the group of all ranks"),
    "given": (lambda pair: pair, "group '1' of ranks 0, 1"),
    "number": (lambda pair: 2, "process_group=2"),
    "ranks": (lambda pair: RankGroup((0, 1)), "process_group=RankGroup(ranks=(0, 1))"),
}


def first_uses(store, room, *kinds):
    """Each rank's layer has a different kind of group; None for a rank that does not take part. Then all ranks create a
    new group."""
    rank, room = dist.get_rank(), WaitingRoom(room)
    join(store, 2, rank, SECONDS)
    pair = dist.new_group([0, 1])  # with torch's timeout, 30 minutes
    message, logs, begin = "", [], time.monotonic()
    if kinds[rank] is not None:
        model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), KINDS[kinds[rank]][0](pair))
        with logged() as logs, pytest.raises(RuntimeError) as caught:
            model(torch.randn(4, 3))
        message = str(caught.value)
    assert time.monotonic() - begin < SECONDS + 60
    room.wait_for_all("failed")
    assert mean_over(dist.new_group([0, 1])) == 0.5
    dist.barrier()
    return message, logs


@pytest.mark.parametrize(("store", "kinds"), [
    ("tcp", ("given", "number")), ("file", ("ranks", "everyone")), ("file", ("everyone", None)),
], indirect=["store"])  # fmt: skip
def test_missing_ranks_are_named_in_time(new_jobs, tmp_path, store, kinds):
    results = new_jobs.run(first_uses, 2, store, str(tmp_path / "room"), *kinds)
    for rank, (message, logs) in enumerate(results):
        if kinds[rank] is None:
            continue
        first_use, other = f"first use of {KINDS[kinds[rank]][1]}", 1 - rank
        assert message.startswith(
            f"SyncBatchNorm1d '0': {first_use} failed: rank {rank} waited for rank {other} for 5 s"
        )
        assert "Likely causes: a rank ended" in message
        assert logs[0].startswith(
            f"{first_use}: rank {rank} has waited for rank {other} for 2.5 s, half of the timeout"
        )


ALL_RANKS = {
    "given": dist.new_group,
    "number": lambda: 2,
    "node": lambda: "node",
    "lists": lambda: [[1, 0]],
    "default": lambda: dist.group.WORLD,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ALL_RANKS)
def test_peers_raise_an_error_in_the_first_call_of_a_second_layer(kind):
    group = ALL_RANKS[kind]()
    SyncBatchNorm1d(3, process_group=group)(torch.randn(4, 3))
    second = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), group)
    begin, fails = time.monotonic(), dist.get_rank() == 1
    with pytest.raises(TypeError if fails else RuntimeError, match=r"input: expected .* got torch\.int64"):
        second(torch.ones(4, 3, dtype=torch.int64 if fails else torch.float32))
    assert time.monotonic() - begin < 60
    forget_groups()  # the group has failed


def first_use_of_a_group_with_less_time(store):
    rank = dist.get_rank()
    join(store, 2, rank, seconds=60)
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 0 waited for rank 1 for 1 s, the timeout"):
            mean_over(pair)
    dist.barrier()


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_first_use_respects_its_groups_timeout(new_jobs, store):
    new_jobs.run(first_use_of_a_group_with_less_time, 2, store)


def interrupted_first_use(store, number):
    rank, calls, exchange = dist.get_rank(), itertools.count(1), Meeting.exchange
    join(store, 2, rank, seconds=300)

    def interrupted(*arguments):
        if next(calls) == number and rank:
            raise KeyboardInterrupt
        return exchange(*arguments)

    begin = time.monotonic()
    expected = (KeyboardInterrupt, "") if rank else (RuntimeError, "rank 1 left with KeyboardInterrupt")
    with patch.object(Meeting, "exchange", interrupted), pytest.raises(expected[0], match=expected[1]):
        mean_over(None)
    assert time.monotonic() - begin < 60
    dist.barrier()
    assert mean_over(None) == 0.5  # the next attempt succeeds
    dist.barrier()


@pytest.mark.parametrize("store", ["tcp"], indirect=True)
@pytest.mark.parametrize("number", [1, 2, 3, pytest.param(5, marks=needs_shared_memory)])
def test_an_interrupted_first_use_ends_on_all_ranks(new_jobs, store, number):
    new_jobs.run(interrupted_first_use, 2, store, number)


def test_a_rank_that_timed_out_accepts_a_completed_exchange():
    """Rank 0 completes the exchange while rank 1 describes its timeout."""
    store = dist.HashStore()
    first, late = (Meeting(store, "test", rank, (0, 1), timedelta(minutes=1 - rank), "a test") for rank in (0, 1))

    def meanwhile(_):
        assert first.exchange("a") == ["a", "b"]
        return "rank 0"

    with patch.object(meeting, "text_of_ranks", meanwhile):
        assert late.exchange("b") == ["a", "b"]
