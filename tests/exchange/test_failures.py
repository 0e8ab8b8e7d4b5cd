"""All ranks of a group raise if a rank fails, is interrupted or misuses shared memory."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

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


@pytest.mark.ranks(2, timeout=60)
def test_ctrl_c_ends_a_wait_and_second_threads_are_refused():
    communicator, message, told = communicator_of(dist.new_group()), torch.ones(2), []

    def act():
        told.append(message_of(communicator.all_gather, message))
        os.kill(os.getpid(), signal.SIGINT)

    if dist.get_rank() == 1:
        second = threading.Timer(0.5, act)
        second.start()
        with pytest.raises(KeyboardInterrupt):
            communicator.all_gather(message)
        second.join()
        assert "one thread at a time" in told[0]
    dist.barrier()
    if dist.get_rank() == 0:
        communicator.all_gather(message)  # which rank 1 has sent
        left = message_of(communicator.all_gather, message)
        assert "rank 1 " in left
        assert "has left" in left
