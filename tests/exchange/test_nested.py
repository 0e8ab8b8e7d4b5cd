"""Ranks that say that they are on several hosts: what crosses is what collectives of the whole group give, and what one
rank learns, all learn. ``test_hosts.py`` has hosts in namespaces.
"""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

import bagua_syncbn
from bagua_syncbn import SyncBatchNorm
from bagua_syncbn.communicators import TorchCommunicator, hosts, shared
from bagua_syncbn.communicators.c10d import communicator_of
from tests.helpers.observed import GATHER, collectives
from tests.helpers.told import message_of

pytestmark = pytest.mark.skipif(bool(shared.problem()), reason=shared.problem() or "none")
SECONDS = 300.0  # time-out of jobs in which a rank ends
GATHERS, SUMS = True, False


def over(places, group=None, **options):
    """Returns the communicator of ranks of which rank r is on host ``places[r]``."""
    group = group or dist.new_group(**options)
    away = patch.object(shared, "share", lambda *_: ("on other hosts", None))  # the whole group's attempt alone
    with away, patch.object(hosts, "host_name", lambda: (places[dist.get_rank()], "")):
        return communicator_of(group)


def have_same_bits(value):
    rows = TorchCommunicator(dist.group.WORLD).all_gather(value.contiguous().view(-1).clone())
    return all(torch.equal(row, rows[0]) for row in rows)


# Values


PLACES = ["aabb", "abab", "abbb", "baabb", "abacb", "abcca"]


def gives_what_collectives_give(places, dtype, values, beginner):
    communicator, packed = over(places), torch.randn(values, dtype=dtype)
    assert type(communicator) is hosts.HostsCommunicator
    whole = TorchCommunicator(dist.group.WORLD)
    for _ in range(2):  # a group goes on after a message that was only begun
        if dist.get_rank() == beginner:
            begun = communicator.begin_all_gather(packed.clone()), communicator.begin_all_reduce(packed.clone())
            gathered, total = (one.wait() for one in begun)
        else:
            gathered, total = communicator.all_gather(packed.clone()), communicator.all_reduce(packed.clone())
        assert torch.equal(gathered, whole.all_gather(packed.clone()))
        torch.testing.assert_close(total, whole.all_reduce(packed.clone()))
        assert total.shape == packed.shape
        assert have_same_bits(total), "ranks have other bits"


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(("dtype", "values"), [
    (torch.float32, 0), (torch.float32, 1), (torch.float64, 3), (torch.float32, 1021), (torch.float64, 2**14),
    (torch.float16, 5),
], ids=str)  # fmt: skip
def test_hosts_give_what_collectives_give(pool, places, dtype, values):
    pool.run(gives_what_collectives_give, len(places), places, dtype, values, None)


@pytest.mark.parametrize("beginner", range(5))
def test_a_message_that_one_rank_only_begins_reaches_all(pool, beginner):
    pool.run(gives_what_collectives_give, 5, "baabb", torch.float32, 9, beginner)


@pytest.mark.ranks(4)
def test_each_host_sends_one_message():
    communicator, packed = over("abba"), torch.ones(5)
    with collectives() as called:
        communicator.all_gather(packed)
        communicator.all_reduce(packed)
    assert called == {"_exchange": 4, **({GATHER: 2} if dist.get_rank() < 2 else {})}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("gathers", [GATHERS, SUMS])
@pytest.mark.parametrize("more", [0, 1])
def test_messages_that_do_not_fit_behind_a_slot_take_collectives(gathers, more):
    communicator, slot = over("aab"), shared.MOST_BYTES // 8
    packed = torch.ones((slot // 3 if gathers else slot) - 1 + more, dtype=torch.float64)
    with collectives() as called:
        result = (communicator.all_gather if gathers else communicator.all_reduce)(packed)
    assert called["_exchange"] == (0 if more else 2)
    assert (result == (1 if gathers else 3)).all()


@pytest.mark.ranks(4)
def test_negative_zeros_and_nan_arrive_on_all_ranks():
    communicator = over("aabb")
    packed = torch.tensor([0.0, -torch.inf, torch.nan if dist.get_rank() == 3 else 1.0])
    total = communicator.all_reduce(packed.clone())
    assert total[:2].tolist() == [0, -torch.inf]
    assert total[2].isnan()
    assert communicator.all_gather(packed.clone())[:, 2].isnan().tolist() == [False, False, False, True]


@pytest.mark.ranks(4)
def test_two_groups_at_once_do_not_meet():
    communicators, results = [over("aabb"), over("abab")], {}
    rank = dist.get_rank()

    def send(number):
        values = [communicators[number].all_gather(torch.tensor([10.0 * number + rank + n])) for n in range(50)]
        results[number] = torch.stack(values)[..., 0]

    threads = [threading.Thread(target=send, args=(number,)) for number in ((0, 1) if rank % 2 else (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (0, 1):
        expected = 10 * number + torch.arange(4) + torch.arange(50)[:, None]
        assert torch.equal(results[number], expected.float())


# Agreement


@pytest.mark.ranks(4)
@pytest.mark.parametrize("places", ["aaaa", "abcd"])
def test_one_host_or_ranks_alone_on_theirs_do_not_nest(places):
    assert type(over(places)) is TorchCommunicator


def no_native():
    return None


@pytest.mark.ranks(4)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("name", "value"), [("_WANTED", "collectives"), ("native_library", no_native)])
def test_all_hosts_share_memory_or_none(rank, name, value):
    with patch.object(shared, name, value) if dist.get_rank() == rank else nullcontext():
        communicator = over("aabb")
    assert type(communicator) is TorchCommunicator
    assert communicator.all_gather(torch.ones(2)).tolist() == [[1.0, 1.0]] * 4


@pytest.mark.ranks(4)
def test_the_log_says_how_hosts_exchange():
    with patch.object(shared, "_log") as log:
        over("aabb")
    *_, said = (call.args[0] % call.args[1:] for call in log.debug.call_args_list)
    assert f"rank {dist.get_rank()} of 4: through shared memory on each of 2 hosts" in said


# Layers


@pytest.mark.ranks(5, new_job=True)
@pytest.mark.parametrize("places", ["abacb", "aabbb"])
def test_a_layer_over_hosts_equals_one_process(places):
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(3)
    batches, grads = (
        [torch.randn(samples, 6, generator=generator, dtype=torch.float64) + 2 for samples in (3, 0, 5, 1, 2)]
        for _ in range(2)
    )
    first = sum(map(len, batches[:rank]))
    results = []
    for layer, x, grad, part in (
        (SyncBatchNorm(6, process_group=over(places)), batches[rank], grads[rank], slice(None)),
        (torch.nn.BatchNorm1d(6), torch.cat(batches), torch.cat(grads), slice(first, first + len(batches[rank]))),
    ):
        layer, x = layer.double(), x.clone().requires_grad_()
        for _ in range(3):
            x.grad = None
            y = layer(x)
            y.backward(grad)
        results.append([y[part], x.grad[part], layer.running_mean, layer.running_var])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("raising", [(0,), (1,), (0, 3), (1, 2, 3), (0, 1, 2, 3)], ids=str)
def test_ranks_that_raise_tell_all_and_all_that_raised_go_on(raising):
    layer, x = bagua_syncbn.SyncBatchNorm1d(3, process_group=over("aabb")), torch.randn(4, 3)
    for _ in range(3):
        layer(x)
    raises = dist.get_rank() in raising
    if raises:
        with pytest.raises(ValueError, match="expected 2D or 3D input"):
            layer(torch.randn(4))
    told = message_of(layer, x)
    if len(raising) == 4:
        assert told == "none"
    else:
        who = {(0,): "rank 0", (1,): "rank 1", (0, 3): "ranks 0, 3", (1, 2, 3): "ranks 1-3"}[raising]
        assert f"{who}: ValueError in SyncBatchNorm1d, call 4: expected 2D or 3D input" in told


@pytest.mark.ranks(4)
def test_compiled_and_eager_calls_over_hosts_go_the_same_way():
    layer, rank = SyncBatchNorm(8, momentum=1.0, process_group=over("abba")), dist.get_rank()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for step in range(4):
        batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + each)) for each in range(4)]
        y = (compiled if (step + rank) % 2 or step < 2 else layer)(batches[rank].requires_grad_())
        with collectives() as called:
            y.backward(torch.ones_like(y))
        assert called == {"_exchange": 2, **({GATHER: 1} if rank < 2 else {})}
        torch.testing.assert_close(layer.running_mean, torch.cat(batches).mean(0).detach())
        assert have_same_bits(layer.running_mean), "ranks have other bits"


@pytest.mark.ranks(4)
@pytest.mark.parametrize("beginner", [0, 1])
def test_compiled_ranks_get_a_message_that_an_eager_one_only_begins(beginner):
    communicator, rank = over("aabb"), dist.get_rank()
    compiled = torch.compile(lambda x: (communicator.all_gather(x), communicator.all_reduce(x)), backend="aot_eager")
    packed = torch.full((3,), float(rank))
    with torch.no_grad():
        for _ in range(2):
            if rank == beginner:
                gathered = communicator.begin_all_gather(packed.clone()).wait()
                total = communicator.begin_all_reduce(packed.clone()).wait()
            else:
                gathered, total = compiled(packed.clone())
            assert gathered.tolist() == [[r] * 3 for r in range(4)]
            assert total.tolist() == [6.0] * 3


# Errors


@pytest.mark.ranks(4)
def test_why_a_carrier_fails_is_told_to_all():
    communicator, rank = over("abba"), dist.get_rank()  # rank 3 has the segment of rank 0, rank 2 that of rank 1
    if rank == 1:
        broken = Mock(side_effect=RuntimeError("the cable of rank 1 is cut"))
        with patch.object(TorchCommunicator, "all_gather", broken), pytest.raises(RuntimeError, match="is cut"):
            communicator.all_gather(torch.ones(2))
        return
    begin = time.monotonic()
    told = message_of(communicator.all_gather, torch.ones(2))
    if rank == 2:
        assert told == "rank 1 has left the group: the cable of rank 1 is cut"
    else:  # rank 3 by rank 0, which has been told by rank 1
        assert told.endswith("rank 1 has left the group: the cable of rank 1 is cut")
    assert time.monotonic() - begin < 60
    assert "destroyed" in message_of(communicator.all_gather, torch.ones(2))


@pytest.mark.ranks(4)
def test_ranks_of_a_host_that_send_other_messages_are_named_by_their_numbers_in_the_group():
    communicator, rank = over("aabb"), dist.get_rank()
    told = message_of(communicator.all_gather if rank == 3 else communicator.all_reduce, torch.ones(2))
    assert "rank 2: sums 3 float32; rank 3: gathers 3 float32" in told


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_the_time_out_of_hosts_is_that_of_the_group():
    communicator, rank = over("aabb", timeout=timedelta(seconds=2)), dist.get_rank()
    begin = time.monotonic()
    told = message_of(communicator.all_gather, torch.ones(2)) if rank != 3 else ""
    assert time.monotonic() - begin < 60
    dist.barrier()  # no rank ends before the others have been told
    if rank == 3:
        return
    if rank == 2:
        assert told == "rank 3 of the group did not come within the time-out"
    else:
        assert "Timed out" in told or "rank 3 of the group did not come" in told


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
def test_all_ranks_over_hosts_learn_soon_of_one_that_ends(context, tmp_path, ending, how):
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
        else:  # as gloo says it
            assert "Connection" in message


@pytest.mark.ranks(4)
def test_a_second_thread_is_refused_while_one_waits_for_other_hosts():
    group = dist.new_group()
    communicator, rank = over("aabb", group), dist.get_rank()
    store = dist.distributed_c10d._world.pg_map[group][1]
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


@pytest.mark.ranks(4)
def test_a_forked_child_over_hosts_is_refused_and_leaves_the_group_to_its_parent():
    communicator, (reader, writer) = over("aabb"), os.pipe()
    communicator.all_reduce(torch.ones(1))
    if os.fork() == 0:
        signal.alarm(20)
        os.write(writer, message_of(communicator.all_gather, torch.ones(2)).encode())
        os._exit(0)
    os.wait()
    assert "got one in a forked child of it" in os.read(reader, 1000).decode()
    time.sleep(0.8 * (dist.get_rank() == 2))  # so that others wait, and look for ranks that have left
    assert communicator.all_reduce(torch.ones(1)) == 4


# Lives


@pytest.mark.ranks(4)
def test_groups_over_hosts_end_with_the_group_whatever_lives_on():
    def held():
        maps = Path("/proc/self/maps").read_text().count("memfd:bagua_syncbn")
        return maps, len(dist.distributed_c10d._world.pg_map)

    before = held()
    for _ in range(3):
        group = dist.new_group()
        layer = SyncBatchNorm(3, process_group=over("aabb", group))
        output = layer(torch.randn(4, 3, requires_grad=True))
        assert held() == (before[0] + 1, before[1] + (2 if dist.get_rank() % 2 == 0 else 1))
        dist.destroy_process_group(group)
        del group
        assert held() == before, "a destroyed group keeps its memory or its carriers"
    assert "destroyed" in message_of(output.sum().backward)
