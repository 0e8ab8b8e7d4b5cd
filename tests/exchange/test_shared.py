"""Who exchanges through shared memory is agreed upon, and what crosses there is what the group's collectives give."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from observed import collectives
from own_groups import communicator_of as layers_communicator

from bagua_syncbn import SyncBatchNorm
from bagua_syncbn.communicators import SharedCommunicator, TorchCommunicator, communicator_of, shared
from bagua_syncbn.torch_internals import backend_and_store

pytestmark = pytest.mark.skipif(bool(shared.problem()), reason=shared.problem() or "none")

# Values


def both_ways(dtype, values, begins):
    """Returns what a gather and a sum give, each through shared memory and by collectives."""
    group = dist.new_group()
    results = []
    for communicator in (communicator_of(group), TorchCommunicator(group)):
        torch.manual_seed(dist.get_rank())
        packed = torch.randn(values, dtype=dtype)
        if begins:
            begun = communicator.begin_all_gather(packed.clone()), communicator.begin_all_reduce(packed.clone())
            results.append([one.wait() for one in begun])
        else:
            results.append([communicator.all_gather(packed.clone()), communicator.all_reduce(packed.clone())])
    return results


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(("dtype", "values"), [
    (torch.float32, 0), (torch.float32, 1), (torch.float64, 3), (torch.float32, 1021),
    (torch.float64, 2**13), (torch.float64, 2**13 + 1), (torch.float16, 5),
], ids=str)  # fmt: skip
def test_what_crosses_is_what_collectives_give(pool, dtype, values, begins):
    results = pool.run(both_ways, 3, dtype, values, begins)
    for (gathered, total), (expected, expected_total) in results:
        assert torch.equal(gathered, expected)
        torch.testing.assert_close(total, expected_total)
    first = results[0][0][1]
    assert all(torch.equal(total, first) for (_, total), _ in results), "ranks have other bits"


def strided():
    communicator = communicator_of(dist.new_group())
    packed = torch.arange(6.0)[::2]
    begun = communicator.begin_all_gather(packed), communicator.begin_all_reduce(packed)
    results = [one.wait() for one in begun]
    return [*results, communicator.all_gather(packed), communicator.all_reduce(packed)]


def test_messages_need_not_be_contiguous(pool):
    for results in pool.run(strided, 2):
        gathered, total = torch.tensor([[0.0, 2.0, 4.0]] * 2), torch.tensor([0.0, 4.0, 8.0])
        assert all(map(torch.equal, results, [gathered, total] * 2))


def ways_by_size():
    communicator = communicator_of(dist.new_group())
    most = shared._MOST_BYTES // 4
    counts = []
    for values in (most, most + 1):
        with collectives() as called:
            communicator.all_gather(torch.ones(values))
            communicator.all_reduce(torch.ones(values))
        counts.append(dict(called))
    return counts


def test_messages_larger_than_a_slot_take_collectives(pool):
    for fits, is_larger in pool.run(ways_by_size, 2):
        assert fits == {"_exchange": 2}
        assert "_exchange" not in is_larger
        assert sum(is_larger.values()) == 2


# Agreement


def way_where(rank, name, value):
    """Returns how the ranks exchange where ``shared``'s ``name`` is another on one rank, and that it works."""
    here = dist.get_rank() == rank
    with patch.object(shared, name, value) if here else patch.object(shared, "_log", shared._log):
        communicator = communicator_of(dist.new_group())
    return isinstance(communicator, SharedCommunicator), communicator.all_gather(torch.ones(2)).tolist()


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


@pytest.mark.parametrize(("rank", "name", "value"), [
    (None, "_WANTED", "shared"),
    *((rank, name, value) for rank in (0, 1, 2) for name, value in (
        ("_WANTED", "collectives"), ("_native", no_native), ("_native", full))),
])  # fmt: skip
def test_all_ranks_share_memory_or_none(pool, rank, name, value):
    assert pool.run(way_where, 3, rank, name, value) == [(rank is None, [[1.0, 1.0]] * 3)] * 3


def lying_place():
    """Rank 0 says that its memory is where another file is, and then another memory of this package's."""
    native = shared._native()
    ways = []
    for other in (Path(os.devnull).open(), native.make_segment("bagua_syncbn:other", 2)):  # noqa: SIM115
        place = f"/proc/{os.getpid()}/fd/{other.fileno()}" if hasattr(other, "fileno") else other[1]

        class Lying:
            exchange = None
            start_segment = native.start_segment

            @staticmethod
            def make_segment(name, ranks, place=place):
                return native.make_segment(name, ranks)[0], place

        lies = dist.get_rank() == 0
        with patch.object(shared, "_native", lambda lying=Lying: lying) if lies else patch.object(shared, "_log"):
            ways.append(type(communicator_of(dist.new_group())))
    return ways


def test_other_memory_is_not_taken_for_that_of_the_group(pool):
    assert pool.run(lying_place, 2) == [[TorchCommunicator] * 2] * 2


def said():
    with patch.object(shared, "_log") as log:
        communicator_of(dist.new_group())
        communicator_of(dist.new_group(backend="fake"))
        return [call.args[0] % call.args[1:] for call in log.debug.call_args_list]


def test_one_line_of_the_log_says_which_way_and_why(pool):
    for rank, (first, second) in enumerate(pool.run(said, 2)):
        assert f"rank {rank} of 2: through shared memory" in first
        assert "through collectives: its messages on CPU do not go over gloo" in second


NAMESPACES = {"mount": ["unshare", "-m"], "process": ["unshare", "--fork", "-p", "--mount-proc"]}
PROGRAM = """
import sys, torch, torch.distributed as dist
from bagua_syncbn.communicators import communicator_of
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


def message_of(function, *arguments):
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    return "none"


def differing(one, other):
    """Returns what the ranks get told where the last one sends ``other``, and that the group goes on."""
    communicator = communicator_of(dist.new_group())
    is_last = dist.get_rank() == dist.get_world_size() - 1
    told = message_of(exchange_by_hand, communicator, *(other if is_last else one))
    return told, communicator.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize(("one", "other", "shown"), [
    ((0, 5), (1, 5), "rank 0: gathers 5 float32; rank 1: gathers 5 float32; rank 2: sums 5 float32"),
    ((1, 5), (1, 6), "rank 0: sums 5 float32; rank 1: sums 5 float32; rank 2: sums 6 float32"),
    ((0, 5), (0, 5), "none"),
])  # fmt: skip
def test_ranks_that_differ_are_all_told_what_each_did(pool, one, other, shown):
    for told, total in pool.run(differing, 3, one, other):
        assert told == shown or told.endswith(shown)
        assert total == 3


def refused():
    communicator = communicator_of(dist.new_group())
    for _ in range(2):
        last = communicator.begin_all_gather(torch.ones(2))
    messages = [
        message_of(communicator.begin_all_gather, torch.ones(2)),
        message_of(communicator.all_gather, torch.ones(2)),
        message_of(exchange_by_hand, communicator, 5, 1),
        message_of(exchange_by_hand, communicator, 0, 2**15),
    ]
    last.wait(), last.wait()
    return [*messages, message_of(last.wait)]


def test_calls_out_of_order_are_refused_and_send_nothing(pool):
    for more, other, kind, size, none in pool.run(refused, 2):
        assert "2 messages that were begun before, got one more" in more
        assert "begun to be collected" in other
        assert "begun to be collected" in kind
        assert "begun to be collected" in size
        assert "begun, got none" in none


def in_child(communicator):
    """Returns what a forked child is told, and whether the ranks go on after it has ended."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, message_of(communicator.all_gather, torch.ones(2)).encode())
        os._exit(0)
    os.wait()
    return os.read(reader, 1000).decode(), communicator.all_reduce(torch.ones(1)).item()


def forks():
    return in_child(layers_communicator())


def test_a_forked_child_is_refused_by_name(pool):
    for told, total in pool.run(forks, 2):
        assert "got one in a forked child of it" in told
        assert total == 2


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
    assert seconds < 10


def late():
    group = dist.new_group(timeout=timedelta(seconds=1))
    communicator = communicator_of(group)
    if dist.get_rank() == 1:
        return ""
    begin = time.monotonic()
    told = message_of(communicator.all_gather, torch.ones(2))
    return f"{told} {time.monotonic() - begin < 20}"


def test_the_time_out_is_that_of_the_group(pool):
    assert pool.run(late, 2)[0] == "rank 1 of the group did not come within the time-out True"


# Lives


def held():
    """Returns the descriptors and the mappings of this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:bagua_syncbn")
    return len(os.listdir("/proc/self/fd")), maps


def many_segments(times):
    group = dist.new_group()
    shared._agree(group)
    before = held()
    for _ in range(times):
        reason, segment = shared._agree(group)
        assert not reason, reason
    del segment
    return before, held()


@pytest.mark.parametrize("times", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_what_has_ended_leaves_nothing(pool, times):
    for before, after in pool.run(many_segments, 2, times):
        assert after == before


def groups_made_and_destroyed(times):
    before = held()[1]
    for _ in range(times):
        group = dist.new_group()
        layer = SyncBatchNorm(3, process_group=communicator_of(group))
        output = layer(torch.randn(4, 3, requires_grad=True))
        held_meanwhile = held()[1]
        dist.destroy_process_group(group)
        del group
        assert held()[1] == before, "a destroyed group keeps its memory"
    told = message_of(output.sum().backward)
    return held_meanwhile - before, told


def test_a_destroyed_group_frees_its_memory_whatever_lives_on(pool):
    for held_meanwhile, told in pool.run(groups_made_and_destroyed, 2, 5):
        assert held_meanwhile == 1
        assert "destroyed" in told


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


def compiled_and_eager():
    """The first rank runs compiled code, the last one the same as it is written; then the other way round."""
    layer = SyncBatchNorm(8, momentum=1.0)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    means = []
    for step in range(4):
        torch.manual_seed(dist.get_rank() + 10 * step)
        x = torch.randn(4, 8, requires_grad=True)
        y = (compiled if (step + dist.get_rank()) % 2 or step < 2 else layer)(x)
        with collectives() as called:
            y.backward(torch.ones_like(y))
        means.append((layer.running_mean.tolist(), dict(called)))
    return means


def test_compiled_and_eager_calls_go_the_same_way(pool):
    first, second = pool.run(compiled_and_eager, 2)
    for step, ((mean, called), (other, _)) in enumerate(zip(first, second, strict=True)):
        expected = torch.cat(
            [torch.randn(4, 8, generator=torch.Generator().manual_seed(rank + 10 * step)) for rank in (0, 1)]
        )
        assert mean == other
        torch.testing.assert_close(torch.tensor(mean), expected.mean(0))
        assert called == {"_exchange": 1}
