"""mean_over_ranks: with different numbers of samples, ranks get the gradients of the mean in one process."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bagua_syncbn import SyncBatchNorm1d, check_ranks, convert_sync_batchnorm, mean_over_ranks, over_ranks, with_bagua
from bagua_syncbn.communicators import LOCAL
from bagua_syncbn.reliability.history import history_in
from bagua_syncbn.reliability.protocol import RankExchange
from tests.faults.programs import is_odd, message_of, own_group
from tests.helpers.observed import collectives
from tests.helpers.tolerances import assert_close

BOXES = 5  # at most, of an image


class Detector(nn.Sequential):
    """Predicts boxes (N, BOXES, 4) from features (N, 6)."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, BOXES * 4))
        self.double()

    def forward(self, features):
        return super().forward(features).unflatten(1, (BOXES, 4))


def draw(images, seed):
    """Returns features, boxes, and a mask of the valid boxes; some images have none."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(images, 6, generator=generator, dtype=torch.float64)
    boxes = torch.randn(images, BOXES, 4, generator=generator, dtype=torch.float64)
    numbers = torch.randint(BOXES + 1, (images, 1), generator=generator)
    return features, boxes, torch.arange(BOXES) < numbers


def losses_of(model, batch):
    """Returns the losses of all boxes (N, BOXES), and the mask of the valid ones."""
    return F.smooth_l1_loss(model(batch[0]), batch[1], reduction="none").sum(2), batch[2]


def of_boxes(model, batch, **options):
    return mean_over_ranks(*losses_of(model, batch), **options)


def of_list(model, batch, **options):
    """Takes the losses of the valid boxes only, in one dimension."""
    losses, mask = losses_of(model, batch)
    return mean_over_ranks(losses[mask], **options)


def of_images(model, batch, **options):
    return mean_over_ranks(model(batch[0]).sin().sum(2), **options)


def of_some_images(model, batch, **options):
    """Takes a mask with one value per image."""
    return mean_over_ranks(model(batch[0]).sin().sum(2), batch[0][:, :1] > 0, **options)


def for_each_box(model, batch, **options):
    """Divides a sum over all boxes by the number of valid ones."""
    return mean_over_ranks(model(batch[0]).sin(), count=batch[2].sum(), **options)


def expected_of(loss, model, batch):
    """Returns the mean in one process, computed by torch."""
    losses, mask = losses_of(model, batch)
    if loss in (of_boxes, of_list):
        return losses[mask].sum() / max(int(mask.sum()), 1)
    if loss is for_each_box:
        return model(batch[0]).sin().sum() / max(int(mask.sum()), 1)
    values = model(batch[0]).sin().sum(2)
    return (values if loss is of_images else values[batch[0][:, 0] > 0]).mean()


def distributed(model, engine):
    convert_sync_batchnorm(model)
    if engine == "DistributedDataParallel":
        return DistributedDataParallel(model)
    if engine == "fully_shard":
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return with_bagua(model, [torch.optim.SGD(model.parameters(), lr=0.1)]) if engine == "with_bagua" else model


def check_gradients(model, plain, engine, atol=0.0):
    for (name, own), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = own.grad.full_tensor() if engine == "fully_shard" else own.grad
        if engine == "none":
            dist.all_reduce(grad)
        assert_close(grad, expected.grad, f"gradient {name}")


def total_of(loss, engine):
    """Returns the loss over all ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total if engine == "none" else total / dist.get_world_size()


SPREADS = [pytest.param(sizes, marks=pytest.mark.ranks(len(sizes))) for sizes in ((4,), (1, 4), (2, 0, 3))]
ENGINES = ["DistributedDataParallel", "with_bagua", "none"]
LOSSES = [of_boxes, of_list, of_images, of_some_images, for_each_box]


@pytest.mark.parametrize("engine", [*ENGINES, "fully_shard"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("sizes", SPREADS, ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_gradients_equal_those_of_the_mean_over_all_samples(sizes, loss, engine):
    plain, batches = Detector(), [draw(size, seed) for seed, size in enumerate(sizes, 10)]
    model = distributed(copy.deepcopy(plain), engine)
    expected = expected_of(loss, plain, [torch.cat(parts) for parts in zip(*batches, strict=True)])
    expected.backward()
    options = {"gradients": "summed"} if engine == "none" else {}
    own = loss(model, batches[dist.get_rank()], **options)
    own.backward()
    assert_close(total_of(own, engine), expected.detach(), "loss")
    check_gradients(model, plain, engine)


# The images of each micro-batch of each rank.
@pytest.mark.parametrize("spread", [
    pytest.param([(3, 2)], marks=pytest.mark.ranks(1)),
    pytest.param([(1, 3, 2), (4, 0, 2)], marks=pytest.mark.ranks(2)),
    pytest.param([(1, 2), (0, 0), (3, 4)], marks=pytest.mark.ranks(3)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("engine", ENGINES)
def test_accumulated_gradients_equal_those_of_the_mean_over_all_micro_batches(spread, engine):
    plain, rank = Detector(), dist.get_rank()
    every = [[draw(size, 10 * seed + index) for index, size in enumerate(sizes)] for seed, sizes in enumerate(spread)]
    model = distributed(copy.deepcopy(plain), engine)
    boxes = sum(int(batch[2].sum()) for own in every for batch in own)
    for together in zip(*every, strict=True):
        losses, mask = losses_of(plain, [torch.cat(parts) for parts in zip(*together, strict=True)])
        (losses[mask].sum() / boxes).backward()
    count = sum(int(batch[2].sum()) for batch in every[rank])
    *first, last = every[rank]
    options = {"count": count, "gradients": "summed" if engine == "none" else "averaged"}
    if engine == "with_bagua":
        model.set_requires_gradient_sync(False)
    with model.no_sync() if engine == "DistributedDataParallel" else nullcontext():
        for batch in first:
            of_boxes(model, batch, **options).backward()
    if engine == "with_bagua":
        model.set_requires_gradient_sync(True)
    of_boxes(model, last, **options).backward()
    check_gradients(model, plain, engine)


@pytest.mark.ranks(2)
def test_without_samples_on_any_rank_the_loss_is_zero():
    for values in (torch.empty(0, 3, requires_grad=True), torch.full((4,), torch.inf, requires_grad=True)):
        mask = torch.zeros(values.shape, dtype=torch.bool)
        loss = mean_over_ranks(values, mask)
        loss.backward()
        assert loss == 0
        assert values.grad.eq(0).all()


@pytest.mark.parametrize("group", [None, LOCAL], ids=["no job", "a group of one"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_one_process_returns_the_plain_mean(dtype, group):
    values = torch.randn(40, 50, dtype=dtype) + 2000  # whose sum no float16 holds
    for gradients in ("averaged", "summed"):
        loss = mean_over_ranks(values, process_group=group, gradients=gradients)
        assert loss.dtype == dtype
        assert loss.shape == ()
        assert_close(loss, values.double().mean(), "mean")
    assert mean_over_ranks(values[:0]) == 0


@pytest.mark.ranks(3)
def test_without_gradients_the_mean_takes_one_message():
    values = torch.arange(6.0).split([2, 0, 4])[dist.get_rank()]
    with torch.no_grad():
        for _ in range(3):
            with collectives() as sent:
                loss = mean_over_ranks(values)
    assert sent.total() == 1  # once the ranks know what comes
    assert not loss.requires_grad
    assert loss == values.sum() * 3 / 6
    assert total_of(loss, "averages") == 2.5


@pytest.mark.ranks(2)
def test_a_compiled_loss_is_one_graph_and_detects_divergence():
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


DIVERGENCES = {
    "leaves it out": (lambda layer, values: values.mean().backward(), "backward of SyncBatchNorm1d"),
    "calls a layer instead": (lambda layer, values: layer(values), "forward of SyncBatchNorm1d"),
    "has other gradients": (
        lambda layer, values: mean_over_ranks(values, process_group=layer.process_group, gradients="summed"),
        "mean_over_ranks (gradients='summed')",
    ),
    "gives wrong arguments": (
        lambda layer, values: mean_over_ranks(values, values, layer.process_group),
        "TypeError in mean_over_ranks, call",
    ),
    "gives an argument of no name": (
        lambda layer, values: mean_over_ranks(values, process_group=layer.process_group, reduction="mean"),
        "TypeError in mean_over_ranks, call",
    ),
}  # fmt: skip


def alike(layer, values):
    mean_over_ranks(values, process_group=layer.process_group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_ranks_that_differ_raise_on_all(name, steps):
    diverge, told = DIVERGENCES[name]
    values = torch.randn(4, 3, requires_grad=True)
    with own_group() as communicator:
        layer = SyncBatchNorm1d(3, process_group=communicator)

        def run(last):
            for _ in range(steps):
                mean_over_ranks(layer(values).sin(), None, communicator).backward()
            (diverge if last else alike)(layer, layer(values).sin())

        message = message_of(lambda: run(is_odd()))
        if not is_odd() or "gives" not in name:
            assert "ranks made different calls" in message
            assert "mean_over_ranks (gradients='averaged')" in message
            assert told in message
        else:
            assert "mask: expected a bool tensor" in message or "argument 'reduction'" in message
        dist.barrier()


class OnDevice(RankExchange):
    """Does not compare headers on the host, as on CUDA: the sums are NaN if they differ."""

    def total(self, values):
        try:
            return super().total(values)
        except RuntimeError:
            self._history.add(self._signature)  # on a device the message was sent
            return torch.full_like(values, torch.nan)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("differ", [False, True])
def test_the_host_does_not_wait_for_a_device(monkeypatch, differ):
    with own_group(20.0) as communicator, monkeypatch.context() as patched:
        values = torch.randn(4)
        mean_over_ranks(values, None, communicator)
        history = history_in(communicator)
        record = history.record_of("cpu")
        record.is_checked_at_once = False
        patched.setattr(over_ranks, "RankExchange", OnDevice)
        patched.setattr(torch.Tensor, "item", None)
        gradients = "summed" if differ and is_odd() else "averaged"
        loss = mean_over_ranks(values, None, communicator, gradients=gradients)
        assert loss.isnan().tolist() == differ
        if differ:
            with pytest.raises(RuntimeError, match=f"this rank: mean_over_ranks .gradients='{gradients}'"):
                check_ranks()
        dist.barrier()


VALUES, SQUARE = torch.randn(2, 3), torch.randn(3, 3)
WRONG = {
    "no tensor": (([1.0],), {}, TypeError, "values: expected a tensor, got list"),
    "integers": ((torch.ones(3, dtype=torch.int64),), {}, TypeError, "of this rank, got Tensor of torch.int64"),
    "a loss": ((VALUES.mean(),), {}, ValueError, "values: expected the loss of each sample .*, got a scalar"),
    "no mask": ((VALUES, VALUES), {}, TypeError, "mask: expected a bool tensor, got torch.float32"),
    "another size": (
        (VALUES, torch.ones(2, dtype=torch.bool)), {}, ValueError, r"broadcasts to values, \[2, 3\], got \[2\]; give"
    ),
    "read in two ways": ((SQUARE, torch.ones(3, dtype=torch.bool)), {}, ValueError, "ambiguous mask of shape"),
    "another device": (
        (VALUES, torch.ones(2, 3, dtype=torch.bool, device="meta")), {}, RuntimeError, "mask: expected a tensor on cpu"
    ),
    "a count of no kind": ((VALUES,), {"count": "4"}, TypeError, "count: expected a number or a tensor, got str"),
    "many counts": ((VALUES,), {"count": torch.ones(2)}, ValueError, r"count: expected one number, got size \[2\]"),
    "gradients": (
        (VALUES,), {"gradients": "mean"}, ValueError, """gradients: expected "averaged" or "summed", got 'mean'"""
    ),
    "a group": ((VALUES, None, "hosts"), {}, TypeError, "process_group: expected"),
}  # fmt: skip


@pytest.mark.parametrize("count", [-1.5, torch.inf, torch.nan, -2])
@pytest.mark.parametrize("number", [float, torch.tensor])
def test_counts_that_are_negative_or_not_finite_are_refused(number, count):
    with pytest.raises(ValueError, match="count: expected a finite number of at least 0, got"):
        mean_over_ranks(VALUES, count=number(count))


def compiled_with_wrong_counts():
    compiled = torch.compile(lambda count: mean_over_ranks(VALUES, count=count), backend="eager", fullgraph=True)
    for count in (-1.5, torch.inf, torch.nan):  # on one rank
        assert compiled(torch.tensor(count if dist.get_rank() == 0 else 2.0)).isnan()
    assert compiled(torch.tensor(2.0)).isfinite()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_count_that_no_host_reads_gives_nan(pool, ranks):
    pool.run(compiled_with_wrong_counts, ranks)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    args, options, error, told = WRONG[name]
    with pytest.raises(error, match=told):
        mean_over_ranks(*args, **options)
