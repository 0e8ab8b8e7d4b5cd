"""Verdicts of verify_synchronization: whether ranks equal one process and, if not, the cause."""

import copy
import random
from itertools import chain
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bagua_syncbn import (
    convert_sync_batchnorm,
    freeze_statistics,
    fuse_activations,
    mean_over_ranks,
    recompute_outputs,
    revert_sync_batchnorm,
    sync_batch_norm,
    verify_synchronization,
)
from bagua_syncbn.verification import main
from tests.helpers.steps import draw


def plain(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), *more, nn.Linear(8, 5), nn.BatchNorm1d(5))


def model(*more, **options):
    return convert_sync_batchnorm(plain(*more), **options)


def ddp(*more):
    return DistributedDataParallel(model(*more))


def batch(samples=4):
    rank = dist.get_rank()
    x = draw(samples, 6, seed=rank, dtype=torch.float32)
    return {"x": x, "y": (torch.randint(5, (samples,), generator=torch.Generator().manual_seed(rank)),)}


def cross_entropy(model, batch, reduction="mean"):
    x = batch["x"].to(next(model.parameters()).dtype)
    return F.cross_entropy(model(x), batch["y"][0], reduction=reduction)


def global_cross_entropy(model, batch):
    """The mean over all ranks' 6 samples, for gradients that are averaged over ranks."""
    return cross_entropy(model, batch, "sum") / 6 * (dist.get_world_size() if len(batch["x"]) < 6 else 1)


def synchronized_cross_entropy(model, batch):
    return mean_over_ranks(cross_entropy(model, batch, "none"))


def box_loss(model, batch, mean=lambda losses, mask: losses[mask].mean()):
    """A mean over boxes: ranks with more samples may have fewer boxes."""
    return mean(model(batch["x"]).square(), batch["x"][:, :5] > batch["x"][:, 5:])


def image_loss(model, batch):
    """Image sizes differ between ranks."""
    samples = len(batch["x"])
    return model(draw(samples, 3, 5 + samples, 6, seed=samples, dtype=torch.float32)).square().sum()


class DictOutput(nn.Sequential):
    def forward(self, x):
        return {"scores": super().forward(x)}


class Centered(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Elastic(nn.Module):
    """Uses the first channels of a wider layer, through ``normalize``."""

    def __init__(self, normalize):
        super().__init__()
        self.norm, self.normalize = nn.BatchNorm1d(8), normalize
        convert_sync_batchnorm(self)

    def forward(self, x):
        return self.normalize(x, self.norm)


def tensors_for(x, layer):
    return [tensor[: x.size(1)] for tensor in (layer.running_mean, layer.running_var, layer.weight, layer.bias)]


def by_function(x, layer):
    return sync_batch_norm(x, *tensors_for(x, layer), layer=layer)


def outside_forward(x, layer):
    return F.batch_norm(x, *tensors_for(x, layer), training=True)


class HandWritten(Centered):
    def __init__(self):
        super().__init__()
        self.register_buffer("stored_mean", torch.zeros(8))

    def forward(self, x):
        self.stored_mean.lerp_(x.mean(0).detach(), 0.1)
        return super().forward(x)


class Noisy(nn.Sequential):
    """Draws from every random number generator."""

    def forward(self, x):
        return super().forward(F.dropout(x * random.random() * numpy.random.rand()))


def with_different(name, module):
    """Adds the rank to the tensor ``name``."""
    with torch.no_grad():
        module.state_dict()[name].add_(dist.get_rank())
    return module


def images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def evaluation_on_one_rank():
    module = model()
    module[1].train(dist.get_rank() == 0)
    return module


class Case(NamedTuple):
    make: Any
    samples: tuple[int, ...] = (4, 4)
    loss: Any = cross_entropy
    lines: tuple[str, ...] = ()  # text in each line of the verdict; empty if ranks equal one process
    by_layer: bool = False


LOSS_IS = "statistics match, gradients do not: the loss is a"
UNCONVERTED = "BatchNorm1d '4' is not converted; running_mean, running_var differ between ranks after the step"
CASES = {
    "one rank": Case(model, (4,)),
    "DistributedDataParallel": Case(ddp),
    "one of four batches is empty": Case(model, (2, 0, 3, 1), global_cross_entropy),
    "frozen statistics": Case(lambda: freeze_statistics(model(nn.BatchNorm1d(8)))),
    "fused activations and recomputed outputs": Case(lambda: recompute_outputs(fuse_activations(model()))),
    "dict output": Case(
        lambda: DictOutput(*model()), loss=lambda model, batch: model(batch["x"])["scores"].square().mean()
    ),
    "sync_batch_norm": Case(lambda: Elastic(by_function), (1, 0, 3, 2), global_cross_entropy),
    "sparse gradients": Case(
        lambda: convert_sync_batchnorm(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.BatchNorm1d(3))),
        loss=lambda model, batch: model(batch["y"][0]).sin().mean(),
    ),
    "bfloat16": Case(lambda: model().bfloat16()),
    "by layer": Case(ddp, (1, 4), by_layer=True),
    "by layer, different image sizes": Case(
        lambda: convert_sync_batchnorm(images()), (1, 0, 2), image_loss, by_layer=True
    ),
    "by layer, buffers change in place": Case(lambda: model(HandWritten()), by_layer=True),
    "no converted layer": Case(plain, lines=("output differs", "BatchNorm1d '1' is not converted", UNCONVERTED)),
    "no converted layer, no buffers": Case(
        lambda: nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False)),
        lines=("output differs", "BatchNorm1d '0' is not converted"),
    ),
    "by layer, an unconverted layer": Case(
        lambda: model(filter=lambda name, _: name != "4"), lines=("output 1 differs", UNCONVERTED), by_layer=True
    ),
    "layers synchronize with fewer ranks": Case(
        lambda: model(process_group=2), (3,) * 4, lines=("output", "process_group=2", "process_group=2")
    ),
    "batch sizes differ": Case(
        ddp, (2, 5), lines=("loss differs by", f"{LOSS_IS} mean over different numbers of samples (2, 5); use mean")
    ),
    "an empty batch": Case(ddp, (2, 0), lines=("loss differs by up to nan", f"{LOSS_IS} mean over different")),
    "sum over samples": Case(
        ddp, (2, 5), lambda *given: cross_entropy(*given, "sum"), ("loss differs by", f"{LOSS_IS} sum over samples")
    ),
    "mean over boxes": Case(
        ddp, (2, 5), box_loss, ("loss differs by", "outputs are equal, so statistics match, but the loss")
    ),
    "mean_over_ranks": Case(ddp, (2, 0, 5), synchronized_cross_entropy),
    "mean_over_ranks of boxes": Case(model, (2, 5), lambda *given: box_loss(*given, mean_over_ranks)),
    "dropout": Case(lambda: ddp(nn.Dropout()), lines=("output differs by", "the step is random (e.g. dropout)")),
    "random functions": Case(
        lambda: convert_sync_batchnorm(Noisy(*plain())), lines=("output differs", "the step is random")
    ),
    "different weights": Case(lambda: with_different("0.weight", model()), lines=("0.weight differs between ranks",)),
    "different buffers": Case(lambda: with_different("4.running_var", model()), lines=("4.running_var differs",)),
    "by layer, different buffers": Case(
        lambda: with_different("4.running_var", model()), lines=("4.running_var differs",), by_layer=True
    ),
    "a module mixes samples": Case(lambda: model(Centered()), lines=("output differs", "no cause was found")),
    "a layer used outside its forward": Case(
        lambda: Elastic(outside_forward),
        lines=(
            "output differs",
            "SyncBatchNorm1d 'norm' synchronizes with process_group=None in its forward; to use its tensors outside, "
            "call bagua_syncbn.sync_batch_norm(..., process_group=layer.process_group, layer=layer); running_mean, "
            "running_var differ between ranks after the step",
        ),
    ),
    "an unconverted layer used outside its forward": Case(
        lambda: revert_sync_batchnorm(Elastic(outside_forward)),
        lines=("output differs", "BatchNorm1d 'norm' is not converted; running_mean, running_var differ"),
    ),
    "hand-written batch normalization": Case(
        lambda: model(HandWritten()),
        lines=(
            "output differs",
            "HandWritten '3' is not converted (if it is batch normalization, call register_converter for its class); "
            "stored_mean differ between ranks after the step",
        ),
    ),
    "evaluation mode on one rank": Case(evaluation_on_one_rank, lines=("mode of module '1' differs between ranks",)),
    "more layers on one rank": Case(
        lambda: model(*[nn.Identity(), nn.Linear(8, 8)][: 1 + dist.get_rank()]),
        lines=("4.weight differs between ranks before", "so do 4.bias, 5.weight, "),
    ),
}


def state_of(module):
    """Returns the state that a verification must not change."""
    modes = [part.training for part in module.modules()]
    gradients = [parameter.grad for parameter in module.parameters()]
    hooks = [dict(hooks) for part in module.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks)]
    random_states = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    values = {name: value.clone() for name, value in module.state_dict().items()}
    return copy.deepcopy([modes, gradients, values]), hooks, random_states


def run(name):
    case = CASES[name]
    module = case.make()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state_of(module)
    verdict = verify_synchronization(module, batch(case.samples[dist.get_rank()]), case.loss, by_layer=case.by_layer)
    after = state_of(module)
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0, equal_nan=True)
    assert after[1:] == before[1:]
    stepped = dist.get_world_size() > 1 and not case.by_layer and verdict.compared != "nothing"
    needs_wrapper = stepped and not isinstance(module, DistributedDataParallel)
    assert ["averaged gradients" in note for note in verdict.notes].count(True) == needs_wrapper
    return bool(verdict), str(verdict).split("\n")[: -1 if needs_wrapper else None]


@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: len(CASES[name].samples)))  # starts few jobs
def test_the_verdict_names_the_difference_and_its_cause(pool, name):
    case = CASES[name]
    verdicts = pool.run(run, len(case.samples), name)
    assert all(verdict == verdicts[0] for verdict in verdicts)
    equal, lines = verdicts[0]
    assert equal == (not case.lines), lines
    expected = case.lines or (f"{len(case.samples)} rank{'s equal' if len(verdicts) > 1 else ' equals'} one process: ",)
    assert len(lines) == len(expected), lines
    for line, part in zip(lines, expected, strict=True):
        assert part in line, lines


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_job_without_a_process_group_is_not_approved(name, monkeypatch):
    step = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3))), torch.randn(4, 3), lambda m, x: m(x).sin().sum()
    monkeypatch.setenv(name, "1")
    assert verify_synchronization(*step)
    monkeypatch.setenv(name, "2")
    for by_layer in (False, True):
        verdict = str(verify_synchronization(*step, by_layer=by_layer))
        assert verdict.startswith(f"2 ranks differ from one process: each trains alone: {name} is 2, but")
        assert "init_process_group" in verdict


GLOBAL = nn.Sequential(nn.BatchNorm1d(3))


@pytest.mark.parametrize("loss", [
    lambda model, batch: GLOBAL(batch).sum(),
    lambda model, batch: GLOBAL[0](batch).sum(),
    lambda model, batch: batch.sum(),
])  # fmt: skip
def test_a_loss_that_ignores_the_copy_raises(loss):
    with pytest.raises(ValueError, match="loss: expected a function that calls its first argument"):
        verify_synchronization(GLOBAL, torch.randn(4, 3), loss)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_sharded_models_are_verified_by_layer():
    verdicts = []
    for make in (model, plain):
        module = make()
        fully_shard(module[1], mesh=init_device_mesh("cpu", (2,)))
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        verdicts.append(str(verify_synchronization(module, batch(), cross_entropy, by_layer=True)))
    flat = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    verdict = str(verify_synchronization(flat, batch(), cross_entropy, by_layer=True))
    assert verdict == verdicts[0]
    assert verdict.startswith("2 ranks equal one process: 2 outputs, ")
    assert "BatchNorm1d '1' is not converted" in verdicts[1]
    assert UNCONVERTED in verdicts[1]


@pytest.mark.ranks(2)
def test_merge_makes_one_batch_of_nested_lists():
    """Lists with a tensor per sample, as in detection; their lengths differ between ranks."""
    images = [torch.randn(6) for _ in range(2 + dist.get_rank())]

    def loss(model, images):
        return model(torch.stack(images)).square().sum() * (1 if len(images) == 5 else 2)

    assert verify_synchronization(model(), images, loss, merge=lambda lists: list(chain(*lists)))
    with pytest.raises(
        (RuntimeError, ValueError), match="batch: expected the same structure on all ranks; or pass merge"
    ):
        verify_synchronization(model(), images, loss)


def for_command():
    return plain(), batch(), cross_entropy


@pytest.mark.ranks(2)
def test_the_command_exits_with_the_verdict():
    with pytest.raises(SystemExit, match="1"):
        main(["--by-layer", f"{__name__}:for_command"])
    with pytest.raises(SystemExit):
        main([__name__])
