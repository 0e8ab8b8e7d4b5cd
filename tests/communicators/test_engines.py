"""An engine with its own groups, like Bagua: its groups, torch's groups and descriptions."""

import copy
import pickle
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bagua_syncbn import SyncBatchNorm, SyncBatchNorm1d, sync_group
from bagua_syncbn.communicators import TorchCommunicator, jobs, torch_engine
from bagua_syncbn.groups import LOCAL, RankGroup, engines, spec_of
from bagua_syncbn.groups.spec import members_by
from tests.helpers.cases import Case, compare, run_rank
from tests.helpers.own_groups import check_refused, communicator_of, mean_over
from tests.helpers.training import through_file


class Group:
    def __init__(self, *ranks):
        self.ranks = ranks


class Engine:
    """Runs a job of all ranks over gloo."""

    def __init__(self):
        self.whole = Group(*range(dist.get_world_size()))
        self.communicators = {}

    def default_group(self):
        return self.whole

    def is_in_job(self):
        return True

    def rank_and_size(self):
        return dist.get_rank(), dist.get_world_size()

    def given(self, group):
        if not isinstance(group, Group):
            return None
        rule = None if group is self.whole else RankGroup(tuple(sorted(group.ranks)))
        members_by(rule, *self.rank_and_size())
        return rule, lambda: group

    def ranks_of(self, rule):
        return torch_engine.ranks_of(rule)

    def communicator_of(self, rule, given):
        ranks = self.ranks_of(rule)
        if len(ranks) == 1:
            return LOCAL
        if ranks not in self.communicators:
            self.communicators[ranks] = TorchCommunicator(jobs.job_of(dist.group.WORLD).layers_group(RankGroup(ranks)))
        return self.communicators[ranks]


@contextmanager
def running():
    """Context in which this engine runs the job."""
    engine, others = Engine(), engines[:]
    engines.append(engine)
    try:
        yield engine
    finally:
        engines[:] = others


CASE = Case((2, 0, 3), (3, 4), torch.float64)


def train_on_engine():
    with running():
        return run_rank(CASE)


def test_layers_train_over_the_ranks_of_the_engine(pool):
    compare(CASE, pool.run(train_on_engine, 3))


@pytest.mark.ranks(3)
def test_calls_are_checked_once_in_each_job():
    with running() as engine:
        layer, seen = SyncBatchNorm1d(4), []
        for _ in range(3):
            layer(torch.randn(3, 4)).backward(torch.randn(3, 4))
            seen.append(layer._sync_state.caches.get(True))
        assert seen[1] is seen[2] is not None  # the first call may have made the group
        assert communicator_of() is engine.communicators[0, 1, 2]
        engine.whole = Group(*engine.whole.ranks)  # as in another job
        assert layer._sync_state.group.communicator_if_ready() is None
    assert communicator_of() not in engine.communicators.values()  # torch runs the job again


@pytest.mark.ranks(4)
def test_torch_groups_and_descriptions_share_one_communicator():
    pair = dist.get_rank() // 2
    given = [dist.new_group([0, 1]), dist.new_group([2, 3])][pair]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    with running() as engine:
        own = Group(2 * pair + 1, 2 * pair)
        for group in (own, given, 2, [[1, 0], [2, 3]], mesh["local"], RankGroup((2 * pair, 2 * pair + 1))):
            assert mean_over(group) == 2 * pair + 0.5
            assert communicator_of(group) is engine.communicators[2 * pair, 2 * pair + 1]
        assert mean_over("node") == mean_over(4) == mean_over(dist.group.WORLD) == mean_over(engine.whole) == 1.5
        assert communicator_of(1) is communicator_of([[0], [1], [2], [3]]) is LOCAL
        through_torch = TorchCommunicator(given)
        assert communicator_of(through_torch) is through_torch
        with pytest.raises(TypeError, match=r"a torch\.distributed\.ProcessGroup or a description .* got Group"):
            torch_engine.torch_group_of(spec_of(own))
        assert dist.get_process_group_ranks(sync_group(2)) == [2 * pair, 2 * pair + 1]


@pytest.mark.ranks(4)
def test_only_members_use_a_group():
    with running():
        if dist.get_rank() != 2:
            assert mean_over(Group(3, 0, 1)) == pytest.approx(4 / 3)
            return
        check_refused(Group(3, 0, 1), ValueError, r"include this one, rank 2 of 4, got \(0, 1, 3\)")
        check_refused(RankGroup((2, 5)), ValueError, r"rank 2 of 4, got \(2, 5\)")


@pytest.mark.ranks(4)
def test_copies_and_files_keep_the_ranks():
    odd = dist.get_rank() % 2
    with running() as engine:
        layer = SyncBatchNorm(1, momentum=1.0, process_group=Group(odd, odd + 2))
        loaded = through_file(nn.Sequential(layer))[0]
        assert loaded.process_group == RankGroup((odd, odd + 2))
        for net in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
            net(torch.full((2, 1), float(dist.get_rank())))
            assert net.running_mean.item() == odd + 1
        assert copy.deepcopy(SyncBatchNorm(1, process_group=engine.whole)).process_group is None
