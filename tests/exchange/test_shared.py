"""Who exchanges through shared memory is agreed upon, and what crosses there is what the group's collectives give."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from bagua_syncbn import SyncBatchNorm
from bagua_syncbn.communicators import TorchCommunicator, shared
from bagua_syncbn.communicators.c10d import communicator_of
from bagua_syncbn.communicators.shared import SharedCommunicator
from bagua_syncbn.torch_internals.groups import backend_and_store
from tests.helpers.observed import collectives
from tests.helpers.own_groups import communicator_of as layers_communicator
from tests.helpers.told import message_of

pytestmark = pytest.mark.skipif(bool(shared.problem()), reason=shared.problem() or "none")

# Values


@pytest.mark.ranks(3)
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(("dtype", "values"), [
    (torch.float32, 0), (torch.float32, 1), (torch.float64, 3), (torch.float32, 1021),
    (torch.float64, 2**13), (torch.float64, 2**13 + 1), (torch.float16, 5),
], ids=str)  # fmt: skip
def test_shared_memory_gives_what_collectives_give(dtype, values, begins):
    group, packed = dist.new_group(), torch.randn(values, dtype=dtype)
    results = []
    for communicator in (communicator_of(group), TorchCommunicator(group)):
        if begins:
            begun = communicator.begin_all_gather(packed.clone()), communicator.begin_all_reduce(packed.clone())
            results.append([one.wait() for one in begun])
        else:
            results.append([communicator.all_gather(packed.clone()), communicator.all_reduce(packed.clone())])
    (gathered, total), (expected, expected_total) = results
    assert torch.equal(gathered, expected)
    torch.testing.assert_close(total, expected_total)
    assert torch.equal(communicator.all_gather(total), total.expand(3, -1)), "ranks have other bits"


@pytest.mark.ranks(2)
def test_messages_need_not_be_contiguous():
    communicator, packed = communicator_of(dist.new_group()), torch.arange(6.0)[::2]
    begun = communicator.begin_all_gather(packed), communicator.begin_all_reduce(packed)
    results = *(one.wait() for one in begun), communicator.all_gather(packed), communicator.all_reduce(packed)
    assert [result.tolist() for result in results] == [[[0, 2, 4]] * 2, [0, 4, 8]] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", [0, 1])
def test_messages_larger_than_a_slot_take_collectives(more):
    communicator, packed = communicator_of(dist.new_group()), torch.ones(shared.MOST_BYTES // 4 + more)
    with collectives() as called:
        communicator.all_gather(packed)
        communicator.all_reduce(packed)
    assert called["_exchange"] == (0 if more else 2)
    assert sum(called.values()) == 2


# Agreement


class Full:
    """A library whose system has no memory left."""

    exchange = None

    def __getattr__(self, name):
        def fail(*_):
            raise RuntimeError("posix_fallocate: No space left on device")

        return fail


def no_native():
    return None


def full():
    return Full()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("rank", "name", "value"), [
    (None, "_WANTED", "shared"),
    *((rank, name, value) for rank in (0, 1, 2) for name, value in (
        ("_WANTED", "collectives"), ("native_library", no_native), ("native_library", full))),
])  # fmt: skip
def test_all_ranks_share_memory_or_none(rank, name, value):
    with patch.object(shared, name, value) if dist.get_rank() == rank else nullcontext():
        communicator = communicator_of(dist.new_group())
    assert isinstance(communicator, SharedCommunicator) == (rank is None)
    assert communicator.all_gather(torch.ones(2)).tolist() == [[1.0, 1.0]] * 3


@pytest.mark.ranks(2)
def test_other_memory_is_not_taken_for_that_of_the_group():
    """Rank 0 says that its memory is where another file is, and then another memory of this package's."""
    native = shared.native_library()
    for other in (Path(os.devnull).open(), native.make_segment("bagua_syncbn:other", 2)):  # noqa: SIM115
        place = f"/proc/{os.getpid()}/fd/{other.fileno()}" if hasattr(other, "fileno") else other[1]
        lying = SimpleNamespace(
            exchange=None,
            start_segment=native.start_segment,
            make_segment=lambda name, ranks, place=place: (native.make_segment(name, ranks)[0], place),
        )
        with (
            patch.object(shared, "native_library", lambda lying=lying: lying) if dist.get_rank() == 0 else nullcontext()
        ):
            assert type(communicator_of(dist.new_group())) is TorchCommunicator


@pytest.mark.ranks(2)
def test_one_line_of_the_log_says_which_way_and_why():
    with patch.object(shared, "_log") as log:
        communicator_of(dist.new_group())
        communicator_of(dist.new_group(backend="fake"))
    first, second = (call.args[0] % call.args[1:] for call in log.debug.call_args_list)
    assert f"rank {dist.get_rank()} of 2: through shared memory" in first
    assert "through collectives: its messages on CPU do not go over gloo" in second


NAMESPACES = {"mount": ["unshare", "-m"], "process": ["unshare", "--fork", "-p", "--mount-proc"]}
PROGRAM = """
import sys, torch, torch.distributed as dist
from bagua_syncbn.communicators.c10d import communicator_of
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
communicator = communicator_of(dist.group.WORLD)
print(type(communicator).__name__, communicator.all_reduce(torch.ones(3)).tolist())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("namespace", "way"), [("mount", "SharedCommunicator"), ("process", "TorchCommunicator")])
def test_ranks_in_other_namespaces_find_a_way_together(tmp_path, namespace, way):
    enter = NAMESPACES[namespace]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces")
    commands = [
        [*(enter if rank else []), sys.executable, "-c", PROGRAM, tmp_path / "store", str(rank)] for rank in (0, 1)
    ]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == [f"{way} [2.0, 2.0, 2.0]\n"] * 2


# Errors


def exchange_by_hand(communicator, kind, values):
    packed, target = torch.ones(values), torch.empty(3, values)
    communicator._native.exchange(communicator._segment, kind, packed.data_ptr(), values, 4, target.data_ptr())


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("one", "other", "shown"), [
    ((0, 5), (1, 5), "rank 0: gathers 5 float32; rank 1: gathers 5 float32; rank 2: sums 5 float32"),
    ((1, 5), (1, 6), "rank 0: sums 5 float32; rank 1: sums 5 float32; rank 2: sums 6 float32"),
    ((0, 5), (0, 5), "none"),
])  # fmt: skip
def test_ranks_that_differ_are_all_told_what_each_did(one, other, shown):
    """The last rank sends another message; then the group goes on."""
    communicator = communicator_of(dist.new_group())
    told = message_of(exchange_by_hand, communicator, *(other if dist.get_rank() == 2 else one))
    assert told.endswith(shown)
    assert communicator.all_reduce(torch.ones(1)) == 3


@pytest.mark.ranks(2)
def test_calls_out_of_order_are_refused_and_send_nothing():
    communicator = communicator_of(dist.new_group())
    begun = [communicator.begin_all_gather(torch.ones(2)) for _ in range(2)]
    more = message_of(communicator.begin_all_gather, torch.ones(2))
    assert "2 messages that were begun before, got one more" in more
    assert "begun to be collected" in message_of(communicator.all_gather, torch.ones(2))
    for kind, values in ((5, 1), (0, 2**15)):
        assert "begun to be collected" in message_of(exchange_by_hand, communicator, kind, values)
    for one in begun:
        one.wait()
    assert "begun, got none" in message_of(communicator._native.collect, communicator._segment, 0)


@pytest.mark.ranks(2)
def test_a_forked_child_is_refused_by_name():
    communicator, (reader, writer) = layers_communicator(), os.pipe()
    if os.fork() == 0:
        os.write(writer, message_of(communicator.all_gather, torch.ones(2)).encode())
        os._exit(0)
    os.wait()
    assert "got one in a forked child of it" in os.read(reader, 1000).decode()
    assert communicator.all_reduce(torch.ones(1)) == 2


def interrupted():
    """Returns what the other rank learns; and what another thread is told, and the seconds from Ctrl-C to its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it
    group = dist.new_group()
    communicator, store = communicator_of(group), backend_and_store(group)[1]
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


def test_ctrl_c_ends_a_wait_and_the_others_learn_of_it(pool):
    other, (told, seconds) = pool.run(interrupted, 2)
    assert "rank 1 of the group has left it after an error" in other
    assert "one thread at a time" in told
    assert seconds < 60


@pytest.mark.ranks(2)
def test_a_rank_that_has_lost_its_lock_is_not_said_to_have_ended():
    """A process loses its record locks on a file as soon as it closes any descriptor of the file, as a profiler may."""
    group = dist.new_group()
    communicator, store = communicator_of(group), backend_and_store(group)[1]
    if dist.get_rank() == 1:
        for number in os.listdir("/proc/self/fd"):
            if "memfd:bagua_syncbn" in os.path.realpath(f"/proc/self/fd/{number}"):
                os.close(os.open(f"/proc/self/fd/{number}", os.O_RDWR))
        store.wait(["noticed"])
        return
    message = message_of(communicator.all_gather, torch.ones(2))
    store.set("noticed", "")
    assert message == "rank 1 of the group has ended or closed its files"


@pytest.mark.ranks(2)
def test_the_time_out_is_that_of_the_group():
    communicator = communicator_of(dist.new_group(timeout=timedelta(seconds=1)))
    if dist.get_rank() == 1:
        return
    begin = time.monotonic()
    told = message_of(communicator.all_gather, torch.ones(2))
    assert told == "rank 1 of the group did not come within the time-out"
    assert time.monotonic() - begin < 60


# Lives


def held():
    """Returns the descriptors and the mappings of this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:bagua_syncbn")
    return len(os.listdir("/proc/self/fd")), maps


@pytest.mark.ranks(2)
@pytest.mark.parametrize("times", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_communicator_that_has_ended_leaves_nothing(times):
    group = dist.new_group()
    shared._agree(group)
    before = held()
    for _ in range(times):
        reason, segment = shared._agree(group)
        assert not reason, reason
    del segment
    assert held() == before


@pytest.mark.ranks(2)
def test_a_destroyed_group_frees_its_memory_whatever_lives_on():
    before = held()[1]
    for _ in range(5):
        group = dist.new_group()
        layer = SyncBatchNorm(3, process_group=communicator_of(group))
        output = layer(torch.randn(4, 3, requires_grad=True))
        assert held()[1] == before + 1
        dist.destroy_process_group(group)
        del group
        assert held()[1] == before, "a destroyed group keeps its memory"
    assert "destroyed" in message_of(output.sum().backward)


def jobs_in_one_process(store):
    """Three jobs over one store, one after another."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    ways = []
    for number in range(3):
        prefix = dist.PrefixStore(f"gloo {number}", dist.FileStore(store))
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=size)
        first = dist.distributed_c10d._world.pg_map[dist.group.WORLD]
        dist.distributed_c10d._world.pg_map[dist.group.WORLD] = first[0], dist.FileStore(store)
        communicator = communicator_of(dist.group.WORLD)
        ways.append((type(communicator).__name__, communicator.all_reduce(torch.ones(1)).item()))
        dist.destroy_process_group()
    return ways


def test_a_job_that_begins_again_over_the_same_store_shares_memory_anew(pool, tmp_path):
    pool.forget_job()
    try:
        assert pool.run(jobs_in_one_process, 2, str(tmp_path / "store")) == [[("SharedCommunicator", 2.0)] * 3] * 2
    finally:
        pool.forget_job()


# Compiled code


@pytest.mark.ranks(2)
def test_compiled_and_eager_calls_go_the_same_way():
    """The first rank runs compiled code, the last one the same as it is written; then the other way round."""
    layer, rank = SyncBatchNorm(8, momentum=1.0), dist.get_rank()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for step in range(4):
        batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + each)) for each in (0, 1)]
        y = (compiled if (step + rank) % 2 or step < 2 else layer)(batches[rank].requires_grad_())
        with collectives() as called:
            y.backward(torch.ones_like(y))
        assert called == {"_exchange": 1}
        torch.testing.assert_close(layer.running_mean, torch.cat(batches).mean(0).detach())
        means = TorchCommunicator(dist.group.WORLD).all_gather(layer.running_mean)
        assert torch.equal(means[0], means[1]), "ranks have other bits"
