"""Verdicts of verify_synchronization: whether ranks equal one process, and if not, for which reason."""

import copy
import random
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import bagua_syncbn
from bagua_syncbn import convert_sync_batchnorm, masked, verify_synchronization
from bagua_syncbn.verification import main


def model(*more, converted=True):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), *more, nn.Linear(8, 5), nn.BatchNorm1d(5))
    return convert_sync_batchnorm(layers) if converted else layers


def batch(samples=4):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {
        "x": torch.randn(samples, 6, generator=generator),
        "y": (torch.randint(5, (samples,), generator=generator),),
    }


def cross_entropy(model, batch, reduction="mean"):
    return F.cross_entropy(model(batch["x"]), batch["y"][0], reduction=reduction)


def cross_entropy_sum(model, batch):
    return cross_entropy(model, batch, "sum")


def cross_entropy_of_all(model, batch):
    """A mean over the samples of all ranks, as DistributedDataParallel averages it."""
    return cross_entropy(model, batch, "sum") / 6 * (dist.get_world_size() if len(batch["x"]) < 6 else 1)


def ddp(*more, converted=True, **options):
    return DistributedDataParallel(model(*more, converted=converted), **options)


class Wrapped(nn.Module):
    """A model with a parameter more."""

    def __init__(self, use=lambda _: False):
        super().__init__()
        self.model, self.scale, self.use = model(), nn.Parameter(torch.ones(1)), use

    def forward(self, x):
        output = self.model(x)
        return {"scores": output * self.scale if self.use(x) else output}


def of_scores(model, batch):
    return model(batch["x"])["scores"].square().mean()


def pairs(model, batch):
    """A contrastive loss."""
    scores = model(batch["x"])
    return F.cross_entropy(scores @ scores.t(), torch.arange(len(scores)))


class Centered(nn.Module):
    """A module that mixes samples."""

    def forward(self, x):
        return x - x.mean(0)


class Noisy(nn.Sequential):
    """Draws from all generators, in no module of its own."""

    def forward(self, x):
        return super().forward(F.dropout(x * random.random() * numpy.random.rand()))


def with_other(name):
    """A model whose tensor ``name`` differs on the last rank."""
    own = model()
    with torch.no_grad():
        own.state_dict()[name].add_(dist.get_rank())
    return own


def in_groups_of_two():
    return convert_sync_batchnorm(model(converted=False), 2)


def partly():
    return convert_sync_batchnorm(model(converted=False), filter=lambda name, _: name != "4")


def embedding():
    return convert_sync_batchnorm(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.BatchNorm1d(3)))


def images():
    torch.manual_seed(0)
    return convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))


def of_other_sizes(samples):
    return torch.randn(samples, 3, 5 + samples, 6, generator=torch.Generator().manual_seed(samples))


@dataclass(frozen=True)
class Case:
    make: Any
    samples: tuple[int, ...] = (4, 4)
    loss: Any = cross_entropy
    told: tuple[str, ...] = ()  # lines that are told, in their order; of the first a part
    by_layer: bool = False


UNCONVERTED = "BatchNorm1d '4' is not as in one process on"
EQUAL = {
    "one rank": Case(model, (4,)),
    "DistributedDataParallel": Case(ddp),
    "three uneven batches, weighted": Case(ddp, (1, 3, 2), cross_entropy_of_all),
    "four batches, one of them empty": Case(model, (2, 0, 3, 1), cross_entropy_of_all),
    "frozen statistics": Case(lambda: bagua_syncbn.freeze_statistics(model(nn.BatchNorm1d(8)))),
    "activations and outputs made anew": Case(
        lambda: bagua_syncbn.recompute_outputs(bagua_syncbn.fuse_activations(model()))
    ),
    "outputs in a dict, none of a parameter": Case(Wrapped, loss=of_scores),
    "an unused parameter that is looked for": Case(
        lambda: DistributedDataParallel(Wrapped(), find_unused_parameters=True), loss=of_scores
    ),
    "buffers that DistributedDataParallel broadcasts": Case(
        lambda: (own := ddp(), own.module[1].running_mean.add_(dist.get_rank()))[0]
    ),
    "sparse gradients": Case(embedding, loss=lambda model, batch: model(batch["y"][0]).sin().mean()),
    "half": Case(lambda: model().bfloat16()),
    "layers one by one": Case(ddp, (1, 4), by_layer=True),
    "layers one by one, images of other sizes": Case(
        images, (1, 0, 2), lambda model, batch: model(of_other_sizes(len(batch["x"]))).square().sum(), by_layer=True
    ),
}
DIFFERENT = {
    "no layer is converted": Case(
        lambda: model(converted=False),
        told=("output differs by", "BatchNorm1d '1' is not as in one process", UNCONVERTED),
    ),
    "a layer is left out, layers one by one": Case(partly, told=(UNCONVERTED,), by_layer=True),
    "a layer is left out, layers one by one, images of other sizes": Case(
        lambda: bagua_syncbn.revert_sync_batchnorm(images()),
        (1, 2),
        lambda model, batch: model(of_other_sizes(len(batch["x"]))).square().sum(),
        ("BatchNorm2d '1' is not as in one process on the inputs that it meets: output differs",),
        True,
    ),
    "a layer synchronizes with fewer ranks": Case(
        in_groups_of_two, (3,) * 4, told=("output differs by", "with process_group=2", "with process_group=2")
    ),
    "uneven batches": Case(
        ddp, (2, 5), told=("loss differs by", "the loss is a mean over batches of 2, 5 samples: multiplied by")
    ),
    "a batch is empty": Case(ddp, (2, 0), told=("loss differs by up to nan", "a mean over batches of 2, 0")),
    "a sum": Case(ddp, (2, 5), cross_entropy_sum, ("loss differs by", "the loss adds up over samples: added")),
    "dropout": Case(lambda: ddp(nn.Dropout()), told=("output differs by", "Dropout '3' is random: it gives")),
    "randomness in a function": Case(
        lambda: convert_sync_batchnorm(Noisy(*model())), told=("output differs", "the step is random")
    ),
    "other weights": Case(lambda: with_other("0.weight"), told=("output differs", "0.weight differs between ranks")),
    "other buffers": Case(
        lambda: with_other("4.running_var"), told=("buffer 4.running_var differs", "4.running_var differs between")
    ),
    "other buffers, layers one by one": Case(
        lambda: with_other("4.running_var"), told=("running_var of SyncBatchNorm1d '4' differs between",), by_layer=True
    ),
    "an unused parameter": Case(
        lambda: DistributedDataParallel(Wrapped()),
        loss=of_scores,
        told=("gradient scale: none on ranks 0, 1", "gradient scale: none on ranks 0, 1, in which it is unused; Dist"),
    ),
    "a parameter that one rank uses": Case(
        lambda: DistributedDataParallel(Wrapped(lambda x: bool(len(x) % 2 == 0))),
        (3, 4),
        of_scores,
        ("loss differs", "gradient scale: none on rank 0, in which it is unused; Distributed"),
    ),
    "a module mixes samples": Case(lambda: model(Centered()), told=("output differs", "no cause was found")),
    "a loss of pairs of samples": Case(
        model, loss=pairs, told=("loss differs", "outputs are equal: the loss of all batches is not")
    ),
    "a rank is in evaluation": Case(
        lambda: (own := model(), own[1].train(dist.get_rank() == 0))[0],
        told=("mode of module '1' is not alike on all ranks before",),
    ),
    "a rank has more": Case(
        lambda: model(*[nn.Identity(), nn.Linear(8, 8)][: 1 + dist.get_rank()]),
        told=("is not alike on all ranks before the step",),
    ),
}  # fmt: skip
CASES = EQUAL | DIFFERENT


def fewest_ranks_first(cases):
    """Names of cases in an order that starts few jobs."""
    return sorted(cases, key=lambda name: len(cases[name].samples))


def state_of(own):
    """Returns what a verification must leave as it is."""
    modes = [module.training for module in own.modules()]
    gradients = [parameter.grad for parameter in own.parameters()]
    hooks = [dict(hooks) for module in own.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    random_states = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    return (
        copy.deepcopy([modes, gradients, {name: value.clone() for name, value in own.state_dict().items()}]),
        hooks,
        random_states,
    )


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
    return bool(verdict), str(verdict)


@pytest.mark.parametrize("name", fewest_ranks_first(EQUAL))
def test_ranks_that_equal_one_process_are_told_so(pool, name):
    size = len(EQUAL[name].samples)
    for equal, told in pool.run(run, size, name):
        assert told.startswith(f"{size} ranks equal one process: " if size > 1 else "1 rank equals one process: ")
        assert equal


@pytest.mark.parametrize("name", fewest_ranks_first(DIFFERENT))
def test_what_differs_is_named_with_what_causes_it(pool, name):
    case = DIFFERENT[name]
    verdicts = pool.run(run, len(case.samples), name)
    assert len(set(verdicts)) == 1, "ranks have other verdicts"
    (equal, text), *_ = verdicts
    first, *seen = text.split("\n")
    assert not equal
    assert case.told[0] in first, text
    assert len(seen) == len(case.told) - 1, text
    for line, told in zip(seen, case.told[1:], strict=False):
        assert told in line, text


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_sharded_models_are_verified_layer_by_layer():
    verdicts = []
    for converted in (True, False):
        own = model(converted=converted)
        fully_shard(own[1], mesh=init_device_mesh("cpu", (2,)))
        fully_shard(own, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(RuntimeError, match=r"copy\.deepcopy can copy, got .*; by_layer=True"):
            verify_synchronization(own, batch(), cross_entropy)
        verdicts.append(str(verify_synchronization(own, batch(), cross_entropy, by_layer=True)))
    flat = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    told = str(verify_synchronization(flat, batch(), cross_entropy, by_layer=True))
    assert told == verdicts[0] == "2 ranks equal one process: 2 layers, on the inputs that they met"
    assert "BatchNorm1d '1' is not as in one process" in verdicts[1]
    assert UNCONVERTED in verdicts[1]


@pytest.mark.ranks(2)
def test_layers_within_masks_are_verified_with_the_model_alone():
    own, lengths = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3))), torch.tensor([1, 2])

    def loss(model, batch):
        with masked(model, lengths=batch[1], rule=lambda lengths, shape: lengths):
            return model(batch[0])[:, :, 0].square().mean()

    given = torch.randn(2, 3, 4), lengths + dist.get_rank()
    with pytest.raises(ValueError, match="one by one, got SyncBatchNorm1d '0' within masked"):
        verify_synchronization(own, given, loss, by_layer=True)
    told = str(verify_synchronization(own, given, loss))
    assert told.startswith("2 ranks equal one process: 1 output, ")


@pytest.mark.ranks(2)
def test_batches_of_other_structure_are_merged_by_a_function():
    """A batch as of detection: lists with a tensor for each sample, of other lengths on other ranks."""
    images = [torch.randn(6) for _ in range(2 + dist.get_rank())]

    def loss(model, images):
        return model(torch.stack(images)).square().sum() * (1 if len(images) == 5 else 2)

    verdict = verify_synchronization(
        model(), images, loss, merge=lambda lists: [image for own in lists for image in own]
    )
    assert str(verdict).startswith("2 ranks equal one process")
    with pytest.raises((RuntimeError, ValueError), match="merge makes one batch of others"):
        verify_synchronization(model(), images, loss)


def for_command():
    return model(converted=False), batch(), cross_entropy


@pytest.mark.ranks(2)
def test_the_command_ends_with_the_verdict():
    with pytest.raises(SystemExit, match="1"):
        main(["--by-layer", "test_verification:for_command"])
    with pytest.raises(SystemExit):
        main(["test_verification"])
