"""Process group arguments: their ranks, creation of groups, errors, and communicators of unusual backends."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock, call, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm, sync_group
from bagua_syncbn._groups import spec_of
from bagua_syncbn._reliability.history import history_in
from bagua_syncbn.communicators import LOCAL, Communicator, RankGroup, TorchCommunicator, jobs
from tests.helpers.cases import Case, compare, run_rank
from tests.helpers.observed import GATHER, collectives
from tests.helpers.one_rank import Twin
from tests.helpers.own_groups import check_refused, communicator_of, forget_groups, mean_over
from tests.helpers.steps import gathered, through_file
from tests.helpers.workers import join_job

# Groups by description


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("process_group", "expected"), [
    (2, [[0, 1], [2, 3]]),
    (1, [[0], [1], [2], [3]]),
    (4, [[0, 1, 2, 3]]),
    ([[3, 0], [1, 2]], [[0, 3], [1, 2]]),
    (((0,), (1, 2, 3)), [[0], [1, 2, 3]]),
    ("node", [[0, 1, 2, 3]]),
], ids=str)  # fmt: skip
def test_descriptions_select_their_ranks(process_group, expected):
    own = next(ranks for ranks in expected if dist.get_rank() in ranks)
    assert dist.get_process_group_ranks(sync_group(process_group)) == own
    assert mean_over(process_group) == pytest.approx(sum(own) / len(own))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("number", [1, 2, 4])
def test_ranks_agree_on_hosts_once(number):
    own, rank = list(range(dist.get_rank() % number, 4, number)), dist.get_rank()
    forget_groups()
    with patch.object(jobs, "host_name", Mock(return_value=(f"host {rank % number}", ""))) as host_name:
        assert dist.get_process_group_ranks(sync_group("node")) == own
        assert [mean_over("node") for _ in range(3)] == [sum(own) / len(own)] * 3
    assert host_name.call_count == 1
    forget_groups()


@pytest.mark.ranks(4)
def test_descriptions_of_the_same_ranks_share_groups():
    pairs, same = [[1, 2], [3, 0]], [[0, 3], [2, 1]]
    assert communicator_of(pairs) is communicator_of(same) is communicator_of(copy.deepcopy(spec_of(pairs)))
    assert sync_group(pairs) is sync_group(same) is not communicator_of(pairs).group
    assert sync_group(4) is dist.group.WORLD


@pytest.mark.ranks(4)
def test_each_given_group_has_its_own_layers_group():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    first = dist.get_rank() // 2 * 2
    mine = pairs[first // 2]
    kinds = (None, dist.group.WORLD, 4, mine, copy.deepcopy(SyncBatchNorm(1, process_group=mine)).process_group, 2)
    made = [communicator_of(kind).group for kind in (*kinds, [[0, 1], [2, 3]])]
    assert made[0] is made[1] is made[2] is not dist.group.WORLD
    assert made[3] is made[4]
    assert made[5] is made[6]
    assert len({*map(id, made), id(mine)}) == 4
    assert {dist.get_backend(group) for group in made} == {"gloo"}
    assert mean_over(mine) == first + 0.5
    exactly = TorchCommunicator(mine)
    layer = SyncBatchNorm(1, process_group=exactly)
    assert layer.process_group is copy.deepcopy(layer).process_group is exactly
    assert exactly.group is mine
    assert f"process_group=TorchCommunicator(ranks={(first, first + 1)})" in repr(layer)
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(layer)


@pytest.mark.ranks(3)
def test_only_members_make_a_layers_group():
    """Rank 0 is in more groups than rank 1, and members create the layers' groups in any order."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 2])
    own = {0: [(second, 1.0), (first, 0.5)], 1: [(first, 0.5)], 2: [(second, 1.0)]}[dist.get_rank()]
    assert [mean_over(group) for group, _ in own] == [mean for _, mean in own]


@pytest.mark.ranks(2, timeout=60)  # if each thread agreed with the peers, all but one would wait for half an hour
@pytest.mark.parametrize("description", ["node", [[0, 1]]], ids=str)
def test_threads_that_use_a_description_first_at_once_share_a_group(description):
    """Peers in a single thread expect one first use."""
    forget_groups()
    number = 1 if dist.get_rank() else 4
    with ThreadPoolExecutor(number) as threads:
        first, *others = threads.map(communicator_of, [description] * number)
    assert all(communicator is first for communicator in others)


CASES = [Case((3, 3), (channels,), torch.float64, steps=4) for channels in range(1, 5)]


@pytest.mark.ranks(2)
def test_threads_with_separate_groups_do_not_interfere():
    """The threads start in a different order on each rank."""
    rank, given = dist.get_rank(), [dist.new_group([0, 1], use_local_synchronization=True) for _ in CASES]
    forget_groups()
    order = sorted(range(len(CASES)), reverse=bool(rank))
    with ThreadPoolExecutor(len(CASES)) as threads:
        running = {index: threads.submit(run_rank, CASES[index], given[index]) for index in order}
    for index, case in enumerate(CASES):
        compare(case, gathered(running[index].result()))


@pytest.mark.ranks(4)
def test_different_descriptions_raise_on_all_ranks():
    forget_groups()
    rank = dist.get_rank()
    for mine, told in [
        ((2, 2, 4)[rank % 3], "got 2 on rank 0, 4 on rank 2"),
        (None if rank else "node", "got node on rank 0, None on rank 1"),
    ]:
        for _ in range(2):
            with pytest.raises(ValueError, match=f"expected equal values on all 4 ranks of the job, {told}"):
                SyncBatchNorm(1, process_group=mine)(torch.randn(2, 1))


@pytest.mark.ranks(2, new_job=True)
def test_layers_use_the_running_job_whether_or_not_an_earlier_group_lives(tmp_path):
    rank = dist.get_rank()
    layer, other = (SyncBatchNorm(1, momentum=1.0) for _ in range(2))
    compiled = torch.compile(other, backend="eager")

    def means():
        layer(torch.full((2, 1), float(rank)))
        return layer.running_mean.item(), mean_of_compiled()

    def mean_of_compiled():
        compiled(torch.full((2, 1), float(rank)))
        return other.running_mean.item()

    assert means() == (0.5, 0.5)
    earlier = dist.group.WORLD
    dist.destroy_process_group()
    assert mean_of_compiled() == rank
    join_job(str(tmp_path / "store"), rank, 2)
    assert means() == (0.5, 0.5)
    assert earlier is not dist.group.WORLD
    dist.destroy_process_group()  # nothing keeps this group
    assert means() == (rank, rank)


@pytest.mark.ranks(2, new_job=True)
def test_groups_of_an_ended_job_raise_while_their_objects_live(tmp_path):
    rank, groups = dist.get_rank(), [dist.new_group(), dist.group.WORLD]
    layers = [SyncBatchNorm(1, process_group=group) for group in groups for _ in range(2)]
    for layer in layers[::2]:  # the others are used for the first time after the end
        layer(torch.ones(2, 1))
    dist.barrier()
    dist.destroy_process_group()
    for starts_another in (False, True):
        if starts_another:
            join_job(str(tmp_path / "store"), rank, 2)
        for layer in layers:
            with pytest.raises(RuntimeError, match="expected a live group, got a destroyed one"):
                layer(torch.ones(2, 1))


@pytest.mark.ranks(2, new_job=True)
def test_after_the_end_of_the_job_the_error_names_only_the_cure():
    layer = SyncBatchNorm(1)
    first, second = (layer(torch.ones(2, 1, requires_grad=True)).sum() for _ in range(2))
    name = layer._sync_state.group.communicator().name
    dist.destroy_process_group()
    exchange = torch.ops.bagua_syncbn.exchange
    for after in (first.backward, second.backward, lambda: exchange(torch.ones(1), name, 2, True)):
        with pytest.raises(RuntimeError, match=r"run forward and backward before destroy_process_group\(\)$"):
            after()


@pytest.mark.ranks(4)
def test_a_mesh_dimension_is_saved_as_its_ranks():
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    assert [mean_over(mesh[name]) for name in ("node", "local")] == [rank % 2 + 1, rank // 2 * 2 + 0.5]
    layer = SyncBatchNorm(1, process_group=mesh["local"])
    assert copy.deepcopy(layer).process_group is mesh["local"].get_group()
    assert pickle.loads(pickle.dumps(layer)).process_group == RankGroup((rank // 2 * 2, rank // 2 * 2 + 1))
    assert copy.deepcopy(SyncBatchNorm(1, process_group=init_device_mesh("cpu", (4,)))).process_group is None
    for several, hint in (
        (mesh, r"got 2 dimensions \('node', 'local'\); select one, such as mesh\['node'\]"),
        (init_device_mesh("cpu", (2, 2)), r"got 2 dimensions; select one, such as mesh\.get_group\(0\)"),
    ):
        with pytest.raises(RuntimeError, match=f"^process_group: expected a 1-D DeviceMesh, {hint}"):
            SyncBatchNorm(1, process_group=several)


# Refusals


def sized(size, rank):
    communicator = Twin()
    communicator.size, communicator.rank = size, rank
    return communicator


def test_communicators_of_other_objects_raise():
    for given in (None, 2, dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(TypeError, match=r"group: expected a torch\.distributed\.ProcessGroup, got (NoneType|int)"):
            TorchCommunicator(given)


@pytest.mark.parametrize(("process_group", "error", "message"), [
    (0, ValueError, "expected a positive number of ranks, got 0"),
    ([[0, True]], TypeError, r"got \[\[0, True\]\]"),
    ([[0], 1], TypeError, r"got \[\[0\], 1\]"),
    ("host", TypeError, "got 'host'"),
    (True, TypeError, "got True"),
    ([0, 1], TypeError, r"a list of lists of ranks, .* got \[0, 1\]"),
    ([], ValueError, r"each rank from 0 on exactly once, got \[\]"),
    ([[0, 1], []], ValueError, r"got \[\[0, 1\], \[\]\]"),
    ([[0, 1], [1]], ValueError, r"got \[\[0, 1\], \[1\]\]"),
    ([[0], [2]], ValueError, r"got \[\[0\], \[2\]\]"),
    (RankGroup(()), ValueError, "at least one rank, .* got RankGroup"),
    (RankGroup((1, 1)), ValueError, r"got RankGroup\(ranks=\(1, 1\)\)"),
    (RankGroup((-1, 0)), ValueError, r"got RankGroup\(ranks=\(-1, 0\)\)"),
    (RankGroup(("a",)), TypeError, "got RankGroup"),
    (RankGroup(3), TypeError, "got RankGroup"),
    (Twin, TypeError, "got <class .*Twin'>"),
    (nn.Sequential(nn.Linear(1, 1)), TypeError, "got Sequential$"),
    (sized(2, 2), TypeError, "a Communicator with a rank from 0 to size - 1, got size 2 and rank 2"),
    (sized(lambda: 2, 0), TypeError, "got size <function .* and rank 0"),
    ([nn.Sequential(nn.Linear(1, 1)), 1], TypeError, r"got \[Sequential, 1\]$"),
    (dist.ProcessGroup, TypeError, r"got <class .*ProcessGroup'>"),
], ids=lambda value: str(value)[:20])  # fmt: skip
def test_invalid_groups_raise_at_construction(process_group, error, message):
    check_refused(process_group, error, message)
    with pytest.raises(error, match=message):
        sync_group(process_group)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("process_group", "message"), [
    (2, "expected a divisor of the job's 3 ranks, got 2"),
    ([[0, 1]], r"expected each of the job's 3 ranks in exactly one list, got \[\[0, 1\]\]"),
    ([[0, 1], [2, 3]], r"got \[\[0, 1\], \[2, 3\]\]"),
    (RankGroup((0, 3)), "expected ranks of this job that include this one, rank {} of 3"),
    ("others", "expected ranks of this job that include this one, rank {} of 3"),
], ids=str)  # fmt: skip
def test_groups_that_do_not_fit_the_job_raise(process_group, message):
    rank = dist.get_rank()
    if process_group == "others":
        process_group = RankGroup(((rank + 1) % 3,))
    check_refused(process_group, ValueError, "process_group: .*" + message.format(rank))


@pytest.mark.ranks(2)
def test_ranks_outside_of_a_group_convert_evaluate_and_raise_in_training():
    group, input = dist.new_group([0]), torch.randn(4, 3)
    for layer in (SyncBatchNorm(3, process_group=group), nn.BatchNorm1d(3), nn.SyncBatchNorm(3, process_group=group)):
        layer = convert_sync_batchnorm(layer, None if isinstance(layer, nn.SyncBatchNorm) else group)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer):
            twin.eval()(input)
            if dist.get_rank() == 1:
                with pytest.raises(ValueError, match="new_group returned NON_GROUP_MEMBER, because rank 1 is not in"):
                    twin.train()(input)
        revert_sync_batchnorm(layer)


def check_loaded(saved):
    layer = copy.deepcopy(pickle.loads(saved))
    with pytest.raises(ValueError, match=r"expected ranks of this job .*; set layer\.process_group"):
        layer(torch.ones(2, 1))
    layer.process_group = None
    layer(torch.ones(2, 1))


def test_a_layer_of_other_ranks_loads_and_takes_a_new_group(pool):
    pool.run(check_loaded, 2, pickle.dumps(SyncBatchNorm(1, process_group=RankGroup((2, 3)))))


# Without a job, and across jobs


@pytest.mark.parametrize("process_group", [2, "node", [[0, 1]], RankGroup((0, 1))], ids=str)
def test_descriptions_are_local_without_a_job_and_can_be_saved(process_group):
    assert isinstance(process_group, RankGroup) or sync_group(process_group) is None
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)), process_group)
    assert f"process_group={process_group!r}" in repr(model)
    input = torch.randn(4, 2)
    expected = nn.BatchNorm1d(2)(input)
    for net in (model, copy.deepcopy(model), through_file(model)):
        assert net[0].process_group == process_group
        torch.testing.assert_close(net(input), expected)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("process_group", [None, 4, [[0, 1], [2, 3]], RankGroup((2, 3))], ids=str)
def test_a_job_of_one_rank_accepts_the_description_of_a_larger_job(process_group):
    assert communicator_of(process_group) is LOCAL
    assert mean_over(process_group) == 0


@pytest.mark.ranks(2, new_job=True)
@pytest.mark.parametrize("kind", ["new", "None", "number"])
def test_after_a_failure_old_groups_raise_and_new_groups_work(kind):
    rank, group = dist.get_rank(), {"new": dist.new_group(), "None": None, "number": 2}[kind]
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1, momentum=1.0)))
    with pytest.raises(RuntimeError, match="ranks made different calls"):
        model[rank](torch.randn(2, 1))
    convert_sync_batchnorm(model, group)
    if kind == "new":
        model(torch.full((2, 1), float(rank)))
        return
    what_works = r"convert the model again on all ranks with a new group from torch\.distributed\.new_group\(\)"
    with pytest.raises(RuntimeError, match=what_works):
        model(torch.full((2, 1), float(rank)))
    forget_groups()


# Communicators: backends that lack an operation, and devices


@pytest.mark.ranks(3)
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(("values", "by"), [(4096, GATHER), (4097, "allreduce")])
def test_short_sums_are_gathered(values, by, begins):
    communicator = TorchCommunicator(dist.new_group())
    rows = [torch.randn(values, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    packed, expected = rows[dist.get_rank()].clone(), rows[0] + rows[1] + rows[2]
    with collectives() as called:
        total = communicator.begin(packed, True).wait() if begins else communicator.all_reduce(packed)
    assert called == {by: 1}
    torch.testing.assert_close(total, expected, **({"rtol": 0, "atol": 0} if by == GATHER else {}))


class Equal(Twin):
    """Defines equality, and so cannot be hashed."""

    def __eq__(self, other):
        return type(other) is type(self)


def test_each_communicator_counts_its_messages_and_keeps_nothing_alive():
    communicators, histories, layers = [Equal(), Equal()], [], []
    assert communicators[0] == communicators[1]
    assert isinstance(communicators[0], Communicator)
    for communicator, calls in zip(communicators, (1, 2), strict=True):
        layer = SyncBatchNorm(3, process_group=communicator)
        for _ in range(calls):
            layer(torch.randn(4, 3))
        assert history_in(communicator).messages == calls
        histories.append(weakref.ref(history_in(communicator)))
        layers.append(weakref.ref(layer))
    del layer
    gc.collect()
    assert [layer() for layer in layers] == [None, None]
    del communicator, communicators
    gc.collect()
    assert [history() for history in histories] == [None, None]


@pytest.mark.parametrize("work", [None, Mock()])
def test_device_collectives_use_the_current_stream_without_host_waits(work):
    """``work`` is None if the backend synchronizes in place."""
    collective = Mock(return_value=work)
    group = Mock(group_name="device", size=lambda: 2, rank=lambda: 0, allreduce=collective, **{GATHER: collective})
    communicator, packed = TorchCommunicator(group), torch.empty(5, device="meta")
    assert communicator.all_gather(packed).shape == (2, 5)
    assert communicator.all_reduce(packed) is packed
    assert [sent.args[-1].asyncOp for sent in collective.call_args_list] == [False, False]
    assert work is None or work.wait.call_args_list == [call(), call()]  # with a timeout, the host would wait
