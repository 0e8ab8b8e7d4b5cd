"""recalibrate_statistics sets running statistics from all ranks' batches, and changes no other state."""

import copy
import random
from contextlib import nullcontext

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua_syncbn import (
    SyncBatchNorm2d,
    accumulate_statistics,
    convert_sync_batchnorm,
    freeze_statistics,
    fuse_activations,
    recalibrate_statistics,
)
from tests.helpers import steps
from tests.helpers.user_layers import BatchNormAct


class Model(nn.Module):
    """A chain of layers of several kinds; one runs twice, and dropout must be off."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())
        self.twice = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.9))
        self.own = BatchNormAct(4)
        self.untracked = nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, input):
        return self.untracked(self.own(self.twice(self.twice(self.first(input)))))


def draw(sizes):
    return [steps.draw(size, 3, 6, 6, seed=seed) * (size + 1) for seed, size in enumerate(sizes)]


def expected_statistics(model, batches):
    """Returns the mean and variance of each layer's inputs, where torch's layers normalize each batch separately."""
    model, seen = copy.deepcopy(model), {}
    model.twice[2].eval()
    for name, part in model.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            part.register_forward_pre_hook(lambda _, args, name=name: seen.setdefault(name, []).append(args[0]))
    for batch in batches:
        model(batch)
    values = {name: torch.cat([v.transpose(0, 1).flatten(1) for v in inputs], 1) for name, inputs in seen.items()}
    return {name: (v.mean(1), v.var(1)) for name, v in values.items()}


def check_statistics(model, expected):
    for name, (mean, var) in expected.items():
        layer = model.get_submodule(name)
        torch.testing.assert_close((layer.running_mean, layer.running_var), (mean, var), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("spread", "kind"), [
    pytest.param([(4, 2, 3)], "wrapped", marks=pytest.mark.ranks(1)),
    pytest.param([(), (4, 2, 3), (0,)], "fused", marks=pytest.mark.ranks(3)),
    pytest.param([(3, 1), (), (2,), (5, 2, 1)], "wrapped", marks=pytest.mark.ranks(4)),
], ids=str)  # fmt: skip
def test_ranks_equal_one_process_over_all_batches(spread, kind):
    """``spread`` has the batch sizes of each rank."""
    torch.manual_seed(0)
    plain = Model().double()
    batches, begin = draw([size for own in spread for size in own]), sum(map(len, spread[: dist.get_rank()]))
    model = convert_sync_batchnorm(copy.deepcopy(plain))
    wrapped = DistributedDataParallel(model) if kind == "wrapped" else fuse_activations(model)
    with torch.no_grad():
        model(torch.randn(4, 3, 6, 6, dtype=torch.float64))  # after a cached call
        model.own.running_mean.fill_(torch.nan)
        model.own.running_var.fill_(torch.inf)
    recalibrate_statistics(wrapped, iter(batches[begin : begin + len(spread[dist.get_rank()])]))
    assert getattr(wrapped, "broadcast_buffers", True)
    check_statistics(model, expected_statistics(plain, [batch for batch in batches if len(batch)]))
    for other in steps.gathered(model.state_dict()):
        steps.assert_same_bits(other, model.state_dict())


class BrokenError(Exception):
    pass


def drawing(batches, breaks):
    for batch in batches:
        torch.rand(()), random.random(), numpy.random.rand()
        yield batch
    if breaks:
        raise BrokenError


@pytest.mark.parametrize("breaks", [False, True])
def test_recalibration_changes_only_statistics(breaks):
    model = convert_sync_batchnorm(Model(momentum=None).double())
    convert_sync_batchnorm(model.first, "node")
    freeze_statistics(model.twice)
    model.first[1].register_forward_pre_hook(lambda *args: None)
    model.own.eval()
    with (
        steps.unchanged(model, may_change=None if breaks else "running"),
        steps.unchanged(model.twice),
        pytest.raises(BrokenError) if breaks else nullcontext(),
    ):
        recalibrate_statistics(model, drawing(draw((4, 3)), breaks))
    assert model.first[1].running_mean.any() == model.own.running_mean.any() == (not breaks)


def test_recalibration_batches_do_not_accumulate():
    layer = SyncBatchNorm2d(3, momentum=0.3).double()
    own, other = draw([4, 3])
    with accumulate_statistics(layer):
        layer(own)
        recalibrate_statistics(layer, [other])
    torch.testing.assert_close(layer.running_mean, other.mean((0, 2, 3)).lerp(own.mean((0, 2, 3)), 0.3))
    assert layer.num_batches_tracked == 1


def test_unreached_layers_keep_their_statistics_and_are_named():
    model = nn.ModuleDict({"main": SyncBatchNorm2d(3), "head": SyncBatchNorm2d(3)}).double()
    named = pytest.warns(UserWarning, match="no batch reached these layers, which keep their statistics: head")
    with steps.unchanged(model["head"]), named as caught:
        recalibrate_statistics(model, draw([4]), forward=model["main"])
    assert caught[0].filename == __file__
    assert model["main"].running_mean.any()


def test_an_invalid_recalibration_changes_nothing():
    model = nn.Sequential(SyncBatchNorm2d(3)).double()
    (batch,) = draw([4])
    for error, match, batches, options in (
        (ValueError, "device: expected None with forward", [batch], {"forward": model, "device": "cpu"}),
        (ValueError, "more than 1 value per channel", [batch, batch[:1, :, :1, :1]], {}),
        (RuntimeError, "not finite in 0 .*; check batches and parameters for", [batch, batch * torch.inf], {}),
        (TypeError, "batches: expected an iterable of batches, got Tensor", batch, {}),
        (TypeError, "got a batch of type dict; for other batches, pass forward", [{"image": batch}], {}),
        (ValueError, "batches: expected a non-empty batch on some rank", iter(()), {}),
    ):
        with steps.unchanged(model), pytest.raises(error, match=match):
            recalibrate_statistics(model, batches, **options)
    with pytest.raises(TypeError, match="BatchNorm2d '0' is not synchronized; call convert"):
        recalibrate_statistics(nn.Sequential(nn.BatchNorm2d(3)), [batch])
    with pytest.warns(UserWarning, match="found no synchronized layer in Linear") as caught:
        recalibrate_statistics(nn.Linear(6, 6).double(), [batch])
    assert caught[0].filename == __file__
