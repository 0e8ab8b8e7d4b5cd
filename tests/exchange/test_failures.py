"""All ranks of a group raise if a rank fails, is interrupted or misuses shared memory."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from bagua_syncbn._torch.process_groups import backend_and_store
from tests.helpers.messages import message_of
from tests.helpers.own_groups import communicator_of, needs_shared_memory

pytestmark = needs_shared_memory


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("different", "values"), [("all_gather", 5), ("all_reduce", 6)])
def test_ranks_that_send_different_messages_raise(different, values):
    communicator, rank = communicator_of(dist.new_group()), dist.get_rank()
    name, count = (different, values) if rank == 3 else ("all_reduce", 5)
    message = message_of(getattr(communicator, name), torch.ones(count))
    assert "sent different messages" in message
    assert communicator.all_reduce(torch.ones(1)) == 4  # the group still works


@pytest.mark.ranks(2)
def test_calls_out_of_order_are_refused_and_send_nothing():
    communicator = communicator_of(dist.new_group())
    begun = [communicator.begin_all_gather(torch.ones(2)) for _ in range(2)]
    assert "too many messages are pending" in message_of(communicator.begin_all_gather, torch.ones(2))
    assert "messages are pending" in message_of(communicator.all_gather, torch.ones(2))
    for one in begun:
        assert one.wait().tolist() == [[1, 1]] * 2
        one.wait()  # no second message
    assert communicator.all_reduce(torch.ones(1)) == 2


def interrupted():
    """On rank 1, two threads wait in the group until Ctrl-C.

    Rank 1 returns the second thread's error and the seconds since Ctrl-C. Rank 0 returns its error.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    group = dist.new_group()
    communicator, store = communicator_of(group), backend_and_store(group)[1]
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


def test_ctrl_c_ends_a_wait_and_second_threads_are_refused(pool):
    message, (told, seconds) = pool.run(interrupted, 2)
    assert "rank 1 " in message
    assert "has left" in message
    assert "one thread at a time" in told
    assert seconds < 60


@pytest.mark.ranks(4)
def test_waits_end_at_the_groups_timeout():
    communicator, rank = communicator_of(dist.new_group(timeout=timedelta(seconds=2))), dist.get_rank()
    begin = time.monotonic()
    told = message_of(communicator.all_gather, torch.ones(2)) if rank != 3 else ""
    took = time.monotonic() - begin
    dist.barrier()  # no rank exits before its peers raise
    late = "rank 3 of the group did not"
    assert took < 60
    assert took > 1.9 or late not in told
    assert rank == 3 or late in told or "has left" in told


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_sends_the_reason_to_its_peers():
    communicator = communicator_of(dist.new_group())
    if dist.get_rank() == 1:
        communicator.leave("rank 1 has left the group: its disk is full")
    assert message_of(communicator.all_gather, torch.ones(2)) == "rank 1 has left the group: its disk is full"
