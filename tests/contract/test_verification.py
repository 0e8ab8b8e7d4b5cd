"""Verdicts of verify_synchronization: whether ranks equal one process and, if not, the cause."""

import copy
import random
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
    masked,
    mean_over_ranks,
    recompute_outputs,
    revert_sync_batchnorm,
    sync_batch_norm,
    verify_synchronization,
)
from bagua_syncbn.verification import main


def plain(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), *more, nn.Linear(8, 5), nn.BatchNorm1d(5))


def model(*more, **options):
    return convert_sync_batchnorm(plain(*more), **options)


def ddp(*more, **options):
    return DistributedDataParallel(model(*more), **options)


def batch(samples=4):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {
        "x": torch.randn(samples, 6, generator=generator),
        "y": (torch.randint(5, (samples,), generator=generator),),
    }


def cross_entropy(model, batch, reduction="mean"):
    return F.cross_entropy(model(batch["x"]), batch["y"][0], reduction=reduction)


def cross_entropy_of_all(model, batch):
    """A mean over the 6 samples of all ranks, whose gradients are averaged over ranks."""
    return cross_entropy(model, batch, "sum") / 6 * (dist.get_world_size() if len(batch["x"]) < 6 else 1)


def over_ranks(model, batch):
    return mean_over_ranks(cross_entropy(model, batch, "none"))


def of_boxes(model, batch, mean=lambda losses, mask: losses[mask].mean()):
    """A mean over the features above 0, whose numbers do not go with the numbers of samples."""
    return mean(model(batch["x"]).square(), batch["x"][:, :5] > batch["x"][:, 5:])


def raises_on_one_rank(model, batch):
    loss = over_ranks(model, batch)
    if len(batch["x"]) == 5:
        raise ValueError("five samples")
    return loss + over_ranks(model, batch)


class Wrapped(nn.Module):
    """A model with another parameter, for some inputs alone, and its output in a dict."""

    def __init__(self, use=lambda _: False):
        super().__init__()
        self.model, self.scale, self.use = model(), nn.Parameter(torch.ones(1)), use

    def forward(self, x):
        output = self.model(x)
        return {"scores": output * self.scale if self.use(x) else output}


def of_scores(model, batch):
    return model(batch["x"])["scores"].square().mean()


class Centered(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Elastic(nn.Module):
    """Uses the first channels of a wider layer, by ``normalize``; and a layer that no step calls."""

    def __init__(self, normalize, **options):
        super().__init__()
        self.norm, self.unused, self.normalize = *(nn.BatchNorm1d(8, **options) for _ in range(2)), normalize
        convert_sync_batchnorm(self)

    def forward(self, x):
        return self.normalize(x, self.norm)


def tensors_for(x, layer):
    tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
    return [tensor if tensor is None else tensor[: x.size(1)] for tensor in tensors]


def outside(x, layer):
    return F.batch_norm(x, *tensors_for(x, layer), training=True)


def also_outside(x, layer):
    return layer(torch.cat([x, x[:, :2]], 1))[:, :6] + outside(x, layer)


def synchronized(x, layer):
    return sync_batch_norm(x, *tensors_for(x, layer), layer=layer)


class ByHand(nn.Module):
    """Batch normalization whose buffers have names of their own."""

    def __init__(self):
        super().__init__()
        for name in ("stored_mean", "stored_mean_sqr", "unchanged"):
            self.register_buffer(name, torch.zeros(8))

    def forward(self, x):
        mean, square = x.mean(0), x.square().mean(0)
        self.stored_mean.mul_(0.9).add_(mean.detach(), alpha=0.1)
        self.stored_mean_sqr = 0.9 * self.stored_mean_sqr + 0.1 * square.detach()
        return (x - mean) * (square - mean.square() + 1e-5).rsqrt()


class Noisy(nn.Sequential):
    """Draws from all generators, in no module of its own."""

    def forward(self, x):
        return super().forward(F.dropout(x * random.random() * numpy.random.rand()))


def with_other(name, own):
    """Returns ``own``, whose tensor ``name`` differs on the last rank."""
    with torch.no_grad():
        own.state_dict()[name].add_(dist.get_rank())
    return own


def images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def of_images(model, batch):
    """Each rank has images of another size."""
    samples = len(batch["x"])
    images = torch.randn(samples, 3, 5 + samples, 6, generator=torch.Generator().manual_seed(samples))
    return model(images).square().sum()


def in_evaluation_on_one_rank():
    own = model()
    own[1].train(dist.get_rank() == 0)
    return own


class Case(NamedTuple):
    make: Any
    samples: tuple[int, ...] = (4, 4)
    loss: Any = cross_entropy
    lines: tuple[str, ...] = ()  # text in each line of the verdict; empty if ranks equal one process
    by_layer: bool = False


OF_LOSS = "statistics match, gradients do not: the loss is a"
UNCONVERTED = "BatchNorm1d '4' differs from one process on the same inputs: output"
CASES = {
    "one rank": Case(model, (4,)),
    "DistributedDataParallel": Case(ddp),
    "four batches, one of them empty": Case(model, (2, 0, 3, 1), cross_entropy_of_all),
    "frozen statistics": Case(lambda: freeze_statistics(model(nn.BatchNorm1d(8)))),
    "fused activations and recomputed outputs": Case(lambda: recompute_outputs(fuse_activations(model()))),
    "outputs in a dict, none of a parameter": Case(Wrapped, loss=of_scores),
    "an unused parameter that is looked for": Case(
        lambda: DistributedDataParallel(Wrapped(), find_unused_parameters=True), loss=of_scores
    ),
    "buffers that DistributedDataParallel broadcasts": Case(lambda: with_other("module.1.running_mean", ddp())),
    "calls of sync_batch_norm": Case(lambda: Elastic(synchronized), (1, 0, 3, 2), cross_entropy_of_all),
    "sparse gradients": Case(
        lambda: convert_sync_batchnorm(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.BatchNorm1d(3))),
        loss=lambda model, batch: model(batch["y"][0]).sin().mean(),
    ),
    "half": Case(lambda: model().bfloat16()),
    "layers one by one": Case(ddp, (1, 4), by_layer=True),
    "layers one by one, images of other sizes": Case(
        lambda: convert_sync_batchnorm(images()), (1, 0, 2), of_images, by_layer=True
    ),
    "no layer is converted": Case(plain, lines=("output differs", "BatchNorm1d '1' differs from one", UNCONVERTED)),
    "a layer is left out, one by one": Case(
        lambda: model(filter=lambda name, _: name != "4"), lines=(UNCONVERTED,), by_layer=True
    ),
    "a layer is left out, one by one, images of other sizes": Case(
        images, (1, 2), of_images, ("BatchNorm2d '1' differs from one process on the same inputs: output",), True
    ),
    "a layer synchronizes with fewer ranks": Case(
        lambda: model(process_group=2), (3,) * 4, lines=("output", "process_group=2", "process_group=2")
    ),
    "uneven batches": Case(
        ddp, (2, 5), lines=("loss differs by", f"{OF_LOSS} mean over different numbers of samples (2, 5); use mean")
    ),
    "a batch is empty": Case(ddp, (2, 0), lines=("loss differs by up to nan", f"{OF_LOSS} mean over different")),
    "a sum": Case(
        ddp, (2, 5), lambda *given: cross_entropy(*given, "sum"), ("loss differs by", f"{OF_LOSS} sum over samples")
    ),
    "a mean over boxes": Case(
        ddp, (2, 5), of_boxes, ("loss differs by", "outputs are equal, so statistics match, but the loss")
    ),
    "mean_over_ranks": Case(ddp, (2, 0, 5), over_ranks),
    "mean_over_ranks of boxes": Case(model, (2, 5), lambda *given: of_boxes(*given, mean_over_ranks)),
    "dropout": Case(lambda: ddp(nn.Dropout()), lines=("output differs by", "Dropout '3' is random: its output")),
    "randomness in a function": Case(
        lambda: convert_sync_batchnorm(Noisy(*plain())), lines=("output differs", "the step is random")
    ),
    "other weights": Case(lambda: with_other("0.weight", model()), lines=("0.weight differs between ranks",)),
    "other buffers": Case(lambda: with_other("4.running_var", model()), lines=("4.running_var differs between",)),
    "other buffers, layers one by one": Case(
        lambda: with_other("4.running_var", model()), lines=("running_var of SyncBatchNorm1d '4'",), by_layer=True
    ),
    "an unused parameter": Case(
        lambda: DistributedDataParallel(Wrapped()), loss=of_scores, lines=("gradient scale: ranks 0, 1 did not use",)
    ),
    "a parameter that one rank uses": Case(
        lambda: DistributedDataParallel(Wrapped(lambda x: bool(len(x) % 2 == 0))),
        (3, 4), of_scores, ("loss differs", "gradient scale: rank 0 did not use the parameter; pass find_unused"),
    ),
    "a module mixes samples": Case(lambda: model(Centered()), lines=("output differs", "no cause was found")),
    "a layer is used outside its forward": Case(
        lambda: Elastic(outside),
        lines=(
            "output differs",
            "SyncBatchNorm1d 'norm' was not called in the step, but its running_mean, running_var differ between ranks:"
            " it synchronizes with process_group=None, but only in its own forward; call it with all its channels, or "
            "use bagua_syncbn.sync_batch_norm(..., process_group=layer.process_group, layer=layer)",
        ),
    ),
    "a layer without buffers is used outside its forward": Case(
        lambda: Elastic(outside, track_running_stats=False),
        lines=("output differs", "1d 'norm' was not called in the step, but its parameters have gradients: it"),
    ),
    "a layer is also used outside its forward": Case(
        lambda: Elastic(also_outside),
        lines=(
            "output differs",
            "running_mean, running_var of SyncBatchNorm1d 'norm' differ between ranks after the step: it synchronizes "
            "with process_group=None, but only in its own forward; call it",
        ),
    ),
    "a layer that is not converted is used outside its forward": Case(
        lambda: revert_sync_batchnorm(Elastic(outside)),
        lines=("output differs", "of BatchNorm1d 'norm' differ between ranks after the step: it is not converted"),
    ),
    "batch normalization by hand": Case(
        lambda: model(ByHand()),
        lines=(
            "output differs",
            "stored_mean, stored_mean_sqr of ByHand '3' differ between ranks after the step: it is not converted; if "
            "it is batch normalization, call register_converter for its class, or bagua_syncbn.sync_batch_norm(..., "
            "layer=self) in its forward",
        ),
    ),
    "a rank is in evaluation": Case(in_evaluation_on_one_rank, lines=("mode of module '1' differs between ranks",)),
    "a rank has more": Case(
        lambda: model(*[nn.Identity(), nn.Linear(8, 8)][: 1 + dist.get_rank()]),
        lines=("4.weight differs between ranks before", "so do 4.bias, 5.weight, "),
    ),
}  # fmt: skip


def state_of(own):
    """Returns what a verification must leave as it is."""
    modes = [module.training for module in own.modules()]
    gradients = [parameter.grad for parameter in own.parameters()]
    hooks = [dict(hooks) for module in own.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    random_states = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    values = {name: value.clone() for name, value in own.state_dict().items()}
    return copy.deepcopy([modes, gradients, values]), hooks, random_states


def run(name):
    case = CASES[name]
    own = case.make()
    for parameter in own.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state_of(own)
    verdict = verify_synchronization(own, batch(case.samples[dist.get_rank()]), case.loss, by_layer=case.by_layer)
    after = state_of(own)
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0, equal_nan=True)
    assert after[1:] == before[1:]
    stepped = dist.get_world_size() > 1 and not case.by_layer and verdict.compared != "nothing"
    averages_itself = stepped and not isinstance(own, DistributedDataParallel)
    assert ["averaged gradients" in note for note in verdict.notes].count(True) == averages_itself
    return bool(verdict), str(verdict).split("\n")[: -1 if averages_itself else None]


@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: len(CASES[name].samples)))  # starts few jobs
def test_the_verdict_names_what_differs_and_its_cause(pool, name):
    case = CASES[name]
    verdicts = pool.run(run, len(case.samples), name)
    assert all(verdict == verdicts[0] for verdict in verdicts)
    equal, lines = verdicts[0]
    assert equal == (not case.lines)
    expected = case.lines or (f"{len(case.samples)} rank{'s equal' if len(verdicts) > 1 else ' equals'} one process: ",)
    assert len(lines) == len(expected), lines
    for line, part in zip(lines, expected, strict=True):
        assert part in line, lines


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_process_of_a_job_that_was_not_initialized_is_not_approved(name, monkeypatch):
    step = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3))), torch.randn(4, 3), lambda m, x: m(x).sin().sum()
    monkeypatch.setenv(name, "1")
    assert verify_synchronization(*step)
    monkeypatch.setenv(name, "2")
    for by_layer in (False, True):
        verdict = str(verify_synchronization(*step, by_layer=by_layer))
        assert verdict.startswith(f"2 ranks differ from one process: each trains alone: {name} is 2, but")
        assert "init_process_group" in verdict


def run_raising():
    with pytest.raises((ValueError, RuntimeError), match="five samples"):
        verify_synchronization(ddp(), batch(3 + 2 * dist.get_rank()), raises_on_one_rank)


def test_a_loss_over_ranks_that_raises_on_one_raises_on_all(pool):
    pool.run(run_raising, 2, timeout=60)
    pool.forget_job()


OWN = nn.Sequential(nn.BatchNorm1d(3))
WRONG = {
    "calls the model": (lambda model, batch: OWN(batch).sum(), None, "loss: .* calls its first .* calls the original"),
    "calls a layer": (lambda model, batch: OWN[0](batch).sum(), None, "loss: .* calls its first .* calls the original"),
    "calls nothing": (lambda model, batch: batch.sum(), None, "loss: .* calls its first .* does not"),
    "returns a number": (lambda model, batch: len(model(batch)), None, "loss: .* returns a scalar tensor, got int"),
    "merge": (lambda model, batch: model(batch).sum(), 3, "merge: expected .* a list of batches, or None, got int"),
    "merged": (lambda model, batch: model(batch).sum(), lambda _: 3, "merge: .* that returns one batch, got int"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    loss, merge, error = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=error):
        verify_synchronization(OWN, torch.randn(4, 3), loss, merge=merge)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_sharded_models_are_verified_layer_by_layer():
    verdicts = []
    for make in (model, plain):
        own = make()
        fully_shard(own[1], mesh=init_device_mesh("cpu", (2,)))
        fully_shard(own, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(RuntimeError, match=r"copy\.deepcopy failed, .*; by_layer=True"):
            verify_synchronization(own, batch(), cross_entropy)
        verdicts.append(str(verify_synchronization(own, batch(), cross_entropy, by_layer=True)))
    flat = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    told = str(verify_synchronization(flat, batch(), cross_entropy, by_layer=True))
    assert told == verdicts[0] == "2 ranks equal one process: 2 calls of layers"
    assert "BatchNorm1d '1' differs from one process" in verdicts[1]
    assert UNCONVERTED in verdicts[1]


@pytest.mark.ranks(2)
def test_layers_within_masks_are_verified_with_the_model_alone():
    own, lengths = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3))), torch.tensor([1, 2])

    def loss(model, batch):
        with masked(model, lengths=batch[1], rule=lambda lengths, shape: lengths):
            return model(batch[0])[:, :, 0].square().mean()

    given = torch.randn(2, 3, 4), lengths + dist.get_rank()
    with pytest.raises(ValueError, match="one by one, got SyncBatchNorm1d '0' inside masked"):
        verify_synchronization(own, given, loss, by_layer=True)
    told = str(verify_synchronization(own, given, loss))
    assert told.startswith("2 ranks equal one process: 1 output, ")


@pytest.mark.ranks(2)
def test_gradients_of_inputs_are_compared():
    def loss(model, x):
        output = model(x)
        if len(x) == 4:  # not in one process
            output.register_hook(lambda grad: grad + dist.get_rank())
        return output.square().mean()

    own, x = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(6, affine=False))), batch()["x"].requires_grad_()
    told = str(verify_synchronization(own, x, loss))
    assert told.startswith("2 ranks differ from one process: input-gradient 0 differs")


@pytest.mark.ranks(2)
def test_batches_of_other_structure_are_merged_by_a_function():
    """Lists with a tensor for each sample, of other lengths on other ranks, as in detection."""
    images = [torch.randn(6) for _ in range(2 + dist.get_rank())]

    def loss(model, images):
        return model(torch.stack(images)).square().sum() * (1 if len(images) == 5 else 2)

    merge = lambda lists: [image for own in lists for image in own]  # noqa: E731
    assert verify_synchronization(model(), images, loss, merge=merge)
    with pytest.raises((RuntimeError, ValueError), match="pass merge, which makes one batch"):
        verify_synchronization(model(), images, loss)


def for_command():
    return plain(), batch(), cross_entropy


@pytest.mark.ranks(2)
def test_the_command_ends_with_the_verdict():
    with pytest.raises(SystemExit, match="1"):
        main(["--by-layer", f"{__name__}:for_command"])
    with pytest.raises(SystemExit):
        main([__name__])
