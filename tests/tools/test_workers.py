"""The harness that the other tests stand on."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from workers import RankError, WorkerPool


@pytest.fixture
def own_pool():
    workers = WorkerPool()
    yield workers
    workers.close()


def add_up_ranks(start):
    total = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(total)
    return total.item(), os.getpid()


def fail_on(rank, how):
    """While the other rank waits in a barrier."""
    if dist.get_rank() != rank:
        dist.barrier()
    elif how == "raise":
        raise ValueError("what this rank has to say")
    elif how == "exit":
        os._exit(7)
    elif how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


@pytest.mark.slow  # it proves nothing but what tests stand on
def test_a_rank_that_fails_ends_all_and_is_named(own_pool):
    before = [pid for _, pid in own_pool.run(add_up_ranks, 2, 0)]
    for rank, how, message in (
        (1, "raise", r"rank 1 raised(.|\n)*fail_on(.|\n)*what this rank has to say"),
        (0, "exit", "rank 0 died with exit code 7"),
        (0, "crash", r"rank 0 died with exit code -11(.|\n)*fail_on"),
        (1, "hang", r"no answer within 8 s\nrank 0 waits at(.|\n)*barrier(.|\n)*rank 1 waits at(.|\n)*fail_on"),
    ):
        started = time.monotonic()
        with pytest.raises(RankError, match=message):
            own_pool.run(fail_on, 2, rank, how, timeout=8)
        assert time.monotonic() - started < 20
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert [total for total, _ in own_pool.run(add_up_ranks, 2, 0)] == [1.0, 1.0]
