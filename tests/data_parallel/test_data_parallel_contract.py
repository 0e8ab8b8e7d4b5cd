"""Replicas of one process equal one layer on the whole batch: the contract among threads."""

import copy
import gc
from weakref import ref

import pytest
import torch
from torch import nn

from bagua_syncbn.data_parallel import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    convert_model,
)
from tests.helpers.replicated import PLACES, build, check_equal, inputs_of, parallel, run
from tests.helpers.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("single_threaded")


# For 4 devices, 7 samples make chunks of 2, 2, 2, 1; for 3, 8 make 3, 3, 2. tests/contract/test_ways.py has the rest.
@pytest.mark.parametrize(("count", "samples"), [(1, 7), (2, 1), (3, 8), (4, 7)])
@pytest.mark.parametrize("place", PLACES)
def test_replicas_equal_the_full_batch(place, count, samples):
    torch.manual_seed(1)
    expected = build(nn.BatchNorm2d, eps=1e-3)
    actual = parallel(convert_model(copy.deepcopy(expected)), place, count)
    for step in range(3):
        batch = inputs_of(nn.BatchNorm2d, samples, step)
        grad_output = torch.randn(samples, 2, *batch.shape[2:], dtype=torch.float64)
        check_equal(run(actual, batch, grad_output), run(expected, batch, grad_output), f" at step {step}")
    assert_close(actual.eval()(batch).cpu(), expected.eval()(batch), "output in evaluation")


class OnePart(nn.Module):
    """Runs its layer, and puts only one replica's output or input into the graph."""

    def __init__(self, layer, detached, rank):
        super().__init__()
        self.layer, self.detached, self.rank = layer, detached, rank

    def __data_parallel_replicate__(self, ctx, copy_id):
        self.is_part = copy_id != self.rank

    def forward(self, input):
        if self.is_part:
            return self.layer(input)
        with torch.set_grad_enabled(self.detached != "forward"):
            output = self.layer(input.detach() if self.detached == "input" else input)
        return output.detach() if self.detached == "output" else output


# A replica may detach its input or its output, or run without a graph; the statistics are those of all.
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("detached", ["input", "output", "forward"])
@pytest.mark.parametrize("place", PLACES)
def test_a_replica_that_is_partly_outside_of_the_graph(place, detached, rank):
    expected = nn.BatchNorm1d(3).double()
    actual = parallel(OnePart(SynchronizedBatchNorm1d(3).double(), detached, rank), place, 2)
    batch = torch.randn(6, 3, dtype=torch.float64)
    parts = [part.clone().requires_grad_() for part in batch.split(3)]
    inputs = list(parts)
    if detached != "output":
        inputs[rank] = inputs[rank].detach()
    outputs = expected(torch.cat(inputs)).split(3)
    sum(output.sin().sum() for other, output in enumerate(outputs) if other != rank or detached == "input").backward()

    whole = batch.clone().requires_grad_()
    actual(whole).sin().sum().backward()
    for grad, part in zip(whole.grad.split(3), parts, strict=True):
        assert_close(grad, torch.zeros_like(part) if part.grad is None else part.grad, "input.grad")
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
    assert model.layer._sync_state.attachments == ()


def test_same_bits_every_time():
    def step():
        torch.manual_seed(0)
        model = parallel(build(SynchronizedBatchNorm2d), "cpu", 4)
        return run(model, inputs_of(nn.BatchNorm2d, 8), torch.randn(8, 2, 2, 3, dtype=torch.float64))

    first = step()
    for _ in range(5):
        for name, value in step().items():
            assert torch.equal(value, first[name]), name


def test_backward_can_be_repeated_also_for_a_batch_of_gradients():
    model = parallel(build(nn.BatchNorm1d), "cpu", 2)
    output = convert_model(model)(batch := inputs_of(nn.BatchNorm1d, 4).requires_grad_())
    grad_outputs = torch.randn(3, *output.shape, dtype=torch.float64)
    grads = [torch.autograd.grad(output, batch, one, retain_graph=True)[0] for one in grad_outputs]
    together = torch.autograd.grad(output, batch, grad_outputs, is_grads_batched=True, retain_graph=True)
    assert_close(together[0], torch.stack(grads), "batched gradients")
    assert torch.equal(torch.autograd.grad(output, batch, grad_outputs[0])[0], grads[0])


def test_a_weight_changed_before_backward_is_noticed():
    layer = SynchronizedBatchNorm1d(3)
    output = parallel(layer, "cpu", 2)(torch.randn(6, 3, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_compiled_modules_run_uncompiled_as_replicas():
    model = nn.Sequential(nn.Sequential(SynchronizedBatchNorm1d(3)))
    model[0].compile(backend="eager")  # its code is bound to this object
    model.compile(backend="eager")
    batch = torch.randn(6, 3)
    assert_close(parallel(model, "cpu", 2)(batch), nn.BatchNorm1d(3)(batch), "output")
    assert model[0][0].num_batches_tracked == 1


def test_calls_are_checked_again_only_after_a_change():
    layer = SynchronizedBatchNorm1d(3)
    model, batch = parallel(layer, "cpu", 2), torch.randn(6, 3)
    model(batch)
    (cached,) = layer._sync_state.caches.values()
    model(batch)
    assert list(layer._sync_state.caches.values()) == [cached]
    layer.eps = 0.5
    assert_close(model(batch), nn.BatchNorm1d(3, eps=0.5)(batch), "output")
    layer.momentum = "much"
    with pytest.raises(TypeError, match="SynchronizedBatchNorm1d: momentum: expected"):
        model(batch)
