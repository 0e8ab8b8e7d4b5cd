"""Verdicts of verify_synchronization: whether ranks equal one process and, if not, the cause."""

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
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bagua_syncbn import (
    convert_sync_batchnorm,
    freeze_statistics,
    fuse_activations,
    mean_over_ranks,
    recompute_outputs,
    sync_batch_norm,
    verify_synchronization,
)
from tests.helpers.steps import draw, gathered, unchanged


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
    return F.cross_entropy(model(batch["x"]), batch["y"][0], reduction=reduction)


def global_cross_entropy(model, batch):
    """The mean over all ranks' 6 samples, for gradients that are averaged over ranks."""
    return cross_entropy(model, batch, "sum") / 6 * (dist.get_world_size() if len(batch["x"]) < 6 else 1)


def box_loss(model, batch):
    """A mean over boxes: ranks with more samples may have fewer boxes."""
    return model(batch["x"]).square()[batch["x"][:, :5] > batch["x"][:, 5:]].mean()


class DictOutput(nn.Sequential):
    def forward(self, x):
        return {"scores": super().forward(x)}


class Centered(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Averaging(nn.Module):
    """Tracks the mean of its inputs; outputs do not depend on it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("stored_mean", torch.zeros(8))

    def forward(self, x):
        self.stored_mean.lerp_(x.mean(0).detach(), 0.1)
        return x


class Elastic(nn.Module):
    """Uses the first channels of a wider layer, through ``normalize``."""

    def __init__(self, normalize):
        super().__init__()
        self.norm, self.normalize = nn.BatchNorm1d(8), normalize
        convert_sync_batchnorm(self)

    def forward(self, x):
        norm = self.norm
        tensors = [tensor[: x.size(1)] for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias)]
        return self.normalize(x, *tensors, training=True)


class Noisy(nn.Sequential):
    """Draws from every random number generator."""

    def forward(self, x):
        return super().forward(F.dropout(x * random.random() * numpy.random.rand()))


def changed_by_rank(change):
    module = model()
    with torch.no_grad():
        change(module[4], dist.get_rank())
    return module


class Example(NamedTuple):
    make: Any
    samples: tuple[int, ...] = (4, 4)
    loss: Any = cross_entropy
    lines: tuple[str, ...] = ()  # text in each line of the verdict; empty if ranks equal one process


LOSS_IS = "statistics match, gradients do not: the loss is a"
ONLY_LOSS_DIFFERS = "loss differs by", "outputs are equal, so statistics match, but the loss"
DIFFER = "; running_mean, running_var differ between ranks after the step"
NOT_CONVERTED = (
    "'3' is not converted (if it is batch normalization, call register_converter for its class); stored_mean differ "
    "between ranks after the step"
)
EXAMPLES = {
    "one rank": Example(model, (4,)),
    "DistributedDataParallel": Example(ddp),
    "one of four batches is empty": Example(model, (2, 0, 3, 1), global_cross_entropy),
    "frozen statistics": Example(lambda: freeze_statistics(model(nn.BatchNorm1d(8)))),
    "fused activations and recomputed outputs": Example(lambda: recompute_outputs(fuse_activations(model()))),
    "dict output": Example(
        lambda: DictOutput(*model()), loss=lambda model, batch: model(batch["x"])["scores"].square().mean()
    ),
    "sync_batch_norm": Example(lambda: Elastic(sync_batch_norm), (1, 0, 3, 2), global_cross_entropy),
    "a single value on a rank, no running statistics": Example(
        lambda: convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False))),
        (1, 3),
        lambda *given: mean_over_ranks(cross_entropy(*given, "none")),
    ),
    "sparse gradients": Example(
        lambda: convert_sync_batchnorm(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.BatchNorm1d(3))),
        loss=lambda model, batch: model(batch["y"][0]).sin().mean(),
    ),
    "bfloat16": Example(lambda: model().bfloat16()),
    "mean_over_ranks": Example(ddp, (2, 0, 5), lambda *given: mean_over_ranks(cross_entropy(*given, "none"))),
    "no converted layer": Example(
        plain,
        lines=(
            "output differs",
            "BatchNorm1d '1' is not converted",
            f"BatchNorm1d '4' is not converted{DIFFER}",
        ),
    ),
    "no converted layer, no buffers": Example(
        lambda: nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False)),
        lines=("output differs", "BatchNorm1d '0' is not converted"),
    ),
    "the model is an unconverted layer": Example(
        lambda: nn.BatchNorm1d(6), lines=("output differs", f"BatchNorm1d is not converted{DIFFER}")
    ),
    "layers synchronize with fewer ranks": Example(
        lambda: model(process_group=2), (3,) * 4, lines=("output", "process_group=2", "process_group=2")
    ),
    "batch sizes differ": Example(
        ddp, (2, 5), lines=("loss differs by", f"{LOSS_IS} mean over different numbers of samples (2, 5); use mean")
    ),
    "an empty batch": Example(ddp, (2, 0), lines=("loss differs by up to nan", f"{LOSS_IS} mean over different")),
    "sum over samples": Example(
        ddp, (2, 5), lambda *given: cross_entropy(*given, "sum"), ("loss differs by", f"{LOSS_IS} sum over samples")
    ),
    "mean over boxes": Example(ddp, (2, 5), box_loss, ONLY_LOSS_DIFFERS),
    "the middle rank agrees": Example(
        model, (4, 4, 4), lambda *given: cross_entropy(*given) + dist.get_rank(), ONLY_LOSS_DIFFERS
    ),
    "random functions": Example(
        lambda: convert_sync_batchnorm(Noisy(*plain())), lines=("output differs", "the step is random (e.g. dropout)")
    ),
    "a module mixes samples": Example(lambda: model(Centered()), lines=("output differs", "no cause was found")),
    "a layer used outside its forward": Example(
        lambda: Elastic(F.batch_norm),
        lines=(
            "output differs",
            "SyncBatchNorm1d 'norm' synchronizes with process_group=None in its forward; to use its tensors outside, "
            f"call bagua_syncbn.sync_batch_norm(..., process_group=layer.process_group, layer=layer){DIFFER}",
        ),
    ),
    "only a buffer differs": Example(
        lambda: model(Averaging()), lines=("buffer 3.stored_mean differs by", f"Averaging {NOT_CONVERTED}")
    ),
    "different buffers": Example(
        lambda: changed_by_rank(lambda layer, rank: layer.running_var.add_(rank)), lines=("4.running_var differs",)
    ),
    "evaluation mode on one rank": Example(
        lambda: changed_by_rank(lambda layer, rank: layer.train(rank == 0)),
        lines=("mode of module '4' differs between ranks",),
    ),
    "more layers on one rank": Example(
        lambda: model(*[nn.Identity(), nn.Linear(8, 8)][: 1 + dist.get_rank()]),
        lines=("4.weight differs between ranks before", "so do 4.bias, 5.weight, "),
    ),
}


# Sorted by the number of ranks, so that few jobs start.
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.ranks(len(case.samples)))
    for name, case in sorted(EXAMPLES.items(), key=lambda item: len(item[1].samples))
])  # fmt: skip
def test_the_verdict_names_the_difference_and_its_cause(name):
    case = EXAMPLES[name]
    module, size = case.make(), len(case.samples)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    with unchanged(module):
        verdict = verify_synchronization(module, batch(case.samples[dist.get_rank()]), case.loss)
    stepped = size > 1 and verdict.compared != "nothing"
    needs_wrapper = stepped and not isinstance(module, DistributedDataParallel)
    assert ["averaged gradients" in note for note in verdict.notes].count(True) == needs_wrapper
    lines = str(verdict).split("\n")[: -1 if needs_wrapper else None]
    assert gathered(lines) == [lines] * size
    assert bool(verdict) == (not case.lines), lines
    expected = case.lines or (f"{size} rank{'s equal' if size > 1 else ' equals'} one process: ",)
    assert len(lines) == len(expected), lines
    for line, part in zip(lines, expected, strict=True):
        assert part in line, lines


def gradient_penalty(model, x):
    """A mean over samples with the squared gradients of the inputs, as in WGAN-GP."""
    output = model(x["x"])
    (grad,) = torch.autograd.grad(output.sin().sum(), x["x"], create_graph=True)
    return (output.square().sum(1) + grad.square().sum(1)).mean()


def stacked(batches):
    return {"x": torch.stack([batch["x"] for batch in batches]).flatten(0, 1)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("merge", [None, stacked])
@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_tensors_of_the_batch_require_gradients_as_given(merge, grad_mode):
    given = {"x": batch()["x"].requires_grad_()}
    for make, is_equal in ((model, True), (plain, False)):
        with grad_mode():
            verdict = verify_synchronization(make(), given, gradient_penalty, merge=merge)
        assert bool(verdict) is is_equal, verdict
    assert given["x"].grad is None
    with pytest.raises(RuntimeError, match="does not require grad"):
        verify_synchronization(model(), {"x": batch()["x"]}, gradient_penalty)


@pytest.mark.parametrize(("loss", "merge", "message"), [
    (None, None, "loss: expected a function of a model and a batch, got NoneType"),
    (lambda model, x: model(x).sum().item(), None, "loss: expected a function that returns a scalar tensor, got float"),
    (lambda model, x: model(x), None, r"loss: expected a function that returns a scalar tensor, got size \[4, 3\]"),
    (lambda model, x: model(x).sum(), "cat", r"merge: expected a function merge\(batches\), or None, got str"),
    *(
        (ignores_the_copy, None, "loss: expected a function that calls its first argument")
        for ignores_the_copy in (lambda _, x: GLOBAL[0](x).sum(), lambda _, x: x.sum())
    ),
])  # fmt: skip
def test_invalid_functions_raise(loss, merge, message):
    with pytest.raises((TypeError, ValueError), match=message):
        verify_synchronization(GLOBAL, torch.randn(4, 3), loss, merge=merge)
    assert GLOBAL[0].weight.grad is None


class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.large, self.small


# How far a gradient of 1 and a gradient of 0 differ between the ranks and one process.
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("of_one", "of_zero", "equal"), [
    (0.8e-7, 0, True), (1.2e-7, 0, False), (0, 0.8e-12, True), (0, 1.2e-12, False),
])  # fmt: skip
def test_values_may_differ_by_the_documented_tolerance(of_one, of_zero, equal):
    def loss(model, batch):
        (large, small), is_rank = model(batch), len(batch) == 2
        return large * (1 + of_one * is_rank) + small * of_zero * is_rank

    verdict = verify_synchronization(Parameters(), torch.zeros(2, 1), loss)
    assert bool(verdict) is equal, verdict


GLOBAL = nn.Sequential(nn.BatchNorm1d(3))


@pytest.mark.ranks(2)
def test_a_sharded_model_cannot_be_copied():
    module = model()
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(RuntimeError, match="model: expected a model that can be copied; verify it before fully_shard"):
        verify_synchronization(module, batch(), cross_entropy)


@pytest.mark.ranks(2)
def test_merge_makes_one_batch_of_nested_lists():
    """Lists with a tensor per sample, as in detection; their lengths differ between ranks."""
    images = [torch.randn(6) for _ in range(2 + dist.get_rank())]

    def loss(model, images):
        return model(torch.stack(images)).square().sum() * (1 if len(images) == 5 else 2)

    assert verify_synchronization(model(), images, loss, merge=lambda lists: list(chain(*lists)))
    with pytest.raises(ValueError, match="batch: expected the same structure on all ranks, got others; pass merge"):
        verify_synchronization(model(), images, loss)
