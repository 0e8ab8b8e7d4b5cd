"""Which ranks a process group argument leads to, and when; what is refused; how they exchange."""

import copy
import gc
import pickle
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from observed import GATHER, collectives
from own_groups import communicator_of, forget_groups, mean_over
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from training import through_file

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, sync_batch_norm, sync_group, torch_internals
from bagua_syncbn.communicators import (
    LOCAL,
    Communicator,
    RankGroup,
    TorchCommunicator,
    c10d,
    groups,
)

# Groups by description


def ranks_of(process_group):
    return dist.get_process_group_ranks(sync_group(process_group))


@pytest.mark.parametrize(("process_group", "expected"), [
    (2, [[0, 1], [2, 3]]),
    (1, [[0], [1], [2], [3]]),
    (4, [[0, 1, 2, 3]]),
    ([[3, 0], [1, 2]], [[0, 3], [1, 2]]),
    (((0,), (1, 2, 3)), [[0], [1, 2, 3]]),
    ("node", [[0, 1, 2, 3]]),
], ids=str)  # fmt: skip
def test_each_description_stands_for_its_ranks(pool, process_group, expected):
    groups_of = {rank: ranks for ranks in expected for rank in ranks}
    assert pool.run(ranks_of, 4, process_group) == [groups_of[rank] for rank in range(4)]
    means = pool.run(mean_over, 4, process_group)
    assert means == pytest.approx([sum(groups_of[rank]) / len(groups_of[rank]) for rank in range(4)])


def on_hosts(number):
    exchanges = []
    host, exchange = groups._host, c10d.Job.exchange

    def counted(*args):
        exchanges.append(args)
        return exchange(*args)

    forget_groups()
    groups._host = lambda: (f"host {dist.get_rank() % number}", "")
    c10d.Job.exchange = counted
    try:
        return ranks_of("node"), [mean_over("node") for _ in range(3)], len(exchanges)
    finally:
        groups._host, c10d.Job.exchange = host, exchange
        forget_groups()


@pytest.mark.parametrize("number", [1, 2, 4])
def test_the_ranks_of_a_host_are_asked_for_once(pool, number):
    for rank, (ranks, means, exchanges) in enumerate(pool.run(on_hosts, 4, number)):
        assert ranks == list(range(rank % number, 4, number))
        assert means == [sum(ranks) / len(ranks)] * 3
        assert exchanges == 1


def shared():
    forget_groups()
    known = dist.distributed_c10d._world.pg_names
    before = len(known)
    pairs = [[1, 2], [3, 0]]
    model = nn.Sequential(*(nn.BatchNorm1d(1) for _ in range(3)))
    convert_sync_batchnorm(model, pairs)
    model(torch.randn(3, 1))
    copy.deepcopy(model)(torch.randn(3, 1))
    of_layers = len(known) - before
    assert sync_group(4) is dist.group.WORLD
    assert sync_group(pairs) is sync_group([[0, 3], [2, 1]])
    assert sync_group(pairs) is not communicator_of(pairs).group is communicator_of([[3, 0], [1, 2]]).group
    assert sync_group(2) is sync_group([[0, 1], [2, 3]])
    return of_layers, len(known) - before


def test_layers_and_copies_share_a_group_that_is_made_once(pool):
    # For the layers, of all ranks and of two pairs, and for the user of the two.
    assert pool.run(shared, 4) == [(1, 5)] * 4


def alone_together():
    """Whether each way to say who gives a group that nobody else uses, and that is as the one it stands for."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    kinds = (None, dist.group.WORLD, 4, mine, copy.deepcopy(SyncBatchNorm(1, process_group=mine)).process_group, 2)
    made = [communicator_of(kind).group for kind in (*kinds, [[0, 1], [2, 3]])]
    assert made[0] is made[1] is made[2] is not dist.group.WORLD
    assert made[3] is made[4]
    assert made[5] is made[6]
    assert len({*map(id, made), id(mine)}) == 4
    exactly = TorchCommunicator(mine)
    layer = SyncBatchNorm(1, process_group=exactly)
    assert layer.process_group is copy.deepcopy(layer).process_group is exactly
    assert exactly.group is mine
    with pytest.raises(TypeError, match=r"got TorchCommunicator\(ranks=\(\d, \d\)\), which is one group"):
        pickle.dumps(layer)
    return {dist.get_backend(group) for group in made}, repr(layer)


def test_layers_have_groups_of_their_own(pool):
    for rank, (backends, text) in enumerate(pool.run(alone_together, 4)):
        assert backends == {"gloo"}
        assert f"process_group=TorchCommunicator(ranks={(rank // 2 * 2, rank // 2 * 2 + 1)})" in text


def in_different_numbers_of_groups():
    """Rank 0 is in more groups than rank 1; members make the group of the layers, in whatever order."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return [mean_over(first)]
    if dist.get_rank() == 2:
        return [mean_over(second)]
    return [mean_over(second), mean_over(first)]


def test_members_alone_make_the_groups_of_their_layers(pool):
    assert pool.run(in_different_numbers_of_groups, 3) == [[1.0, 0.5], [0.5], [1.0]]


STEPS = 4


def in_threads(kind):
    """Each thread trains a model of its own, in a group of its own; returns what each has computed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    threads = 4
    groups = {
        "ranks": lambda: dist.new_group([0, 1]),
        "all": dist.new_group,
        "local": lambda: dist.new_group([0, 1], use_local_synchronization=True),
    }
    groups = [groups[kind]() for _ in range(threads)]
    forget_groups()

    def train(index):
        layer = nn.BatchNorm1d(index + 1).double()
        # A copy too keeps to the group that was given.
        layer = copy.deepcopy(convert_sync_batchnorm(nn.Sequential(layer), groups[index]))[0]
        inputs, grads = batches_of_thread(index, size)
        results = []
        for step in range(STEPS):
            time.sleep(0.002 * ((index + rank) % threads))
            x = inputs[step, rank].clone().requires_grad_()
            y = layer(x)
            y.backward(grads[step, rank])
            results.append((y.detach(), x.grad))
        return results, layer.running_var

    with ThreadPoolExecutor(threads) as pool:
        # In another order on each rank.
        answers = {index: pool.submit(train, index) for index in sorted(range(threads), reverse=bool(rank))}
        return [answers[index].result() for index in range(threads)]


def batches_of_thread(index, size):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(2, STEPS, size, 3, index + 1, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("kind", ["ranks", "all", "local"])
def test_threads_with_groups_of_their_own_are_jobs_of_their_own(pool, kind):
    for rank, threads in enumerate(pool.run(in_threads, 2, kind)):
        for index, (results, running_var) in enumerate(threads):
            reference = nn.BatchNorm1d(index + 1).double()
            for result, x, grad in zip(results, *batches_of_thread(index, 2), strict=True):
                x = x.flatten(0, 1).requires_grad_()
                y = reference(x)
                y.backward(grad.flatten(0, 1))
                torch.testing.assert_close(result, (y.detach().chunk(2)[rank], x.grad.chunk(2)[rank]))
            torch.testing.assert_close(running_var, reference.running_var)


def different_descriptions():
    forget_groups()
    rank = dist.get_rank()
    errors = []
    for mine in ((2, 2, 4)[rank % 3], None if rank else "node"):
        layer = SyncBatchNorm(1, process_group=mine)
        with pytest.raises(ValueError, match="expected the same on all 4 ranks") as error:
            layer(torch.randn(2, 1))
        errors.append(str(error.value))
    return errors


def test_descriptions_that_differ_are_named_on_every_rank(pool):
    for errors in pool.run(different_descriptions, 4):
        assert "got 2 on rank 0, 4 on rank 2" in errors[0]
        assert "got node on rank 0, None on rank 1" in errors[1]


def timeouts_of_groups(store):
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=3, timeout=timedelta(seconds=60))
    given = dist.new_group([0, 1], timeout=timedelta(seconds=70))
    kinds = [None] if rank == 2 else [None, given, RankGroup((0, 1))]
    groups = [communicator_of(kind).group for kind in kinds]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_groups_have_the_time_out_of_the_job_or_of_the_group_that_was_given(pool, tmp_path):
    first, *_, last = pool.run(timeouts_of_groups, 3, str(tmp_path / "store"))
    pool.forget_job()
    assert first == [60, 70, 70]  # ranks stand for the group that was given with them
    assert last == [60]


def destroyed(kept):
    first = sync_group(2)
    alive = weakref.ref(first)
    dist.destroy_process_group(first)
    if not kept:
        del first
    gc.collect()
    dist.barrier()
    return alive() is not None, sync_group(2) is not alive(), mean_over(2)


@pytest.mark.parametrize("kept", [True, False])
def test_a_group_that_was_destroyed_is_made_again(pool, kept):
    """And not kept alive, unless by others."""
    assert pool.run(destroyed, 4, kept) == [(kept, True, mean) for mean in (0.5, 0.5, 2.5, 2.5)]


def on_meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    means = [mean_over(mesh[name]) for name in ("node", "local")]
    layer = SyncBatchNorm(1, process_group=mesh["local"])
    same = copy.deepcopy(layer).process_group is mesh["local"].get_group()
    loaded = pickle.loads(pickle.dumps(layer)).process_group
    whole = copy.deepcopy(SyncBatchNorm(1, process_group=init_device_mesh("cpu", (4,)))).process_group
    try:
        SyncBatchNorm(1, process_group=mesh)
    except ValueError as error:
        return means, same, loaded, whole, str(error)


def test_a_mesh_dimension_stands_for_its_group_and_is_kept_by_ranks(pool):
    for rank, (means, same, loaded, whole, error) in enumerate(pool.run(on_meshes, 4)):
        assert means == [rank % 2 + 1, rank // 2 * 2 + 0.5]
        assert loaded == RankGroup((rank // 2 * 2, rank // 2 * 2 + 1))
        assert same
        assert whole is None
        assert "expected a DeviceMesh of 1 dimension, got one of 2; name one, as in mesh['dp']" in error


NONSENSE = [
    (0, ValueError, "expected at least 1 consecutive rank, got 0"),
    (-2, ValueError, "got -2"),
    ([], ValueError, "at least one list"),
    ([[0], []], ValueError, "each of at least one rank"),
    ([[0, 1], [1]], ValueError, r"got rank 1 twice in \[\[0, 1\], \[1\]\]"),
    ([[0, -1]], ValueError, "from 0 on, got -1"),
    ([[0, True]], TypeError, "each an int, got True"),
    ([[0, "1"]], TypeError, "each an int, got '1'"),
    ([[0], 1], TypeError, "got list"),
    ("host", TypeError, "got ('host'|str)"),
    (2.0, TypeError, "got float"),
    (True, TypeError, "got bool"),
    ([0, 1], TypeError, r"got \[0, 1\]; one group of these ranks is \[\[0, 1\]\]"),
    ([0, "1"], TypeError, "got list"),
    (object(), TypeError, "got object"),
]


@pytest.mark.parametrize(("process_group", "error", "message"), NONSENSE, ids=lambda value: str(value)[:20])
def test_nonsense_is_refused_at_construction(process_group, error, message):
    model = nn.Sequential(nn.BatchNorm1d(2))
    for use in (
        lambda: SyncBatchNorm(2, process_group=process_group),
        lambda: convert_sync_batchnorm(model, process_group),
        lambda: sync_group(process_group),
        lambda: sync_batch_norm(torch.randn(4, 2), None, None, process_group=process_group),
    ):
        with pytest.raises(error, match=message):
            use()
    assert type(model[0]) is nn.BatchNorm1d


@pytest.mark.parametrize("process_group", [None, dist, RankGroup((0,))], ids=str)
def test_sync_group_takes_descriptions_only(process_group):
    with pytest.raises(TypeError, match="process_group: expected an int"):
        sync_group(process_group)


def not_of_this_job():
    errors = []
    for process_group in (2, 4, [[0, 1]], [[0, 1], [2, 3]], RankGroup((0, 5)), RankGroup(((dist.get_rank() + 1) % 3,))):
        for use in (lambda group: SyncBatchNorm(1, process_group=group), communicator_of):
            with pytest.raises(ValueError, match="process_group: expected") as error:
                use(process_group)
            errors.append(str(error.value))
    return errors


def test_ranks_that_the_job_does_not_have_are_named(pool):
    for rank, errors in enumerate(pool.run(not_of_this_job, 3)):
        assert errors[::2] == errors[1::2]
        assert "expected a number that divides the 3 ranks of the job, got 2, which leaves 1 of them over" in errors[0]
        assert "got 4, which leaves 3" in errors[2]
        assert "got no list for rank 2 in [[0, 1]]" in errors[4]
        assert "got no such rank as 3 in" in errors[6]
        for error in (errors[8], errors[10]):
            assert f"expected ranks of this job that include this one, rank {rank} of 3" in error


DESCRIPTIONS = [2, "node", [[0, 1]]]


@pytest.mark.parametrize("process_group", DESCRIPTIONS, ids=str)
def test_without_a_job_descriptions_are_local_and_travel(process_group):
    assert sync_group(process_group) is None
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)), process_group)
    assert f"process_group={process_group!r}" in repr(model)
    input = torch.randn(4, 2)
    expected = nn.BatchNorm1d(2)(input)
    for net in (model, copy.deepcopy(model), through_file(model)):
        assert net[0].process_group == process_group
        torch.testing.assert_close(net(input), expected)


def resolve_in_a_new_job():
    group = sync_group(1)
    return dist.get_process_group_ranks(group), mean_over("node"), mean_over(1)


def alone_whatever_the_description():
    layers = [SyncBatchNorm(1, process_group=group) for group in (4, [[0, 1], [2, 3]], RankGroup((2, 3)))]
    return [layer(torch.randn(3, 1)).shape[0] for layer in layers]


def test_a_job_of_one_rank_is_alone_with_the_description_of_a_larger_one(pool):
    assert pool.run(alone_whatever_the_description, 1) == [[3, 3, 3]]


def test_each_job_resolves_anew(pool):
    for world_size in (2, 3, 2):
        expected = [([rank], (world_size - 1) / 2, float(rank)) for rank in range(world_size)]
        assert pool.run(resolve_in_a_new_job, world_size) == expected


# After a failure

NEW_GROUPS = {"all": dist.new_group, "ranks": lambda: dist.new_group([1, 0])}
OLD_GROUPS = {
    "None": lambda: None,
    "a number": lambda: 2,
    "lists": lambda: [[0, 1]],
    "sync_group": lambda: sync_group(2),
}


def after_a_failure(kind):
    rank = dist.get_rank()
    dist.barrier()
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1, momentum=1.0)))
    with pytest.raises(RuntimeError, match="expected all ranks of a group to call the same layers"):
        model[rank](torch.randn(2, 1))
    group = (NEW_GROUPS | OLD_GROUPS)[kind]()
    convert_sync_batchnorm(model, group)
    try:
        model(torch.full((2, 1), float(rank)))
    except RuntimeError as error:
        return str(error)
    finally:
        forget_groups()
    return "works"


@pytest.mark.parametrize("kind", NEW_GROUPS)
def test_a_group_that_was_made_since_a_failure_works(pool, kind):
    pool.forget_job()
    assert pool.run(after_a_failure, 2, kind) == ["works"] * 2
    pool.forget_job()


@pytest.mark.parametrize("kind", OLD_GROUPS)
def test_the_group_that_has_failed_names_what_works(pool, kind):
    pool.forget_job()
    for message in pool.run(after_a_failure, 2, kind):
        assert (
            "convert the model again on all ranks, with a group that torch.distributed.new_group() has made" in message
        )
    pool.forget_job()


# Groups of torch


def group_that_leaves_out_rank_zero():
    group = dist.new_group([1])
    errors = []
    for make in (
        lambda: SyncBatchNorm(2, process_group=group),
        lambda: convert_sync_batchnorm(nn.BatchNorm1d(2), group),
        lambda: sync_batch_norm(torch.randn(4, 2), None, None, process_group=group),
    ):
        try:
            make()
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_a_group_without_this_rank_raises_there(pool):
    left_out, member = pool.run(group_that_leaves_out_rank_zero, 2)
    assert len(left_out) == 3
    assert all("expected a group that this rank is a member of" in error for error in left_out)
    assert member == []


# Communicators: which one a group leads to, and backends that lack an operation


def test_without_a_job_everyone_is_alone():
    for process_group in (None, LOCAL, RankGroup((0, 1))):
        communicator = communicator_of(process_group)
        assert (communicator.size, communicator.rank) == (1, 0)
        assert isinstance(communicator, Communicator)


def exchange(process_group):
    communicator = communicator_of(process_group)
    packed = torch.arange(3.0) + 10 * communicator.rank
    gathered = communicator.all_gather(packed)
    return communicator.size, communicator.rank, gathered.tolist(), communicator.all_reduce(packed.clone()).tolist()


def add_up(values, begins):
    """Returns what one of several ranks gets of a sum, and by which collectives."""
    communicator = TorchCommunicator(dist.new_group())
    torch.manual_seed(dist.get_rank())
    packed = torch.randn(values)
    with collectives() as called:
        total = communicator.begin_all_reduce(packed).wait() if begins else communicator.all_reduce(packed)
    return total, called


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(("values", "by"), [(4096, GATHER), (4097, "allreduce")])
def test_short_sums_are_gathered_and_added_up_by_each_rank(pool, values, by, begins):
    rows = [torch.randn(values, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    for total, called in pool.run(add_up, 3, values, begins):
        assert called == {by: 1}
        if by == GATHER:
            assert torch.equal(total, rows[0] + rows[1] + rows[2])
        torch.testing.assert_close(total, sum(rows))


def exchange_where_single_all_gather_raises(message):
    calls = []

    def unsupported(group, output, input):
        calls.append(group)
        raise RuntimeError(message)

    group = dist.new_group([0, 1])
    with patch.object(type(group), torch_internals.GATHER_METHOD, unsupported):
        exactly = TorchCommunicator(group)
        return [exchange(exactly)[2], exchange(exactly)[2]], len(calls)


def test_a_backend_that_gathers_into_lists_only_is_asked_once(pool):
    message = "Backend dummy does not support allgather_into_tensor"
    for rows, calls in pool.run(exchange_where_single_all_gather_raises, 2, message):
        assert rows == [[[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]] * 2
        assert calls == 1  # asked once, then known


class DeviceGroup:
    """A group of two ranks whose collectives are enqueued on a device; keeps the options of each."""

    group_name = "device"

    def __init__(self, work):
        self.work, self.options = work, []

    size, rank = (lambda self: 2), (lambda self: 0)

    def enqueue(self, *arguments):
        self.options.append(arguments[-1])
        return self.work

    allreduce = enqueue
    locals()[GATHER] = enqueue


@pytest.mark.parametrize("synchronizes_in_place", [True, False])
def test_collectives_of_a_device_take_the_current_stream_and_the_host_waits_for_none(synchronizes_in_place):
    waits = []
    group = DeviceGroup(None if synchronizes_in_place else SimpleNamespace(wait=lambda *limit: waits.append(limit)))
    communicator, packed = TorchCommunicator(group), torch.empty(5, device="meta")
    assert communicator.all_gather(packed).shape == (2, 5)
    assert communicator.all_reduce(packed) is packed
    assert [options.asyncOp for options in group.options] == [False, False]
    assert waits == ([] if synchronizes_in_place else [(), ()])  # with a limit the host would wait
