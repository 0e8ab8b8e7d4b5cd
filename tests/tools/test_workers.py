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
    return dist.get_rank(), total.item(), os.getpid()


def raise_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("what rank one has to say")
    dist.barrier()


def die_on_rank_zero():
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


def sleep_on_rank_one():
    if dist.get_rank() == 1:
        time.sleep(60)


def test_a_rank_that_raises_ends_all_and_shows_its_traceback(own_pool):
    before = {result[2] for result in own_pool.run(add_up_ranks, 2, 0)}
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 raised(.|\n)*raise_on_rank_one(.|\n)*what rank one has to say"):
        own_pool.run(raise_on_rank_one, 2)
    assert time.monotonic() - started < 20  # rank 0 was waiting in a barrier
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert [result[1] for result in own_pool.run(add_up_ranks, 2, 0)] == [1.0, 1.0]


def crash_on_rank_zero():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def test_a_rank_that_dies_or_hangs_is_named(own_pool):
    with pytest.raises(RankError, match="rank 0 died with exit code 7"):
        own_pool.run(die_on_rank_zero, 2)
    with pytest.raises(RankError, match=r"rank 0 died with exit code -11(.|\n)*crash_on_rank_zero"):
        own_pool.run(crash_on_rank_zero, 2)
    with pytest.raises(RankError, match=r"no answer within 8 s\nrank 1 waits at(.|\n)*sleep_on_rank_one"):
        own_pool.run(sleep_on_rank_one, 2, timeout=8)
