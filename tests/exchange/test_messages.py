"""Messages through shared memory equal those of the group's collectives; after a failure, all ranks raise."""

import os
import signal
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from bagua_syncbn._torch.process_groups import timeout_of
from bagua_syncbn.communicators import TorchCommunicator, shared
from tests.helpers import steps
from tests.helpers.messages import message_of
from tests.helpers.observed import collectives
from tests.helpers.own_groups import communicator_of, forget_groups, needs_shared_memory

pytestmark = needs_shared_memory

# Values


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("dtype", "values", "beginners"), [
    (torch.float32, 0, ""), (torch.float32, 1, ""), (torch.float64, 3, ""), (torch.float32, 1021, ""),
    (torch.float64, 2**13, ""), (torch.float64, 2**13 + 1, ""), (torch.float16, 5, ""),
    (torch.float32, 9, "0"), (torch.float32, 9, "012"), (torch.float32, 2**14, ""), (torch.float32, 2**14 + 1, "012"),
], ids=str)  # fmt: skip
def test_messages_equal_those_of_collectives(dtype, values, beginners):
    """``beginners``: ranks that begin messages without waiting."""
    communicator, packed = communicator_of(dist.new_group()), torch.randn(values, dtype=dtype) + dist.get_rank()
    assert type(communicator) is shared.SharedCommunicator
    whole = TorchCommunicator(dist.group.WORLD)

    def copy():  # all_reduce may overwrite it; small messages may be strided
        return packed.clone() if values > 9 else packed.repeat_interleave(2)[::2]

    for _ in range(2):  # a group still works after an unfinished message
        with collectives() as called:
            if str(dist.get_rank()) in beginners:
                begun = communicator.begin(copy(), False), communicator.begin(copy(), True)
                gathered, total = (one.wait() for one in begun)
            else:
                gathered, total = communicator.all_gather(copy()), communicator.all_reduce(copy())
        fits = packed.dtype in (torch.float32, torch.float64) and packed.nbytes <= 2**16
        assert bool(called.keys() & {"exchange", "publish"}) is fits  # larger messages take the group's collectives
        assert torch.equal(gathered, whole.all_gather(packed))
        torch.testing.assert_close(total, whole.all_reduce(packed.clone()))
        assert total.shape == packed.shape
        assert all(torch.equal(total, other) for other in steps.gathered(total))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("cores", "spins"), [(2, False), (3, True)])
def test_ranks_wait_until_the_groups_timeout_and_spin_only_if_each_has_a_core(cores, spins):
    native = shared.native_library()
    affinity = patch.object(os, "sched_getaffinity", Mock(return_value=set(range(cores))))
    forget_groups()
    for given, seconds in ((dist.new_group(timeout=timedelta(seconds=60)), 60), (None, 1800)):  # the job's timeout
        with affinity, patch.object(native, "map_segment", wraps=native.map_segment) as map_segment:
            group = communicator_of(given).group
        assert map_segment.call_args.args[2:4] == (seconds, spins)
        assert timeout_of(group).total_seconds() == seconds


# Agreement


@pytest.mark.ranks(3)
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("lacks", ["wish", "library", "memory"])
def test_all_ranks_share_memory_or_none(rank, lacks):
    full = Mock(side_effect=RuntimeError("posix_fallocate: No space left on device"))
    library = Mock(map_segment=full) if lacks == "memory" else None
    patched = ("_WANTED", "collectives") if lacks == "wish" else ("native_library", lambda: library)
    with patch.object(shared, *patched) if dist.get_rank() == rank else nullcontext():
        communicator = communicator_of(dist.new_group())
    assert type(communicator) is TorchCommunicator
    assert communicator.all_gather(torch.ones(2)).tolist() == [[1.0, 1.0]] * 3


@pytest.mark.ranks(2)
def test_a_file_that_is_not_the_groups_memory_is_refused():
    """Rank 0 sends the place of an unrelated file, and of an unrelated group's memory."""
    native = shared.native_library()
    with Path(os.devnull).open() as file:
        other, place = native.map_segment("bagua_syncbn:other", 2, 1.0, False, 0, "")
        for wrong in (f"/proc/{os.getpid()}/fd/{file.fileno()}", place):
            lying = Mock(map_segment=Mock(return_value=(other, wrong)))
            patched = patch.object(shared, "native_library", Mock(return_value=lying))
            with patched if dist.get_rank() == 0 else nullcontext():
                assert type(communicator_of(dist.new_group())) is TorchCommunicator


@pytest.mark.ranks(4)
def test_the_log_says_how_messages_travel_and_why():
    rank = dist.get_rank()
    with patch.object(shared, "_log") as log:
        communicator_of(dist.new_group())
        communicator_of(dist.new_group(backend="fake"))
        for places in ("aabb", "aaab", "abcd"):  # the host of each rank
            with patch.object(shared, "host_name", Mock(return_value=(places[rank], ""))):
                communicator_of(dist.new_group())
        with patch.object(shared, "problem", Mock(return_value=f"reason {rank}" if rank % 3 else "")):
            communicator_of(dist.new_group())
    lines = [call.args[0] % call.args[1:] for call in log.debug.call_args_list]
    reasons = "its CPU messages do not go over gloo", *["its ranks are on several hosts"] * 3, "rank 1: reason 1"
    for line, text in zip(lines, ["shared memory", *(f"collectives: {reason}" for reason in reasons)], strict=True):
        assert line.endswith(f"rank {rank} of 4: through {text}")


# Failures


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
    begun = [communicator.begin(torch.ones(2), False) for _ in range(2)]
    assert "too many messages are pending" in message_of(communicator.begin, torch.ones(2), False)
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
