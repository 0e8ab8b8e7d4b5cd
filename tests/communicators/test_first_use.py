"""First uses of groups: if ranks are missing, interrupted or fail, all ranks raise in time and with a clear message."""

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_syncbn import SyncBatchNorm1d, convert_sync_batchnorm
from bagua_syncbn.communicators import RankGroup, jobs
from bagua_syncbn.communicators.jobs import MeetingError, meet
from bagua_syncbn.torch_internals import groups as torch_groups
from tests.faults.test_watch import logged
from tests.helpers.own_groups import Meeting, forget_groups, join, mean_over

SECONDS = 5.0  # time-out of a job in which a rank waits in vain


@pytest.fixture
def store(request, tmp_path):
    if request.param == "file":
        return "file", str(tmp_path / "store")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return "tcp", probe.getsockname()[1]


# A group of both ranks, and how messages describe it.
KINDS = {
    "everyone": (lambda pair: None, "the group of all ranks"),
    "given": (lambda pair: pair, "group '1' of ranks 0, 1"),
    "number": (lambda pair: 2, "process_group=2"),
    "ranks": (lambda pair: RankGroup((0, 1)), "process_group=RankGroup(ranks=(0, 1))"),
}


def first_uses(store, meeting, *kinds):
    """Each rank has a layer with another kind of group; None for a rank that stays away. Then all make a new group."""
    rank, meeting = dist.get_rank(), Meeting(meeting)
    join(store, 2, rank, SECONDS)
    pair = dist.new_group([0, 1])  # with the time-out of torch, 30 minutes
    message, logs, begin = "", [], time.monotonic()
    if kinds[rank] is not None:
        model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), KINDS[kinds[rank]][0](pair))
        with logged() as logs, pytest.raises(RuntimeError) as caught:
            model(torch.randn(4, 3))
        message = str(caught.value)
    assert time.monotonic() - begin < SECONDS + 60
    meeting.wait_for_all("failed")
    assert mean_over(dist.new_group([0, 1])) == 0.5  # a new group works
    dist.barrier()
    return message, logs


CAUSES = (
    "Likely causes: a rank has ended or raised an error, is evaluating or running other code, or has a model that was "
    "not converted"
)


@pytest.mark.parametrize(("store", "kinds"), [
    ("file", ("everyone", "given")),
    ("tcp", ("given", "number")),
    ("tcp", ("ranks", "everyone")),
    ("file", ("ranks", "given")),
    *((kind, ("everyone", None)) for kind in ("file", "tcp")),
], indirect=["store"])  # fmt: skip
def test_missing_ranks_and_ranks_with_other_groups_are_named_in_time(pool, tmp_path, store, kinds):
    pool.forget_job()
    results = pool.run(first_uses, 2, store, str(tmp_path / "meeting"), *kinds)
    pool.forget_job()
    layer, uses = "SyncBatchNorm1d '0': ", [kind and f"first use of {KINDS[kind][1]}" for kind in kinds]
    if kinds[1] is None:
        message, (log,) = results[0]
        assert message == f"{layer}{uses[0]} failed: rank 0 waited for rank 1 for 5 s, the job's time-out. {CAUSES}"
        assert log == f"{layer}{uses[0]}: rank 0 has waited for rank 1 for 2.5 s, half of the job's time-out. {CAUSES}"
        return
    for rank, (message, (log,)) in enumerate(results):
        assert message.startswith(f"{layer}{uses[rank]} failed: rank "), message
        assert log.startswith(f"{layer}{uses[rank]}: rank {rank} has waited for rank {1 - rank} for 2.5 s, half of ")
    for which in range(2):  # in the message and in the log of a rank
        waits = [f"; rank {1 - rank} waits in the {uses[1 - rank]}" for rank in range(2)]
        assert any(waits[rank] in str(result[which]) for rank, result in enumerate(results))


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
    message = ""
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            mean_over(pair)
        message = str(caught.value)
    dist.barrier()
    return message


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_first_use_respects_the_time_out_of_its_group(pool, store):
    pool.forget_job()
    message, _ = pool.run(first_use_of_a_group_with_less_time, 2, store)
    pool.forget_job()
    assert "rank 0 waited for rank 1 for 1 s, the group's time-out" in message


def test_leaving_a_meeting_ends_it_on_all_ranks():
    def decide(values):
        raise KeyboardInterrupt

    store = dist.HashStore()
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(meet, store, 1, (0, 1), "b", 300)
        with pytest.raises(KeyboardInterrupt):
            meet(store, 0, (0, 1), "a", 300, decide)
        with pytest.raises(MeetingError, match="rank 0 left with KeyboardInterrupt"):
            other.result(timeout=100)


interrupted_main = threading.Event()


def note_interrupt(*arguments):
    interrupted_main.set()
    signal.default_int_handler(*arguments)


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    assert interrupted_main.wait(30)  # on a busy machine this may take long
    time.sleep(0.3)  # until it has left the first use


def before(function):
    def interrupted(*args, **kwargs):
        interrupt()
        return function(*args, **kwargs)

    return interrupted


def behind(function):
    def interrupted(*args, **kwargs):
        result = function(*args, **kwargs)
        interrupt()
        return result

    return interrupted


OWNERS = {"make_group": torch_groups, "meet": jobs.Job}


def interrupted_first_use(store, when, name):
    owner, rank = OWNERS[name], dist.get_rank()
    join(store, 2, rank, seconds=60)
    interrupted_main.clear()
    before_test = signal.signal(signal.SIGINT, note_interrupt)
    begin = time.monotonic()
    with patch.object(owner, name, when(getattr(owner, name)) if rank else getattr(owner, name)):
        with pytest.raises(KeyboardInterrupt if rank else RuntimeError) as caught:
            mean_over(None)
        took = time.monotonic() - begin
    signal.signal(signal.SIGINT, before_test)
    dist.barrier()
    assert mean_over(None) == 0.5  # the next attempt works
    dist.barrier()
    return took, str(caught.value)


@pytest.mark.parametrize("store", ["file", "tcp"], indirect=True)
@pytest.mark.parametrize("when", [before, behind])
@pytest.mark.parametrize("name", OWNERS)
def test_an_interrupted_first_use_ends_at_once_on_all_ranks(pool, store, when, name):
    """After the meeting all ranks connect, even if a signal handler raises."""
    pool.forget_job()
    (took, message), _ = pool.run(interrupted_first_use, 2, store, when, name)
    pool.forget_job()
    assert took < 40  # far below the time-out of the job
    assert "rank 1 left with KeyboardInterrupt" in message
