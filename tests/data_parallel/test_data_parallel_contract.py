"""Replicas of one process equal one layer on the whole batch: the contract among threads."""

import copy
import gc
from weakref import ref

import pytest
import torch
from torch import nn

from bagua_syncbn.communicators import replicas
from bagua_syncbn.data_parallel import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    convert_model,
)
from tests.helpers.formula import Clamped
from tests.helpers.replicated import GPU_PLACES, PAIRS, build, check_equal, inputs_of, parallel, run
from tests.helpers.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("single_threaded")
PLACES = ["cpu", *(pytest.param(place, marks=pytest.mark.gpu) for place in GPU_PLACES)]


OPTIONS = [{"affine": False}, {"track_running_stats": False}]  # tests/contract/test_ways.py has the others
# For 4 devices, 9 samples make chunks of 3, 3, 3: three replicas; 7 make 2, 2, 2, 1; 3 make three replicas of one.
SPLITS = [(1, 7), (2, 1), (2, 7), (3, 8), (4, 9), (4, 7), (4, 3)]
CASES = [
    *((*split, SynchronizedBatchNorm2d, "plus", {}) for split in SPLITS),
    *((3, 7, SynchronizedBatchNorm1d, "plus", options) for options in OPTIONS),
    *((2, 5, cls, "clamp", {}) for cls in PAIRS),
]


@pytest.mark.parametrize(
    ("count", "samples", "cls", "eps_mode", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
)
@pytest.mark.parametrize("place", PLACES)
def test_replicas_equal_the_full_batch(place, count, samples, cls, eps_mode, options):
    options = {"eps": 1e-3} | options
    torch.manual_seed(1)
    expected = build(PAIRS[cls], **({"wrap": Clamped} if eps_mode == "clamp" else {}), **options)
    model = build(cls, eps_mode=eps_mode, **options)
    model.load_state_dict({name.replace("layer.", ""): value for name, value in expected.state_dict().items()})
    actual = parallel(model, place, count)
    for step in range(3):
        batch = inputs_of(cls, samples, step)
        grad_output = torch.randn(samples, 2, *batch.shape[2:], dtype=torch.float64)
        check_equal(run(actual, batch, grad_output), run(expected, batch, grad_output), f" at step {step}")
    if options.get("track_running_stats", True):  # otherwise replicas are on their own, as ranks are
        assert_close(actual.eval()(batch).cpu(), expected.eval()(batch), "output in evaluation")


def test_one_sample_of_one_value_in_each_replica():
    torch.manual_seed(2)
    batch, grad_output = torch.randn(2, 3, 4, dtype=torch.float64)
    actual = parallel(SynchronizedBatchNorm1d(4).double(), "cpu", 3)
    expected = nn.BatchNorm1d(4).double()
    check_equal(run(actual, batch, grad_output), run(expected, batch, grad_output))
    with pytest.raises(ValueError, match="expected more than 1 value per channel"):
        actual(batch[:1])  # one replica


def test_clamp_of_constant_channels_and_without_eps():
    constant = torch.ones(4, 2, dtype=torch.float64)
    layer = SynchronizedBatchNorm1d(2, eps=1e-5, eps_mode="clamp").double()
    assert torch.equal(parallel(layer, "cpu", 2)(constant), torch.zeros_like(constant))
    batch = torch.randn(4, 2, dtype=torch.float64)
    layer = SynchronizedBatchNorm1d(2, eps=0.0, eps_mode="clamp").double()
    expected = (batch - batch.mean(0)) / batch.std(0, correction=0)
    assert_close(parallel(layer, "cpu", 2)(batch), expected, "output")


def partial_loss(model, batch, sample):
    batch = batch.clone().requires_grad_()
    output = model(batch)
    return torch.autograd.grad(output[sample].sin().sum(), (batch, *model.parameters()))


@pytest.mark.parametrize("place", PLACES)
def test_a_replica_whose_output_is_not_in_the_loss(place):
    expected = build(nn.BatchNorm2d)
    actual = parallel(convert_model(copy.deepcopy(expected)), place, 3)
    batch = inputs_of(nn.BatchNorm2d, 6)
    for sample in (0, 3, 5):  # one of each replica
        grads = partial_loss(actual, batch, sample), partial_loss(expected, batch, sample)
        for grad, reference in zip(*grads, strict=True):
            assert_close(grad.cpu(), reference, f"gradient of the loss of sample {sample}")
        assert grads[0][0].abs().amin() > 0  # the samples of other replicas have one through the statistics


class OnePart(nn.Module):
    """Runs its layer, and puts only one replica's output or input into the graph."""

    def __init__(self, layer, detached):
        super().__init__()
        self.layer, self.detached = layer, detached

    def __data_parallel_replicate__(self, ctx, copy_id):
        self.copy_id = copy_id

    def forward(self, input):
        if self.detached == "input" and self.copy_id == 1:
            input = input.detach()
        with torch.set_grad_enabled(not (self.detached == "forward" and self.copy_id == 0)):
            output = self.layer(input)
        return output.detach() if self.detached == "output" and self.copy_id == 1 else output


@pytest.mark.parametrize("detached", ["input", "output", "forward"])
@pytest.mark.parametrize("place", ["cpu, with copies", *PLACES])
def test_a_replica_that_is_partly_outside_of_the_graph(monkeypatch, place, detached):
    if place == "cpu, with copies":  # as between several devices
        monkeypatch.setattr(replicas, "_copy_to", lambda tensor, device: tensor.to(device, copy=True))
        place = "cpu"
    expected = nn.BatchNorm1d(3).double()
    actual = parallel(OnePart(SynchronizedBatchNorm1d(3).double(), detached), place, 2)
    batch = torch.randn(6, 3, dtype=torch.float64)
    parts = [part.clone().requires_grad_() for part in batch.split(3)]
    outputs = expected(torch.cat([parts[0], parts[1].detach() if detached == "input" else parts[1]])).split(3)
    in_loss = {"input": (0, 1), "output": (0,), "forward": (1,)}[detached]
    sum(outputs[rank].sin().sum() for rank in in_loss).backward()

    whole = batch.clone().requires_grad_()
    actual(whole).sin().sum().backward()
    for rank, part in enumerate(parts):
        reference = torch.zeros_like(part) if part.grad is None else part.grad
        if detached == "forward" and rank == 0:
            # It computes without a graph, statistics included.
            reference = torch.zeros_like(part)
        assert_close(whole.grad.split(3)[rank], reference, f"input.grad of replica {rank}")
    assert_close(actual.module.layer.weight.grad.cpu(), expected.weight.grad, "weight.grad")


@pytest.mark.parametrize("place", PLACES)
def test_replicas_equal_one_process_without_gradients(place):
    batch = torch.randn(5, 3, 4, dtype=torch.float64)
    for mode in (torch.no_grad, torch.inference_mode):
        expected, layer = nn.BatchNorm1d(3).double(), SynchronizedBatchNorm1d(3).double()
        with mode():
            output = parallel(layer, place, 2)(batch)
            assert_close(output.cpu(), expected(batch), "output")
        assert not output.requires_grad
        assert_close(layer.running_var.cpu(), expected.running_var, "running_var")
        assert layer.num_batches_tracked == 1


class Sight(nn.Module):
    """Notes its own replicas."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.seen = layer, []

    def forward(self, input):
        self.seen.append((ref(self), self.layer.running_mean.data_ptr()))
        return self.layer(input)


@pytest.mark.parametrize("place", PLACES)
def test_only_the_users_buffers_change(place):
    model = Sight(SynchronizedBatchNorm1d(3))
    wrapped = parallel(model, place, 3)
    buffers = dict(model.layer.named_buffers())
    gc.collect()
    gc.disable()
    try:
        output = wrapped(torch.randn(6, 3))
        if place != "several GPUs":  # there torch's class runs them
            assert [replica() for replica, _ in model.seen] == [None] * 3  # freed with forward, not with the next gc
        output.sum().backward()
    finally:
        gc.enable()
    pointers = {pointer for _, pointer in model.seen}
    assert len(pointers) == 3
    assert buffers["running_mean"].data_ptr() in pointers
    assert all(getattr(model.layer, name) is buffer for name, buffer in buffers.items())
    assert model.layer.num_batches_tracked == 1
    assert model.layer._replica is None


def test_nothing_meets_in_backward(monkeypatch):
    meet, calls = replicas.Replicas.meet, []
    monkeypatch.setattr(replicas.Replicas, "meet", lambda *args: calls.append(args[1]) or meet(*args))
    model = parallel(build(SynchronizedBatchNorm1d), "cpu", 2)
    output = model(inputs_of(nn.BatchNorm1d, 4).requires_grad_())
    assert sorted(calls) == [0, 0, 1, 1]  # once for each of two layers
    output.sum().backward()
    assert len(calls) == 4
    model.eval()(inputs_of(nn.BatchNorm1d, 4))
    assert len(calls) == 4


def test_same_bits_every_time():
    def step():
        torch.manual_seed(0)
        model = parallel(build(SynchronizedBatchNorm2d), "cpu", 4)
        return run(model, inputs_of(nn.BatchNorm2d, 8), torch.randn(8, 2, 2, 3, dtype=torch.float64))

    first = step()
    for _ in range(5):
        for name, value in step().items():
            assert torch.equal(value, first[name]), name


def test_backward_can_be_repeated_but_not_differentiated():
    model = parallel(SynchronizedBatchNorm1d(3), "cpu", 2)
    batch = torch.randn(6, 3, requires_grad=True)
    loss = model(batch).sin().sum()
    first, second = (torch.autograd.grad(loss, batch, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    linear = (model(batch) * torch.randn(6, 3)).sum()  # whose grad_output is a constant
    for value in (loss, linear):
        for grad in torch.autograd.grad(value, (batch, *model.parameters()), create_graph=True, retain_graph=True):
            with pytest.raises(RuntimeError, match="differentiate twice"):
                torch.autograd.grad(grad.sum(), batch, allow_unused=True, retain_graph=True)


def test_a_weight_changed_before_backward_is_noticed():
    layer = SynchronizedBatchNorm1d(3)
    output = parallel(layer, "cpu", 2)(torch.randn(6, 3, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
