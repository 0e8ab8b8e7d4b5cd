"""merge_statistics gives all ranks the running statistics of all ranks' data."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, freeze_statistics, merge_statistics
from bagua_syncbn.communicators import LOCAL
from tests.helpers import formula
from tests.helpers.observed import collectives
from tests.helpers.steps import draw, gathered, unchanged
from tests.helpers.user_layers import BatchNormAct1d


def mixture(statistics, weights):
    """Returns mean and variance of the mixture of all ranks, with the given weights."""
    means, variances = (torch.stack(values).double() for values in zip(*statistics, strict=True))
    return formula.mixture(means, variances, torch.tensor(weights, dtype=torch.float64))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.merged = nn.ModuleList([nn.BatchNorm1d(3, momentum=None), BatchNormAct1d(3), nn.BatchNorm1d(3).half()])
        self.kept = nn.ModuleList([nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3)])
        freeze_statistics(convert_sync_batchnorm(self.kept[1]))

    def forward(self, input):
        for layer in (*self.merged, *self.kept):
            layer(input.to(layer.weight.dtype))


# `batches` has a number of batches per rank. If not `is_counted`, num_batches_tracked is reset to 0.
@pytest.mark.parametrize(("batches", "is_counted", "convert"), [
    pytest.param((2, 1, 3), False, False, marks=pytest.mark.ranks(3)),
    pytest.param((2, 1, 0, 5), True, True, marks=pytest.mark.ranks(4)),
], ids=str)  # fmt: skip
def test_merged_statistics_equal_the_mixture_of_all_ranks(batches, is_counted, convert):
    rank, size, model = dist.get_rank(), len(batches), Model()
    weights = (1.0, 2.5, 1.0, 0.5)[:size] if is_counted else (1.0,) * size
    model.kept[1].running_mean += rank
    if convert:
        convert_sync_batchnorm(model, LOCAL)
    for seed in range(batches[rank]):
        model(draw(4, 3, seed=10 * rank + seed, dtype=torch.float32) * (rank + 1) + 2 * rank)
    for layer in model.merged:
        layer.num_batches_tracked *= is_counted
    before = copy.deepcopy(model.state_dict())
    state = [(layer.running_mean, layer.running_var) for layer in model.merged]
    every = gathered([[buffer.clone() for buffer in buffers] for buffers in state])
    merge_statistics(model, weight=weights[rank])
    factors = [count * weight * is_counted for count, weight in zip(batches, weights, strict=True)]
    for number, (mean, var) in enumerate(state):
        expected = mixture([own[number] for own in every], factors)
        torch.testing.assert_close((mean, var), tuple(value.to(mean.dtype) for value in expected))
    for name, buffer in model.state_dict().items():
        if "num_batches" in name or name.startswith("kept"):
            assert torch.equal(buffer, before[name]), name
        else:
            assert all(torch.equal(buffer, other) for other in gathered(buffer)), name
    merge_statistics(model, weight=weights[rank])
    with collectives() as third:  # without a probe
        merge_statistics(model, weight=weights[rank])
    assert third.total() == 1


@pytest.mark.ranks(4)
def test_groups_are_weighted_by_their_number_of_ranks():
    rank = dist.get_rank()
    layer = SyncBatchNorm(3, momentum=1.0, process_group=[[0, 1, 2], [3]]).double()
    layer(draw(4, 3, seed=rank) + rank)
    every = gathered((layer.running_mean.clone(), layer.running_var.clone()))
    merge_statistics(layer, [[0, 3], [1, 2]])
    pairs = [every[0], every[3]] if rank in (0, 3) else [every[1], every[2]]
    torch.testing.assert_close((layer.running_mean, layer.running_var), mixture(pairs, [1, 1]))
    layer.running_mean, layer.running_var = (buffer.clone() for buffer in every[rank])
    merge_statistics(layer)
    torch.testing.assert_close((layer.running_mean, layer.running_var), mixture([every[0], every[3]], [3, 1]))


@pytest.mark.ranks(2)
def test_merging_buffers_that_ddp_broadcasts_warns():
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.warns(UserWarning, match="set its attribute broadcast_buffers to False") as caught:
        merge_statistics(model)
    assert caught[0].filename == __file__
    model.broadcast_buffers = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merge_statistics(model)


def test_invalid_merges_raise_and_merges_outside_of_a_job_change_nothing():
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=None))
    model(torch.randn(4, 3))
    with unchanged(model):
        merge_statistics(model)
        for weight in (0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="weight: expected a finite number above 0, got"):
                merge_statistics(model, weight=weight)
        with pytest.raises(TypeError, match="process_group"):
            merge_statistics(model, "hosts")
    with pytest.warns(UserWarning, match="found no layer with running statistics in Linear") as caught:
        merge_statistics(nn.Linear(1, 1))
    assert caught[0].filename == __file__
