"""While an engine such as Bagua runs, layers accept the engine's groups, torch's groups and descriptions."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bagua_syncbn import sync_group
from bagua_syncbn._groups import LOCAL, GroupSpec, RankGroup, engines, spec_of
from bagua_syncbn._groups.spec import members_by, rank_and_size
from bagua_syncbn.communicators import TorchCommunicator, torch_engine
from tests.helpers.own_groups import communicator_of, mean_over


class Group:
    def __init__(self, *ranks):
        self.ranks = ranks


@contextmanager
def running():
    """Context manager in which an engine with a single group object runs the job over gloo; yields the group."""
    whole, others = Group(*range(dist.get_world_size())), engines[:]

    def rule_and_getter(group):
        if not isinstance(group, Group):
            return None
        rule = None if group is whole else RankGroup(tuple(sorted(group.ranks)))
        members_by(rule, *rank_and_size())
        return rule, lambda: group

    def communicator_of(rule, given, creates):
        return torch_engine.running_job().communicator("layers", rule, None, creates)

    functions = {"is_running": lambda: True, "rule_and_getter": rule_and_getter, "communicator_of": communicator_of}
    engines.append(SimpleNamespace(**vars(torch_engine) | functions))
    try:
        yield whole
    finally:
        engines[:] = others


@pytest.mark.ranks(2)
def test_layers_keep_their_communicator_when_an_engine_starts():
    given = dist.new_group()
    spec, earlier = (GroupSpec(*torch_engine.rule_and_getter(given)) for _ in range(2))
    communicator = spec.communicator()
    with running():
        assert spec.communicator() is communicator
        assert earlier.communicator() is not communicator
        assert mean_over(spec) == mean_over(earlier) == 0.5
    assert spec.communicator() is communicator


@pytest.mark.ranks(4)
def test_torch_groups_and_descriptions_share_one_communicator():
    pair = dist.get_rank() // 2
    given = [dist.new_group([0, 1]), dist.new_group([2, 3])][pair]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    with running() as whole:
        own = Group(2 * pair + 1, 2 * pair)
        shared = communicator_of(own)
        for group in (own, given, 2, [[1, 0], [2, 3]], mesh["local"], RankGroup((2 * pair, 2 * pair + 1))):
            assert mean_over(group) == 2 * pair + 0.5
            assert communicator_of(group) is shared
        assert mean_over("node") == mean_over(4) == mean_over(dist.group.WORLD) == mean_over(whole) == 1.5
        assert communicator_of(1) is communicator_of([[0], [1], [2], [3]]) is LOCAL
        through_torch = TorchCommunicator(given)
        assert communicator_of(through_torch) is through_torch
        with pytest.raises(TypeError, match="a description in a torch job, got Group"):
            torch_engine.torch_group_of(spec_of(own))
        assert dist.get_process_group_ranks(sync_group(2)) == [2 * pair, 2 * pair + 1]
