"""mean_over_ranks: gradients equal the mean over all samples in one process, for any numbers of samples per rank."""

import copy
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bagua_syncbn import SyncBatchNorm1d, convert_sync_batchnorm, mean_over_ranks, with_bagua
from bagua_syncbn._reliability import faults
from bagua_syncbn.communicators import LOCAL, shared
from tests.faults.programs import is_odd, message_of, own_group
from tests.helpers.observed import collectives
from tests.helpers.steps import draw
from tests.helpers.tolerances import assert_close

BOXES = 5  # maximum per image


def detector():
    """A model that predicts a number per box (N, BOXES) from features (N, 6)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, BOXES)).double()


def draw_images(images, seed):
    """Returns features, targets, and a mask of valid boxes; some images have no valid box."""
    boxes = torch.randint(BOXES + 1, (images, 1), generator=torch.Generator().manual_seed(seed))
    return draw(images, 6, seed=seed), draw(images, BOXES, seed=seed + 50), torch.arange(BOXES) < boxes


# Arguments of mean_over_ranks, given the losses of boxes (N, BOXES) and the mask of valid boxes.
LOSSES = {
    "mask": lambda losses, valid: (losses, {"mask": valid}),
    "mask per image": lambda losses, valid: (losses, {"mask": valid[:, :1]}),
    "selected": lambda losses, valid: (losses[valid], {}),
    "count": lambda losses, valid: (losses, {"count": valid.sum()}),
}


def arguments_of(loss, model, batch):
    return LOSSES[loss]((model(batch[0]) - batch[1]).square(), batch[2])


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


@pytest.mark.parametrize(("engine", "loss"), [
    *(("none", loss) for loss in LOSSES),
    *((engine, "mask") for engine in ("DistributedDataParallel", "fully_shard", "with_bagua")),
])  # fmt: skip
@pytest.mark.parametrize("images", [[(2,), (0,), (3,)], [(1, 2), (0, 0), (3, 4)]], ids=["a batch", "micro-batches"])
@pytest.mark.ranks(3)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_gradients_equal_the_mean_over_all_samples(images, loss, engine):
    plain = detector()
    model, rank = distributed(copy.deepcopy(plain), engine), dist.get_rank()
    batches = [[draw_images(size, 10 * each + step) for step, size in enumerate(images[each])] for each in range(3)]
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
                options["count"] = sum(sum_and_count(LOSSES[loss](batch[1], batch[2]))[1] for batch in own)
            losses.append(mean_over_ranks(values, **options, gradients="summed" if engine == "none" else "averaged"))
            losses[-1].backward()
    loss = sum(losses).detach()
    dist.all_reduce(loss)
    assert_close(loss if engine == "none" else loss / 3, expected.detach(), "loss")
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


@pytest.mark.ranks(2)
def test_the_compiled_loss_is_one_graph_and_detects_divergence():
    rank = dist.get_rank()
    with own_group() as communicator:

        def step(values, mask, gradients):
            return mean_over_ranks(values * 2, mask, communicator, gradients=gradients) + 1

        compiled = torch.compile(step, backend="eager", fullgraph=True)
        for sizes, kept, gradients in (((1, 4), 4, "averaged"), ((1, 4), 4, "summed"), ((2, 0), None, "averaged")):
            values = torch.arange(float(sum(sizes))).split(sizes)[rank].requires_grad_()
            mask = torch.ones_like(values) == 1 if kept is None else values != 3
            loss = compiled(values, None if kept is None else mask, gradients)
            loss.backward()
            factor = 2 * (2 if gradients == "averaged" else 1) / (kept or sum(sizes))
            torch.testing.assert_close(loss.detach(), (values.detach() * mask).sum() * factor + 1)
            torch.testing.assert_close(values.grad, mask * factor)
        gradients = "summed" if rank else "averaged"
        if shared.problem():
            assert compiled(values, None, gradients).isnan()
        else:
            with pytest.raises(RuntimeError, match="ranks made different calls"):
                compiled(values, None, gradients)


def mean_in_group(layer, values, mask=None, **options):
    return mean_over_ranks(values, mask, layer.process_group, **options)


# The last rank's call instead of the loss, and how errors describe this call.
DIVERGENCES = {
    "no call": (lambda layer, values: values.mean().backward(), "backward of SyncBatchNorm1d"),
    "gradients": (lambda *args: mean_in_group(*args, gradients="summed"), "mean_over_ranks (gradients='summed')"),
    "invalid mask": (
        lambda layer, values: mean_in_group(layer, values, values),
        "TypeError in mean_over_ranks, message",
    ),
    "unknown argument": (lambda *args: mean_in_group(*args, reduction="mean"), "TypeError in mean_over_ranks, message"),
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
def test_the_loss_takes_one_message_and_the_host_does_not_wait_for_a_device(monkeypatch):
    with patch.object(faults, "CHECKED_AT_ONCE", ()), own_group(20.0) as communicator:
        mean = partial(mean_over_ranks, torch.randn(4), None, communicator)
        losses = [mean(), mean()]  # the group's history now predicts these messages
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "item", None)
            patched.setattr(torch.Tensor, "tolist", None)
            with torch.no_grad(), collectives() as sent:
                losses.append(mean())
            assert sent.total() <= 1
            if not is_odd():
                losses.append(mean())
        message = message_of(lambda: mean(gradients="summed" if is_odd() else "averaged"))
        assert ("this rank: " if is_odd() else "this rank: mean_over_ranks (gradients='averaged')") in message
        assert [loss.isnan().item() for loss in losses] == [False, False, False, True][: len(losses)]
        dist.barrier()


VALUES = torch.ones(2, 3)
INVALID = [
    (([1.0],), {}, TypeError, "values: expected a tensor, got list"),
    ((torch.ones(3, dtype=torch.int64),), {}, TypeError, "a plain floating point tensor, got Tensor of torch.int64"),
    ((VALUES.mean(),), {}, ValueError, "values: expected per-sample losses .*, got a scalar"),
    ((VALUES, VALUES), {}, TypeError, "mask: expected a bool tensor, got torch.float32"),
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


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=pytest.mark.ranks(ranks)) for ranks in (1, 2)])
def test_an_invalid_count_tensor_gives_nan_on_all_ranks(ranks):
    for count in (-1.5, torch.inf, torch.nan):
        assert mean_over_ranks(VALUES, count=torch.tensor(count if dist.get_rank() == 0 else 2.0)).isnan()
    assert mean_over_ranks(VALUES, count=torch.tensor(2.0)) == 3
