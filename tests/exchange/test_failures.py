"""All ranks of a group raise if a rank fails, is interrupted or misuses shared memory."""

import os
import signal
import threading
import time
from datetime import timedelta
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

import bagua_syncbn
from bagua_syncbn.communicators import TorchCommunicator
from bagua_syncbn.torch_internals.process_groups import backend_and_store
from tests.exchange.places import needs_shared_memory, over
from tests.helpers.messages import message_of
from tests.helpers.workers import fork_context, join_job, start_ranks

pytestmark = needs_shared_memory
SECONDS = 300.0  # timeout of jobs with a rank that exits


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("places", "different", "values"), [
    ("aaaa", "all_gather", 5), ("aaaa", "all_reduce", 6), ("aabb", "all_gather", 5),
])  # fmt: skip
def test_ranks_that_send_different_messages_raise(places, different, values):
    communicator, rank = over(places), dist.get_rank()
    name, count = (different, values) if rank == 3 else ("all_reduce", 5)
    message = message_of(getattr(communicator, name), torch.ones(count))
    assert "sent different messages" in message
    if places == "aaaa":
        assert communicator.all_reduce(torch.ones(1)) == 4  # the group still works


@pytest.mark.ranks(2)
def test_calls_out_of_order_are_refused_and_send_nothing():
    communicator = over("aa")
    begun = [communicator.begin_all_gather(torch.ones(2)) for _ in range(2)]
    assert "too many messages are pending" in message_of(communicator.begin_all_gather, torch.ones(2))
    assert "messages are pending" in message_of(communicator.all_gather, torch.ones(2))
    for one in begun:
        assert one.wait().tolist() == [[1, 1]] * 2
        one.wait()  # no second message
    assert communicator.all_reduce(torch.ones(1)) == 2


def interrupted(places):
    """On rank 1, two threads wait in the group until Ctrl-C.

    Rank 1 returns the second thread's error and the seconds since Ctrl-C. Its peers return their errors.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    group = dist.new_group()
    communicator, store = over(places, group), backend_and_store(group)[1]
    if dist.get_rank() != 1:
        store.wait(["interrupted"])
        message_of(communicator.all_gather, torch.ones(2))
        return message_of(communicator.all_gather, torch.ones(2))
    told, begins = [], []

    def act():
        time.sleep(1)
        told.append(message_of(communicator.all_gather, torch.ones(2)))
        begins.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=act)
    try:
        thread.start()
        communicator.all_gather(torch.ones(2))
    except KeyboardInterrupt:
        thread.join()
        store.set("interrupted", "")
        return told[0], time.monotonic() - begins[0]


@pytest.mark.parametrize("places", ["aa", "aabb"])
def test_ctrl_c_ends_a_wait_and_second_threads_are_refused(pool, places):
    first, (told, seconds), *others = pool.run(interrupted, len(places), places)
    assert all("rank 1 " in message and "has left" in message for message in (first, *others))
    assert "one thread at a time" in told
    assert seconds < 60


@pytest.mark.ranks(4)
@pytest.mark.parametrize("places", ["aaaa", pytest.param("aabb", marks=pytest.mark.slow)])
def test_waits_end_at_the_groups_timeout(places):
    communicator, rank = over(places, timeout=timedelta(seconds=2)), dist.get_rank()
    begin = time.monotonic()
    told = message_of(communicator.all_gather, torch.ones(2)) if rank != 3 else ""
    took = time.monotonic() - begin
    dist.barrier()  # no rank exits before its peers raise
    late = "rank 3 of the group did not"
    assert took < 60
    assert took > 1.9 or late not in told
    assert rank == 3 or any(text in told for text in (late, "has left", "Timed out"))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("raising", [0, 1])
def test_peers_on_all_hosts_get_the_error_of_a_rank_that_raises(raising):
    layer, x = bagua_syncbn.SyncBatchNorm1d(3, process_group=over("aabb")), torch.randn(4, 3)
    layer(x)
    if dist.get_rank() == raising:
        with pytest.raises(ValueError, match="expected 2D or 3D input"):
            layer(torch.randn(4))
    error = f"rank {raising} has left the group: ValueError in SyncBatchNorm1d, call 2: expected 2D or 3D input"
    expected = "this group failed before, in the ValueError" if dist.get_rank() == raising else error
    assert expected in message_of(layer, x) + message_of(layer, x)  # the first call may have reached another host


@pytest.mark.ranks(2)
def test_peers_get_the_reason_of_a_rank_that_leaves():
    communicator = over("aa")
    if dist.get_rank() == 1:
        communicator.leave("rank 1 has left the group: its disk is full")
    assert message_of(communicator.all_gather, torch.ones(2)) == "rank 1 has left the group: its disk is full"


@pytest.mark.ranks(4)
def test_all_hosts_get_a_carriers_error():
    communicator, rank = over("abba"), dist.get_rank()  # rank 3 has the segment of rank 0, rank 2 that of rank 1
    if rank == 1:
        broken = Mock(side_effect=RuntimeError("the cable of rank 1 is cut"))
        with patch.object(TorchCommunicator, "all_gather", broken), pytest.raises(RuntimeError, match="is cut"):
            communicator.all_gather(torch.ones(2))
        return
    begin = time.monotonic()
    for _ in range(2):
        told = message_of(communicator.all_gather, torch.ones(2))
        assert told == "rank 1 has left the group: the cable of rank 1 is cut"
    assert time.monotonic() - begin < 60


def rank_that_ends(store, rank, size, ending, are_collected, answers):
    join_job(store, rank, size, SECONDS)
    layer, x = bagua_syncbn.SyncBatchNorm1d(4, process_group=over("aabb")), torch.randn(3, 4)
    layer(x)
    if rank == ending:
        os.kill(os.getpid(), signal.SIGKILL)
    told = [message_of(layer, x) for _ in range(2)]  # the other host may complete the first call
    answers.put((rank, *told))
    are_collected.wait(SECONDS)  # peers must detect the first exit, not this one
    os._exit(0)


@pytest.mark.parametrize("ending", [0, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (1, 2, 3))])
def test_all_hosts_detect_a_rank_that_ends(tmp_path, ending):
    are_collected = fork_context().Event()
    ranks, answers = start_ranks(tmp_path / "store", rank_that_ends, 4, ending, are_collected)
    collected = sorted(answers.get(timeout=SECONDS / 2) for _ in range(3))
    are_collected.set()
    for rank, process in enumerate(ranks):
        process.join(SECONDS / 2)
        assert process.exitcode == (-signal.SIGKILL if rank == ending else 0)
    ended = f"rank {ending} of the group has ended or closed its files"
    for rank, *told in collected:
        errors = "\n".join(told)
        if rank // 2 == ending // 2:
            assert ended in errors
        elif ending % 2:
            assert f"rank {ending - 1} has left the group: {ended}" in errors
        else:  # gloo's error, or the error of this host's other rank
            assert "Connection" in errors or ended in errors
