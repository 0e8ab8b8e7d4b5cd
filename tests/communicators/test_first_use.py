"""First uses of groups: if ranks are missing, interrupted or fail, all ranks promptly raise a clear error."""

import itertools
import re
import socket
import time
from datetime import timedelta
from unittest import TestCase
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_syncbn import SyncBatchNorm1d, convert_sync_batchnorm
from bagua_syncbn.communicators import RankGroup, meeting
from bagua_syncbn.communicators.meeting import Meeting
from tests.helpers.own_groups import forget_groups, mean_over, needs_shared_memory
from tests.helpers.workers import join_job

SECONDS = 5.0  # timeout of a job with a rank that never arrives


@pytest.fixture
def store(request, tmp_path):
    """The address of a store for a new job."""
    if request.param == "file":
        return f"file://{tmp_path / 'store'}"
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"tcp://localhost:{probe.getsockname()[1]}"


# A group of both ranks, its description in messages, and the timeout in seconds.
KINDS = {
    "everyone": (lambda given, brief: None, "the group of all ranks", 5),
    "given": (lambda given, brief: given, "group '1' of ranks 0, 1", 5),
    "with less time": (lambda given, brief: brief, "group '2' of ranks 0, 1", 1),
    "number": (lambda given, brief: 2, "process_group=2", 5),
    "ranks": (lambda given, brief: RankGroup((0, 1)), "process_group=RankGroup(ranks=(0, 1))", 5),
}


@pytest.mark.ranks(2, new_job=True)
@pytest.mark.parametrize(("store", "kinds"), [
    ("tcp", ("given", "number")), ("file", ("everyone", None)),
    pytest.param("file", ("ranks", "everyone"), marks=pytest.mark.all_rows), ("file", ("with less time", None)),
], indirect=["store"])  # fmt: skip
def test_missing_ranks_are_named_in_time(store, kinds):
    """Each rank's layer has a different kind of group; None for a rank that does not take part."""
    rank = dist.get_rank()
    join_job(store, rank, 2, SECONDS)
    given, brief = dist.new_group([0, 1]), dist.new_group([0, 1], timeout=timedelta(seconds=1))
    begin = time.monotonic()
    if kinds[rank] is not None:
        make, name, seconds = KINDS[kinds[rank]]
        model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), make(given, brief))
        waited = f"rank {rank} {{}} for rank {1 - rank} for"
        message = f"SyncBatchNorm1d '0': first use of {name} failed: {waited.format('waited')} {seconds} s"
        likely = r"Likely causes: a peer is in eval\(\), "
        with (
            TestCase().assertLogs("bagua_syncbn", "WARNING") as logs,
            pytest.raises(RuntimeError, match=f"^{re.escape(message)}.*{likely}"),
        ):
            model(torch.randn(4, 3))
        (record,) = logs.records
        logged = f"first use of {name}: {waited.format('has waited')} {seconds / 2} s, half of the timeout"
        assert record.getMessage().startswith(logged)
    assert time.monotonic() - begin < SECONDS + 60
    dist.barrier(given)  # which has torch's timeout, 30 minutes
    assert mean_over(dist.new_group([0, 1])) == 0.5
    dist.barrier()


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


@pytest.mark.ranks(2, new_job=True)
@pytest.mark.parametrize("store", ["tcp"], indirect=True)
@pytest.mark.parametrize("number", [1, 2, 3, pytest.param(5, marks=needs_shared_memory)])
def test_an_interrupted_first_use_ends_on_all_ranks(store, number):
    rank, calls, exchange = dist.get_rank(), itertools.count(1), Meeting.exchange
    join_job(store, rank, 2, seconds=300)

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


def test_a_rank_that_timed_out_accepts_a_completed_exchange():
    """Rank 0 completes the exchange while rank 1 describes its timeout."""
    store = dist.HashStore()
    first, late = (Meeting(store, "test", rank, (0, 1), timedelta(minutes=1 - rank), "a test") for rank in (0, 1))

    def meanwhile(_):
        assert first.exchange("a") == ["a", "b"]
        return "rank 0"

    with patch.object(meeting, "text_of_ranks", meanwhile):
        assert late.exchange("b") == ["a", "b"]
