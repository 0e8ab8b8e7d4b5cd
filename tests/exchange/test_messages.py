"""Messages through shared memory equal those of the group's collectives, on one host and over several."""

import os
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from bagua_syncbn import SyncBatchNorm
from bagua_syncbn.communicators import TorchCommunicator, hosts, shared
from tests.exchange.places import have_same_bits, is_over, needs_shared_memory, over
from tests.helpers.cases import Case, compare, run_rank
from tests.helpers.messages import message_of
from tests.helpers.observed import GATHER, collectives
from tests.helpers.own_groups import communicator_of

pytestmark = needs_shared_memory

# Values


def messages_equal_collectives(places, dtype, values, beginners):
    communicator, packed = over(places), torch.randn(values, dtype=dtype) + dist.get_rank()
    assert is_over(places, communicator)
    whole = TorchCommunicator(dist.group.WORLD)

    def copy():  # all_reduce may overwrite it; small messages may be strided
        return packed.clone() if values > 9 else packed.repeat_interleave(2)[::2]

    for _ in range(2):  # a group still works after an unfinished message
        if str(dist.get_rank()) in beginners:
            begun = communicator.begin_all_gather(copy()), communicator.begin_all_reduce(copy())
            gathered, total = (one.wait() for one in begun)
        else:
            gathered, total = communicator.all_gather(copy()), communicator.all_reduce(copy())
        assert torch.equal(gathered, whole.all_gather(packed))
        torch.testing.assert_close(total, whole.all_reduce(packed.clone()))
        assert total.shape == packed.shape
        assert have_same_bits(total)


@pytest.mark.parametrize("places", ["aaa", "abbb", "baabb", "abacb"])
@pytest.mark.parametrize(("dtype", "values"), [
    (torch.float32, 0), (torch.float32, 1), (torch.float64, 3), (torch.float32, 1021),
    (torch.float64, 2**13), (torch.float64, 2**13 + 1), (torch.float16, 5),
], ids=str)  # fmt: skip
def test_messages_equal_those_of_collectives(pool, places, dtype, values):
    pool.run(messages_equal_collectives, len(places), places, dtype, values, "")


@pytest.mark.parametrize("beginners", ["0", "012"])
def test_ranks_may_begin_messages_without_waiting(pool, beginners):
    pool.run(messages_equal_collectives, 3, "aaa", torch.float32, 9, beginners)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("places", "cores", "seconds", "spins"), [
    ("aaa", 2, 60, False), ("aaa", 3, 60, True), ("aab", 2, 61, True),
])  # fmt: skip
def test_ranks_wait_until_the_groups_timeout_and_spin_only_if_each_has_a_core(places, cores, seconds, spins):
    """Between hosts, they wait a second longer, for a carrier's error."""
    affinity = patch.object(os, "sched_getaffinity", Mock(return_value=set(range(cores))))
    with affinity, patch.object(hosts, "share", wraps=hosts.share) as share:
        over(places, timeout=timedelta(seconds=60))
    assert share.call_args.args[-2:] == (seconds, spins)


@pytest.mark.ranks(4)
def test_each_host_sends_at_most_one_message():
    communicator, packed = over("abba"), torch.ones(5)
    with collectives() as called:
        communicator.all_gather(packed)
        communicator.all_reduce(packed)
    assert called[GATHER] == (2 if dist.get_rank() < 2 else 0)
    assert sum(called.values()) <= 6


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("places", "name", "most"), [
    ("aaa", "all_gather", 2**13), ("aaa", "all_reduce", 2**13),
    ("aaa", "begin_all_gather", 2**13), ("aaa", "begin_all_reduce", 2**13),
    ("aab", "all_gather", 2**13 // 3), ("aab", "all_reduce", 2**13),
])  # fmt: skip
def test_messages_that_do_not_fit_a_slot_take_collectives(places, name, most):
    communicator = over(places)
    for values in (most, most + 1):
        with collectives() as called:
            result = getattr(communicator, name)(torch.ones(values, dtype=torch.float64))
            result = result.wait() if name.startswith("begin") else result
        assert bool(called.keys() & {"exchange", "publish"}) is (values == most)
        assert (result == (1 if "gather" in name else 3)).all()


# Agreement


class Full:
    """The library, as on a system without free memory."""

    def __getattr__(self, name):
        def fail(*_):
            raise RuntimeError("posix_fallocate: No space left on device")

        return fail


@pytest.mark.ranks(3)
@pytest.mark.parametrize("places", ["aaa", "aab"])
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("lacks", ["wish", "library", "memory"])
def test_all_ranks_share_memory_or_none(places, rank, lacks):
    library = Full() if lacks == "memory" else None
    patched = ("_WANTED", "collectives") if lacks == "wish" else ("native_library", lambda: library)
    with patch.object(shared, *patched) if dist.get_rank() == rank else nullcontext():
        communicator = over(places)
    assert type(communicator) is TorchCommunicator
    assert communicator.all_gather(torch.ones(2)).tolist() == [[1.0, 1.0]] * 3


@pytest.mark.ranks(4)
def test_a_host_for_each_rank_needs_no_shared_memory():
    assert type(over("abcd")) is TorchCommunicator


@pytest.mark.ranks(2)
def test_a_file_that_is_not_the_groups_memory_is_refused():
    """Rank 0 sends the place of an unrelated file, and of an unrelated group's memory."""
    native = shared.native_library()
    with Path(os.devnull).open() as file:
        other, place = native.map_segment("bagua_syncbn:other", bytes(8), 1.0, False, 0, "")
        for wrong in (f"/proc/{os.getpid()}/fd/{file.fileno()}", place):
            lying = Mock(map_segment=Mock(return_value=(other, wrong)))
            patched = patch.object(shared, "native_library", Mock(return_value=lying))
            with patched if dist.get_rank() == 0 else nullcontext():
                assert type(communicator_of(dist.new_group())) is TorchCommunicator


@pytest.mark.ranks(4)
def test_the_log_says_how_messages_travel_and_why():
    rank = dist.get_rank()
    with patch.object(hosts, "_log") as log:
        communicator_of(dist.new_group())
        over("aabb")
        communicator_of(dist.new_group(backend="fake"))
        with patch.object(hosts, "problem", Mock(return_value=f"reason {rank}" if rank % 3 else "")):
            communicator_of(dist.new_group())
    lines = [call.args[0] % call.args[1:] for call in log.debug.call_args_list]
    for text in ("shared memory", "collectives: its CPU messages do not go over gloo", "collectives: rank 1: reason 1"):
        assert any(line.endswith(f"rank {rank} of 4: through {text}") for line in lines)


# Layers


CASE = Case((3, 0, 5, 1, 2), (6,), torch.float64)


def train_over(places):
    return run_rank(CASE, over(places))


@pytest.mark.parametrize("places", ["abacb", "aabbb"])
def test_a_layer_over_hosts_equals_one_process(pool, places):
    compare(CASE, pool.run(train_over, 5, places))


def compiled_and_eager_calls(places):
    layer, rank, size = SyncBatchNorm(8, momentum=1.0, process_group=over(places)), dist.get_rank(), len(places)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for step in range(4):
        batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + each)) for each in range(size)]
        y = (compiled if (step + rank) % 2 or step < 2 else layer)(batches[rank].requires_grad_())
        with collectives() as called:
            y.backward(torch.ones_like(y))
        assert called["exchange"] == (len(set(places)) == 1)
        assert called["publish"] == 2 * (len(set(places)) > 1)
        torch.testing.assert_close(layer.running_mean, torch.cat(batches).mean(0).detach())
        assert have_same_bits(layer.running_mean)


@pytest.mark.parametrize("places", ["aa", "abba"])
def test_compiled_and_eager_ranks_exchange_the_same_messages(pool, places):
    pool.run(compiled_and_eager_calls, len(places), places)


@pytest.mark.ranks(2)
def test_compiled_ranks_get_a_message_that_an_eager_one_begins():
    communicator, rank = over("aa"), dist.get_rank()
    compiled = torch.compile(lambda x: (communicator.all_gather(x), communicator.all_reduce(x)), backend="aot_eager")
    packed = torch.full((3,), float(rank))
    with torch.no_grad():
        for _ in range(2):
            if rank == 0:
                begun = communicator.begin_all_gather(packed.clone()), communicator.begin_all_reduce(packed.clone())
                gathered, total = (one.wait() for one in begun)
            else:
                gathered, total = compiled(packed.clone())
            assert gathered.tolist() == [[0.0] * 3, [1.0] * 3]
            assert total.tolist() == [1.0] * 3


# Lifetimes


def held():
    """Returns the shared memory and the groups of this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:bagua_syncbn")
    files = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # a thread of torch closed it
            files += "memfd:bagua_syncbn" in str(link.readlink())
    return maps, files, len(dist.distributed_c10d._world.pg_map)


def groups_come_and_go(places, times):
    before = held()
    for _ in range(times):
        group = dist.new_group()
        layer = SyncBatchNorm(3, process_group=over(places, group))
        output = layer(torch.randn(4, 3, requires_grad=True))
        assert held()[:2] == (before[0] + 1, before[1] + 1)
        dist.destroy_process_group(group)
        del group
        assert held() == before, "a destroyed group keeps its memory or its carriers"
    assert "destroyed" in message_of(output.sum().backward)


@pytest.mark.parametrize("times", [5, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("places", ["aa", "aabb"])
def test_a_destroyed_group_leaves_nothing_even_if_its_layer_lives_on(pool, places, times):
    pool.run(groups_come_and_go, len(places), places, times)
