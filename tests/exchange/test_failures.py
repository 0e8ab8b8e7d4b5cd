"""What happens to the ranks of a group when one of them fails, is interrupted or misuses shared memory."""

import multiprocessing
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
from bagua_syncbn.torch_internals.groups import backend_and_store
from tests.exchange.places import needs_shared_memory, over
from tests.helpers.told import message_of

pytestmark = needs_shared_memory
SECONDS = 300.0  # time-out of jobs in which a rank ends


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("places", "different", "values", "told"), [
    ("aaaa", "all_gather", 5, "rank 0: sums 5 float32; rank 1: sums 5 float32; rank 2: sums 5 float32; rank 3: g"),
    ("aaaa", "all_reduce", 6, "rank 2: sums 5 float32; rank 3: sums 6 float32"),
    ("aabb", "all_gather", 5, "rank 2: sums 6 float32; rank 3: gathers 6 float32"),
])  # fmt: skip
def test_ranks_that_send_different_messages_are_told_who_sent_what(places, different, values, told):
    communicator, rank = over(places), dist.get_rank()
    name, count = (different, values) if rank == 3 else ("all_reduce", 5)
    assert told in message_of(getattr(communicator, name), torch.ones(count))
    if places == "aaaa":
        assert communicator.all_reduce(torch.ones(1)) == 4  # the group goes on


@pytest.mark.ranks(2)
def test_calls_out_of_order_are_refused_and_send_nothing():
    communicator = over("aa")
    begun = [communicator.begin_all_gather(torch.ones(2)) for _ in range(2)]
    assert "2 messages are pending" in message_of(communicator.begin_all_gather, torch.ones(2))
    assert "messages are pending" in message_of(communicator.all_gather, torch.ones(2))
    for one in begun:
        assert one.wait().tolist() == [[1, 1]] * 2
        one.wait()  # no second message
    assert communicator.all_reduce(torch.ones(1)) == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "numel", "itemsize"), [(5, 1, 4), (0, 2**15, 4), (1, 2**14, 8), (0, -1, 4)])
def test_the_library_refuses_messages_that_do_not_fit(kind, numel, itemsize):
    communicator = over("aa")
    target = torch.empty(2**16).data_ptr()
    arguments = communicator._segment, kind, target, numel, itemsize, target
    assert "packed: expected" in message_of(communicator._native.exchange, *arguments)
    assert communicator.all_reduce(torch.ones(1)) == 2


@pytest.mark.ranks(4)
@pytest.mark.parametrize("places", ["aaaa", "aabb"])
def test_a_forked_child_is_refused_and_leaves_the_group_to_its_parent(places):
    communicator, (reader, writer) = over(places), os.pipe()
    communicator.all_reduce(torch.ones(1))
    if os.fork() == 0:
        signal.alarm(60)
        os.write(writer, message_of(communicator.all_gather, torch.ones(2)).encode())
        os._exit(0)
    os.wait()
    assert "a forked child cannot use the groups of its parent" in os.read(reader, 1000).decode()
    time.sleep(0.8 * (dist.get_rank() == 2))  # the others wait, and check for ranks that left
    assert communicator.all_reduce(torch.ones(1)) == 4


def interrupted():
    """Returns what the other rank is told; and what another thread is told, and the seconds from Ctrl-C to its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    group = dist.new_group()
    communicator, store = over("aa", group), backend_and_store(group)[1]
    if dist.get_rank() == 0:
        store.wait(["interrupted"])
        communicator.all_gather(torch.ones(2))
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


def test_ctrl_c_ends_a_wait_and_the_others_are_told(pool):
    other, (told, seconds) = pool.run(interrupted, 2)
    assert "rank 1 of the group has left it after an error" in other
    assert "one thread at a time" in told
    assert seconds < 60


@pytest.mark.ranks(4)
def test_a_second_thread_is_refused_while_one_waits_for_other_hosts():
    group = dist.new_group()
    communicator, rank = over("aabb", group), dist.get_rank()
    store = backend_and_store(group)[1]
    if rank == 0:
        told = []

        def act():
            time.sleep(0.5)
            told.append(message_of(communicator.all_gather, torch.ones(2)))
            store.set("acted", "")

        thread = threading.Thread(target=act)
        thread.start()
    elif rank > 1:
        store.wait(["acted"])
    assert communicator.all_reduce(torch.ones(2)).tolist() == [4.0, 4.0]
    if rank == 0:
        thread.join()
        assert "one thread at a time" in told[0]


@pytest.mark.ranks(2)
def test_a_rank_that_lost_its_lock_may_have_closed_its_files():
    """A process loses its record locks on a file if it closes any descriptor of the file, as a profiler may."""
    group = dist.new_group()
    communicator, store = over("aa", group), backend_and_store(group)[1]
    if dist.get_rank() == 1:
        for number in os.listdir("/proc/self/fd"):
            if "memfd:bagua_syncbn" in os.path.realpath(f"/proc/self/fd/{number}"):
                os.close(os.open(f"/proc/self/fd/{number}", os.O_RDWR))
        store.wait(["noticed"])
        return
    message = message_of(communicator.all_gather, torch.ones(2))
    store.set("noticed", "")
    assert message == "rank 1 of the group has ended or closed its files"


@pytest.mark.ranks(4)
@pytest.mark.parametrize("places", ["aaaa", pytest.param("aabb", marks=pytest.mark.slow)])
def test_the_time_out_is_that_of_the_group(places):
    communicator, rank = over(places, timeout=timedelta(seconds=2)), dist.get_rank()
    begin = time.monotonic()
    told = message_of(communicator.all_gather, torch.ones(2)) if rank != 3 else ""
    took = time.monotonic() - begin
    assert took < 60
    assert took > 1.9 or "did not come within" not in told or places == "aabb"
    dist.barrier()  # no rank ends before the others have been told
    if rank == 2 or (rank < 2 and places == "aaaa"):
        assert "rank 3 of the group did not come within the time-out" in told or "has left it" in told
    elif rank < 2:
        assert "Timed out" in told or "rank 3 of the group did not come" in told


@pytest.mark.ranks(4)
@pytest.mark.parametrize("raising", [(0,), (1,), (0, 3), (1, 2, 3), (0, 1, 2, 3)], ids=str)
def test_ranks_that_raise_tell_all_others_why_and_go_on_if_all_raised(raising):
    layer, x = bagua_syncbn.SyncBatchNorm1d(3, process_group=over("aabb")), torch.randn(4, 3)
    for _ in range(3):
        layer(x)
    if dist.get_rank() in raising:
        with pytest.raises(ValueError, match="expected 2D or 3D input"):
            layer(torch.randn(4))
    told = message_of(layer, x)
    if len(raising) == 4:
        assert told == "finished"
    else:
        who = {(0,): "rank 0", (1,): "rank 1", (0, 3): "ranks 0, 3", (1, 2, 3): "ranks 1-3"}[raising]
        assert f"{who}: ValueError in SyncBatchNorm1d, call 4: expected 2D or 3D input" in told


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_tells_why():
    communicator = over("aa")
    if dist.get_rank() == 1:
        communicator.leave("rank 1 has left the group: its disk is full")
    assert message_of(communicator.all_gather, torch.ones(2)) == "rank 1 has left the group: its disk is full"


@pytest.mark.ranks(4)
def test_all_hosts_are_told_why_a_carrier_failed():
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


def rank_that_ends(rank, size, store, ending, how, answers):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    layer, x = bagua_syncbn.SyncBatchNorm1d(4, process_group=over("aabb")), torch.randn(3, 4)
    for _ in range(3):
        layer(x)
    if rank == ending and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == ending:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    if (rank + 2) % size == ending and how == "interrupted":
        time.sleep(2)  # so that the others wait
    begin = time.monotonic()
    try:
        for _ in range(2):  # the other host may have all it needs for the first one
            layer(x)
    except (RuntimeError, KeyboardInterrupt) as error:
        answers.put((rank, time.monotonic() - begin, f"{type(error).__name__}: {error}"))
    time.sleep(4)  # so that others learn of the first end and not of this one
    os._exit(0)


@pytest.fixture(scope="module")
def context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "bagua_syncbn"])
    return context


@pytest.mark.parametrize(("ending", "how"), [
    (0, "killed"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (1, "killed"), (2, "killed"), (3, "killed"), *((rank, "interrupted") for rank in range(4))))])  # fmt: skip
def test_all_hosts_learn_soon_of_a_rank_that_ends(context, tmp_path, ending, how):
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=rank_that_ends, args=(rank, 4, str(tmp_path / "store"), ending, how, answers))
        for rank in range(4)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS / 2)
        assert process.exitcode is not None, "a rank waits"
    told = {}
    while not answers.empty():
        rank, seconds, message = answers.get()
        told[rank] = message
        assert seconds < SECONDS / 6
    assert sorted(told) == [rank for rank in range(4) if rank != ending or how == "interrupted"]
    for rank, message in told.items():
        if rank == ending:
            assert message.startswith("KeyboardInterrupt")
        elif how == "interrupted":
            assert f"rank {ending} has left the group: KeyboardInterrupt" in message
        elif rank // 2 == ending // 2:
            assert f"rank {ending} of the group has ended or closed its files" in message
        elif ending % 2:
            assert f"rank {ending - 1} has left the group: rank {ending} of the group has ended" in message
        else:  # gloo's error, or what the other rank of the host found
            assert "Connection" in message or f"rank {ending} of the group has ended" in message
