"""mean_over_ranks: gradients equal the mean over all samples in one process, for any numbers of samples per rank."""

import copy
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bagua_syncbn import SyncBatchNorm1d, convert_sync_batchnorm, mean_over_ranks, with_bagua
from bagua_syncbn.communicators import LOCAL
from bagua_syncbn.reliability import faults
from tests.faults.programs import is_odd, message_of, own_group
from tests.helpers.observed import collectives
from tests.helpers.steps import draw
from tests.helpers.tolerances import assert_close

BOXES = 5  # maximum per image


def detector():
    """A model that predicts boxes (N, BOXES, 4) from features (N, 6)."""
    torch.manual_seed(0)
    head = nn.Linear(8, BOXES * 4), nn.Unflatten(1, (BOXES, 4))
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), *head).double()


def draw_images(images, seed):
    """Returns features, boxes, and a mask of the valid boxes; some images have none."""
    numbers = torch.randint(BOXES + 1, (images, 1), generator=torch.Generator().manual_seed(seed))
    return draw(images, 6, seed=seed), draw(images, BOXES, 4, seed=seed + 50), torch.arange(BOXES) < numbers


# Arguments of mean_over_ranks, given the losses of boxes (N, BOXES) and the mask of valid boxes.
LOSSES = {
    "mask": lambda losses, valid: (losses, {"mask": valid}),
    "mask per image": lambda losses, valid: (losses, {"mask": valid[:, :1]}),
    "selected": lambda losses, valid: (losses[valid], {}),
    "all": lambda losses, valid: (losses, {}),
    "count": lambda losses, valid: (losses, {"count": valid.sum()}),
}


def arguments_of(loss, model, batch):
    losses = F.smooth_l1_loss(model(batch[0]), batch[1], reduction="none").sum(2)
    return LOSSES[loss](losses, batch[2])


def sum_and_count(arguments):
    values, options = arguments
    if "mask" in options:
        values = values[options["mask"].expand_as(values)]
    return values.sum(), int(options.get("count", values.numel()))


def distributed(model, engine):
    convert_sync_batchnorm(model)
    if engine == "DistributedDataParallel":
        return DistributedDataParallel(model)
    if engine == "fully_shard":
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return with_bagua(model, [torch.optim.SGD(model.parameters(), lr=0.1)]) if engine == "with_bagua" else model


def global_loss(loss, engine):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total if engine == "none" else total / dist.get_world_size()


@pytest.mark.parametrize("engine", ["DistributedDataParallel", "fully_shard", "with_bagua", "none"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("images", [  # per micro-batch and rank
    pytest.param(images, marks=pytest.mark.ranks(len(images)))
    for images in ([(3, 2)], [(2,), (0,), (3,)], [(1, 2), (0, 0), (3, 4)])
], ids=str)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_gradients_equal_the_mean_over_all_samples(images, loss, engine):
    plain = detector()
    model, rank = distributed(copy.deepcopy(plain), engine), dist.get_rank()
    batches = [
        [draw_images(size, 10 * rank + step) for step, size in enumerate(own)] for rank, own in enumerate(images)
    ]
    whole = [[torch.cat(parts) for parts in zip(*together, strict=True)] for together in zip(*batches, strict=True)]
    totals = [sum_and_count(arguments_of(loss, plain, batch)) for batch in whole]
    expected = sum(total for total, _ in totals) / sum(count for _, count in totals)
    expected.backward()
    own, losses = batches[rank], []
    for batch in own:
        is_last = batch is own[-1]
        if engine in ("fully_shard", "with_bagua"):
            model.set_requires_gradient_sync(is_last)
        with model.no_sync() if engine == "DistributedDataParallel" and not is_last else nullcontext():
            values, options = arguments_of(loss, model, batch)
            if len(own) > 1:
                options["count"] = sum(sum_and_count(LOSSES[loss](batch[1][..., 0], batch[2]))[1] for batch in own)
            losses.append(mean_over_ranks(values, **options, gradients="summed" if engine == "none" else "averaged"))
            losses[-1].backward()
    assert_close(global_loss(sum(losses), engine), expected.detach(), "loss")
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = parameter.grad.full_tensor() if engine == "fully_shard" else parameter.grad
        if engine == "none":
            dist.all_reduce(grad)
        assert_close(grad, reference.grad, f"gradient {name}")


@pytest.mark.ranks(2)
def test_the_loss_is_zero_if_no_rank_has_samples():
    for values in (torch.empty(0, 3, requires_grad=True), torch.full((4,), torch.inf, requires_grad=True)):
        loss = mean_over_ranks(values, torch.zeros(values.shape, dtype=torch.bool))
        loss.backward()
        assert loss == 0
        assert values.grad.eq(0).all()


@pytest.mark.parametrize("group", [None, LOCAL], ids=["no job", "a group of one"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_one_process_returns_the_mean(dtype, group):
    values = torch.randn(40, 50, dtype=dtype) + 2000  # the sum overflows in float16
    for gradients in ("averaged", "summed"):
        loss = mean_over_ranks(values, process_group=group, gradients=gradients)
        assert (loss.dtype, loss.shape) == (dtype, ())
        assert_close(loss, values.double().mean(), "mean")
    assert mean_over_ranks(values[:0]) == 0


@pytest.mark.ranks(3)
def test_the_mean_without_gradients_takes_one_message():
    values = torch.arange(6.0).split([2, 0, 4])[dist.get_rank()]
    with torch.no_grad():
        for _ in range(3):
            with collectives() as sent:
                loss = mean_over_ranks(values)
    assert sent.total() <= 1  # after the first calls
    assert not loss.requires_grad
    assert global_loss(loss, "averages") == 2.5


@pytest.mark.ranks(2)
def test_the_compiled_loss_is_one_graph_and_detects_divergence():
    rank = dist.get_rank()
    with own_group() as communicator:

        def step(values, mask, gradients):
            return mean_over_ranks(values * 2, mask, communicator, gradients=gradients) + 1

        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        for gradients, ranks in (("averaged", 2), ("summed", 1)):
            values = torch.arange(5.0).split([1, 4])[rank].requires_grad_()
            mask = values != 3
            loss = compiled(values, mask, gradients)
            loss.backward()
            torch.testing.assert_close(loss.detach(), (values.detach()[mask].sum() * 2 * ranks / 4 + 1))
            torch.testing.assert_close(values.grad, mask * 2 * ranks / 4)
        for sizes in ((1, 4), (3, 2), (2, 0)):
            values = torch.arange(float(sum(sizes))).split(sizes)[rank]
            loss = compiled(values, None, "averaged")
            torch.testing.assert_close(loss, values.sum() * 2 * 2 / sum(sizes) + 1)
        assert compiled(values, None, "summed" if rank else "averaged").isnan()


def mean_in_group(layer, values, mask=None, **options):
    return mean_over_ranks(values, mask, layer.process_group, **options)


# Call of the last rank instead of the loss, and its description in the error.
DIVERGENCES = {
    "no call": (lambda layer, values: values.mean().backward(), "backward of SyncBatchNorm1d"),
    "a layer": (lambda layer, values: layer(values), "forward of SyncBatchNorm1d"),
    "gradients": (lambda *args: mean_in_group(*args, gradients="summed"), "mean_over_ranks (gradients='summed')"),
    "invalid mask": (lambda layer, values: mean_in_group(layer, values, values), "TypeError in mean_over_ranks, call"),
    "unknown argument": (lambda *args: mean_in_group(*args, reduction="mean"), "TypeError in mean_over_ranks, call"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_diverging_ranks_raise_on_all(name, steps):
    diverge, told = DIVERGENCES[name]
    values = torch.randn(4, 3, requires_grad=True)
    with own_group() as communicator:
        layer = SyncBatchNorm1d(3, process_group=communicator)

        def run(call):
            for _ in range(steps):
                mean_in_group(layer, layer(values).sin()).backward()
            call(layer, layer(values).sin())

        message = message_of(lambda: run(diverge if is_odd() else mean_in_group))
        if is_odd() and "TypeError" in told:
            assert "mask: expected a bool tensor" in message or "argument 'reduction'" in message
        else:
            assert "ranks made different calls" in message
            assert "mean_over_ranks (gradients='averaged')" in message
            assert told in message
        dist.barrier()


@pytest.mark.ranks(2)
def test_the_host_does_not_wait_for_a_device(monkeypatch):
    with patch.object(faults, "CHECKED_AT_ONCE", ()), own_group(20.0) as communicator:
        mean = partial(mean_over_ranks, torch.randn(4), None, communicator)
        losses = [mean(), mean()]  # later calls are expected
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "item", None)
            patched.setattr(torch.Tensor, "tolist", None)
            losses.append(mean())
            if not is_odd():
                losses.append(mean())
        message = message_of(lambda: mean(gradients="summed" if is_odd() else "averaged"))
        assert ("this rank: " if is_odd() else "this rank: mean_over_ranks (gradients='averaged')") in message
        assert [loss.isnan().item() for loss in losses] == [False, False, False, True][: len(losses)]
        dist.barrier()


VALUES, MASK = torch.ones(2, 3), torch.ones(1, 3, dtype=torch.bool)
INVALID = [
    (([1.0],), {}, TypeError, "values: expected a tensor, got list"),
    ((torch.ones(3, dtype=torch.int64),), {}, TypeError, "of this rank, got Tensor of torch.int64"),
    ((VALUES.mean(),), {}, ValueError, "values: expected per-sample losses .*; got a scalar"),
    ((VALUES, VALUES), {}, TypeError, "mask: expected a bool tensor, got torch.float32"),
    ((VALUES, MASK[0]), {}, ValueError, r"size of values, \[2, 3\], or 1 in any dimension; got \[3\]"),
    ((VALUES, MASK.to("meta")), {}, RuntimeError, "mask: expected a tensor on cpu"),
    ((VALUES,), {"count": "4"}, TypeError, "count: expected a number or a tensor, got str"),
    ((VALUES,), {"count": torch.ones(2)}, ValueError, r"count: expected one number, got size \[2\]"),
    ((VALUES,), {"gradients": "mean"}, ValueError, """gradients: expected "averaged" or "summed", got 'mean'"""),
    ((VALUES, None, "hosts"), {}, TypeError, "process_group: expected"),
    *(((VALUES,), {"count": count}, ValueError, "count: expected a finite") for count in (-1.5, torch.inf, torch.nan)),
]


@pytest.mark.parametrize(("args", "options", "error", "message"), INVALID, ids=lambda value: str(value)[:30])
def test_invalid_arguments_raise(args, options, error, message):
    with pytest.raises(error, match=message):
        mean_over_ranks(*args, **options)


def means_of_invalid_counts():
    compiled = torch.compile(lambda count: mean_over_ranks(VALUES, count=count), backend="eager", fullgraph=True)
    for mean in (compiled, lambda count: mean_over_ranks(VALUES, count=count)):
        for count in (-1.5, torch.inf, torch.nan):
            assert mean(torch.tensor(count if dist.get_rank() == 0 else 2.0)).isnan()
        assert mean(torch.tensor(2.0)).isfinite()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_invalid_count_tensor_gives_nan_on_all_ranks(pool, ranks):
    pool.run(means_of_invalid_counts, ranks)
