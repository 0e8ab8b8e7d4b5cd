"""Replicas of one process: the contract among threads, what its users see, and that nothing waits for ever."""

import copy
import gc
import importlib
import io
import pickle
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from tolerances import assert_close
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua_syncbn
from bagua_syncbn import data_parallel as dp
from bagua_syncbn.communicators import LOCAL, CallbackContext, replicas
from bagua_syncbn.data_parallel import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_model,
    execute_replication_callbacks,
    patch_replication_callback,
    patch_sync_batchnorm,
)

ROOT = Path(__file__).resolve().parent.parent
PLACES = ["cpu", *(pytest.param(place, marks=pytest.mark.gpu) for place in ("one GPU", "several GPUs"))]
PAIRS = {
    SynchronizedBatchNorm1d: nn.BatchNorm1d,
    SynchronizedBatchNorm2d: nn.BatchNorm2d,
    SynchronizedBatchNorm3d: nn.BatchNorm3d,
}
# Seconds within which a test that must not hang ends: far below replicas.TIMEOUT, far above what it takes.
PROMPTLY = 20


@pytest.fixture(scope="module", autouse=True)
def single_threaded():
    """One thread in each operation: the replicas need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def devices(place, count):
    if place == "cpu":
        return ["cpu"] * count
    if place == "one GPU":
        return [0] * count if count > 1 else ["cuda:0"]
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return list(range(count))


def parallel(model, place, count):
    """Returns ``model`` in ``count`` replicas, on the device of the first of them."""
    ids = devices(place, count)
    return DataParallelWithCallback(model.to("cpu" if place == "cpu" else "cuda:0"), ids)


class Clamped(nn.Module):
    """The plain formula of eps_mode="clamp", differentiated by autograd: what the layer is compared with."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer  # a torch.nn.BatchNorm, for its parameters, buffers and settings

    def forward(self, input):
        layer = self.layer
        shape = (1, -1, *[1] * (input.dim() - 2))
        dims = [0, *range(2, input.dim())]
        var, mean = torch.var_mean(input, dims, correction=0)
        if self.training and layer.track_running_stats:
            count = input.numel() / input.size(1)
            layer.num_batches_tracked.add_(1)
            momentum = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
            layer.running_mean.lerp_(mean.detach(), momentum)
            layer.running_var.lerp_(var.detach() * count / (count - 1), momentum)
        elif layer.track_running_stats:
            var, mean = layer.running_var, layer.running_mean
        weight, bias = (1, 0) if layer.weight is None else (layer.weight.view(shape), layer.bias.view(shape))
        return (input - mean.view(shape)) / var.view(shape).clamp(min=layer.eps).sqrt() * weight + bias


def build(batch_norm, wrap=lambda layer: layer, **options):
    """Returns a model with normalization in nested containers, between layers that mix channels."""
    cls = PAIRS.get(batch_norm, batch_norm)
    width = {nn.BatchNorm1d: nn.Conv1d, nn.BatchNorm2d: nn.Conv2d, nn.BatchNorm3d: nn.Conv3d}[cls]
    model = nn.Sequential(
        wrap(batch_norm(3, **options)),
        nn.Sequential(width(3, 5, 1), nn.Sequential(wrap(batch_norm(5, **options)), nn.Tanh())),
        width(5, 2, 1),
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():  # those of normalization layers are 1 and 0 otherwise, and hide mistakes
            parameter.copy_(torch.randn_like(parameter))
    return model


def inputs_of(batch_norm, samples, step=0):
    """Returns a batch whose channels have variances from far below to far above the eps of 1e-3 that goes with it."""
    generator = torch.Generator().manual_seed(step)
    dimensions = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[PAIRS.get(batch_norm, batch_norm)]
    batch = torch.randn(samples, 3, *(2, 3, 2)[:dimensions], generator=generator, dtype=torch.float64)
    scale = torch.tensor([1e-3, 1e-1, 2.0], dtype=torch.float64).view(-1, *[1] * dimensions)
    return batch * scale + torch.arange(3, dtype=torch.float64).view(scale.shape)


def run(model, batch, grad_output):
    """Runs one step; returns all that it gives, by name."""
    model.zero_grad()
    batch = batch.clone().requires_grad_()
    output = model(batch)
    output.backward(grad_output.to(output.device))
    found = {"output": output, "input.grad": batch.grad}
    found |= {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {name.removeprefix("module.").replace("layer.", ""): value.detach().cpu() for name, value in found.items()}


def check_equal(actual, expected, where=""):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith("num_batches_tracked"):
            assert actual[name] == value
        else:
            assert_close(actual[name], value, f"{name}{where}")


def check(place, count, samples, cls, eps_mode="plus", steps=2, **options):
    options = {"eps": 1e-3} | options
    torch.manual_seed(1)
    expected = build(PAIRS[cls], **({"wrap": Clamped} if eps_mode == "clamp" else {}), **options)
    model = build(cls, eps_mode=eps_mode, **options)
    model.load_state_dict({name.replace("layer.", ""): value for name, value in expected.state_dict().items()})
    actual = parallel(model, place, count)
    for step in range(steps):
        batch = inputs_of(cls, samples, step)
        grad_output = torch.randn(samples, 2, *batch.shape[2:], dtype=torch.float64)
        check_equal(run(actual, batch, grad_output), run(expected, batch, grad_output), f" at step {step}")
    if options.get("track_running_stats", True):  # otherwise replicas are on their own, as ranks are
        assert_close(actual.eval()(batch).cpu(), expected.eval()(batch), "output in evaluation")


# Of 4 replicas, 9 samples make chunks of 3, 3, 3: three replicas; 7 make 2, 2, 2, 1; 3 make three replicas of one.
@pytest.mark.parametrize("samples", [9, 8, 7, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("place", PLACES)
def test_replicas_equal_the_full_batch(place, count, samples):
    check(place, count, samples, SynchronizedBatchNorm2d)


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"momentum": 1.0},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_options(place, count, options, eps_mode):
    check(place, count, 7, SynchronizedBatchNorm1d, eps_mode, 3, **options)


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
@pytest.mark.parametrize("cls", PAIRS)
@pytest.mark.parametrize("place", PLACES)
def test_dimensions(place, cls, eps_mode):
    check(place, 2, 5, cls, eps_mode)


def test_one_sample_of_one_value_in_each_replica():
    torch.manual_seed(2)
    batch, grad_output = torch.randn(2, 3, 4, dtype=torch.float64)
    actual = parallel(SynchronizedBatchNorm1d(4).double(), "cpu", 3)
    expected = nn.BatchNorm1d(4).double()
    check_equal(run(actual, batch, grad_output), run(expected, batch, grad_output))
    with pytest.raises(ValueError, match="expected more than 1 value per channel"):
        actual(batch[:1])  # one replica


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_those_of_finite_differences(place, count, eps_mode):
    model = build(SynchronizedBatchNorm1d, eps=1e-3, eps_mode=eps_mode, track_running_stats=False)
    model = parallel(model, place, count)
    batch = inputs_of(SynchronizedBatchNorm1d, 5).to(model.module[0].weight.device).requires_grad_()
    # Convolutions on GPUs may add in another order from call to call.
    nondeterminism = 0.0 if place == "cpu" else 1e-9
    assert torch.autograd.gradcheck(model, batch, eps=1e-7, atol=1e-4, nondet_tol=nondeterminism)


@pytest.mark.parametrize("count", [1, 3])
def test_clamped_channels_pass_no_gradient_through_the_variance(count):
    layer = SynchronizedBatchNorm1d(3, eps=1e-3, eps_mode="clamp").double()
    batch = inputs_of(SynchronizedBatchNorm1d, 6).requires_grad_()
    grad_output = torch.randn_like(batch)
    parallel(layer, "cpu", count)(batch).backward(grad_output)
    narrow = (grad_output - grad_output.mean((0, 2), keepdim=True)) / 1e-3**0.5
    assert_close(batch.grad[:, 0], narrow[:, 0], "gradient of a channel of less variance than eps")
    assert (batch.grad[:, 2] - narrow[:, 2]).abs().max() > 1


def test_clamp_of_constant_channels_and_without_eps():
    constant = torch.ones(4, 2, dtype=torch.float64)
    layer = SynchronizedBatchNorm1d(2, eps=1e-5, eps_mode="clamp").double()
    assert torch.equal(parallel(layer, "cpu", 2)(constant), torch.zeros_like(constant))
    batch = torch.randn(4, 2, dtype=torch.float64)
    layer = SynchronizedBatchNorm1d(2, eps=0.0, eps_mode="clamp").double()
    expected = (batch - batch.mean(0)) / batch.std(0, correction=0)
    assert_close(parallel(layer, "cpu", 2)(batch), expected, "output")


def step_of_rank(sizes):
    layer = SynchronizedBatchNorm1d(3, eps=1e-3, eps_mode="clamp").double()
    batch = inputs_of(nn.BatchNorm1d, sum(sizes)).split(sizes)[dist.get_rank()]
    return run(layer, batch, batch.sin())


def test_ranks_of_a_job_without_replicas(pool):
    sizes = (4, 0, 3)
    batch = inputs_of(nn.BatchNorm1d, sum(sizes))
    expected = run(Clamped(nn.BatchNorm1d(3, eps=1e-3).double()), batch, batch.sin())
    ranks = pool.run(step_of_rank, len(sizes), sizes)
    for name in ("output", "input.grad"):
        assert_close(torch.cat([rank[name] for rank in ranks]), expected[name], name)
    assert_close(sum(rank["weight.grad"] for rank in ranks), expected["weight.grad"], "weight.grad")
    assert_close(ranks[1]["running_var"], expected["running_var"], "running_var")


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
@pytest.mark.parametrize("place", PLACES)
def test_a_replica_that_is_partly_outside_of_the_graph(place, detached):
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


@pytest.mark.parametrize("frozen", [("input",), ("weight",), ("bias",), ("weight", "bias"), ("input", "weight")])
@pytest.mark.parametrize("place", PLACES)
def test_frozen(place, frozen):
    batch, grad_output = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    results = []
    for layer in (nn.BatchNorm1d(3).double(), SynchronizedBatchNorm1d(3).double()):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in frozen)
        model = parallel(layer, place, 2) if isinstance(layer, SynchronizedBatchNorm1d) else layer
        input = batch.clone().requires_grad_("input" not in frozen)
        output = model(input)
        output.backward(grad_output.to(output.device))
        results.append([input.grad, layer.weight.grad, layer.bias.grad])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert_close(actual.cpu(), expected, "gradient")


@pytest.mark.parametrize("place", PLACES)
def test_without_gradients(place):
    batch = torch.randn(5, 3, 4, dtype=torch.float64)
    for mode in (torch.no_grad, torch.inference_mode):
        expected, layer = nn.BatchNorm1d(3).double(), SynchronizedBatchNorm1d(3).double()
        with mode():
            output = parallel(layer, place, 2)(batch)
            assert_close(output.cpu(), expected(batch), "output")
        assert not output.requires_grad
        assert_close(layer.running_var.cpu(), expected.running_var, "running_var")
        assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("place", PLACES)
def test_dtypes(place, dtype):
    batch, grad_output = torch.randn(2, 5, 3, 4, 6).to(dtype)
    actual = run(parallel(SynchronizedBatchNorm2d(3), place, 2), batch, grad_output)
    expected = run(nn.BatchNorm2d(3).double(), batch.double(), grad_output.double())
    assert actual["output"].dtype == actual["input.grad"].dtype == dtype
    check_equal(actual, expected)


class Twice(nn.Module):
    """Holds one layer under two names and calls it by both."""

    def __init__(self, layer):
        super().__init__()
        self.first = self.second = layer
        self.mix = nn.Linear(layer.num_features, layer.num_features)

    def forward(self, input):
        return self.second(self.mix(self.first(input)))


@pytest.mark.parametrize("place", PLACES)
def test_a_layer_registered_twice(place):
    expected = Twice(nn.BatchNorm1d(3)).double()
    actual = convert_model(copy.deepcopy(expected))
    assert actual.first is actual.second
    batch, grad_output = torch.randn(2, 7, 3, dtype=torch.float64)
    check_equal(run(parallel(actual, place, 3), batch, grad_output), run(expected, batch, grad_output))
    assert actual.first.num_batches_tracked == 2


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("place", PLACES)
def test_training_and_checkpoints(place):
    batches = [inputs_of(nn.BatchNorm2d, samples, step) for step, samples in enumerate((8, 7, 3, 8, 5, 8))]
    expected = build(nn.BatchNorm2d)
    actual = build(SynchronizedBatchNorm2d)
    actual.load_state_dict(expected.state_dict())
    train(parallel(actual, place, 3), batches[:3])
    # Halfway on into torch's layers, which end where they do on their own.
    restored = build(nn.BatchNorm2d)
    restored.load_state_dict(actual.state_dict())
    for model in (train(expected, batches[:3]), train(restored, batches[3:]), train(expected, batches[3:])):
        assert model[0].num_batches_tracked in (3, 6)
    for name, value in expected.state_dict().items():
        assert_close(restored.state_dict()[name].double(), value.double(), name, roundings=100)


@pytest.mark.parametrize("shape", [(16, 10), (16, 10, 16, 16)], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_numeric_comparison_of_the_other_package(place, count, training, shape):
    # Its tests: uniform float32 input, loss the sum of outputs, rtol 1e-3 and atol 1e-5. Here 100 and 2 times closer.
    torchs, ours = {2: (nn.BatchNorm1d, SynchronizedBatchNorm1d), 4: (nn.BatchNorm2d, SynchronizedBatchNorm2d)}[
        len(shape)
    ]
    batch = torch.rand(shape)
    expected, layer = torchs(10, eps=1e-5, affine=False), ours(10, eps=1e-5, affine=False)
    model = parallel(layer, place, count)
    results = []
    for net in (model, expected):
        net.train(training)
        input = batch.clone().requires_grad_()
        output = net(input)
        output.sum().backward()
        results.append([output.cpu(), input.grad, *(buffer.cpu() for buffer in net.buffers())])
    for actual, reference in zip(*results, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-5, atol=5e-6)


def test_statistics_by_the_formula():
    # The other package's second comparison, with formulas in place of torch's layer: momentum 1, no parameters.
    batch = torch.rand(16, 10)
    layer = SynchronizedBatchNorm1d(10, momentum=1, eps=1e-5, affine=False, eps_mode="clamp")
    output = parallel(layer, "cpu", 2)(batch)
    var, mean = torch.var_mean(batch, 0, correction=0)
    options = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(output, (batch - mean) / var.clamp(min=1e-5).sqrt(), **options)
    torch.testing.assert_close(layer.running_mean, mean, **options)
    torch.testing.assert_close(layer.running_var, batch.var(0), **options)


def test_one_replica_is_torchs_batch_norm():
    batch = torch.randn(4, 3, 5)
    for ids in (["cpu"], ["cpu"] * 2):
        layer, expected = SynchronizedBatchNorm1d(3), nn.BatchNorm1d(3)
        own = batch if len(ids) == 1 else batch[:1]  # fewer samples than devices
        assert torch.equal(DataParallelWithCallback(layer, ids)(own), expected(own))
        assert torch.equal(layer.running_var, expected.running_var)
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
    (grad,) = torch.autograd.grad(loss, batch, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_a_weight_changed_before_backward_is_noticed():
    layer = SynchronizedBatchNorm1d(3)
    output = parallel(layer, "cpu", 2)(torch.randn(6, 3, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# The protocol.


class Told(nn.Module):
    """Has a part in the protocol, and is no layer of this package."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __data_parallel_replicate__(self, ctx, copy_id):
        if copy_id == 0:
            ctx.master = self
        self.calls.append((ctx, copy_id, self))

    def forward(self, input):
        return input


@pytest.mark.parametrize("place", PLACES)
def test_callbacks_of_any_module(place):
    calls = []
    shared = Told(calls)
    model = nn.Sequential(shared, nn.Sequential(Told(calls), shared))
    parallel(model, place, 3)(torch.randn(3, 2))
    assert [copy_id for _, copy_id, _ in calls] == [0, 0, 1, 1, 2, 2]  # replica 0 first, each module once
    for (ctx, _, first), *others in (calls[::2], calls[1::2]):
        assert type(ctx) is dp.CallbackContext
        assert all(other is ctx for other, _, _ in others)
        assert ctx.master is first
        assert len({first, *(replica for _, _, replica in others)}) == 3
    assert calls[0][0] is not calls[1][0]


def test_callbacks_are_refused_what_is_no_set_of_replicas():
    for modules in ([], [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]):
        with pytest.raises(ValueError, match="modules: expected replicas of one model"):
            execute_replication_callbacks(modules)
    with pytest.raises(TypeError, match=r"ctx: expected a bagua_syncbn.data_parallel.CallbackContext"):
        SynchronizedBatchNorm1d(2).__data_parallel_replicate__(object(), 0)


class Threads(nn.DataParallel):
    """A user's subclass of torch's wrapper, with replicas of its own."""

    def __init__(self, module, count):
        super().__init__(module)
        self.module, self.dim, self.output_device = module, 0, None
        self.device_ids, self.src_device_obj = list(range(count)), torch.device("cpu")

    def scatter(self, inputs, kwargs, device_ids):
        return [(chunk,) for chunk in inputs[0].chunk(len(device_ids))], [{}] * len(device_ids)

    def replicate(self, module, device_ids):
        return [dp.shared_device.replica(module, torch.device("cpu"), rank) for rank in range(len(device_ids))]

    def parallel_apply(self, replicas, inputs, kwargs):
        with ThreadPoolExecutor(len(replicas)) as pool:
            return list(pool.map(lambda replica, input: replica(*input), replicas, inputs))

    def gather(self, outputs, output_device):
        return torch.cat(outputs)


@pytest.mark.parametrize("make", [patch_replication_callback, convert_model])
def test_a_users_subclass_is_patched(make):
    expected = build(nn.BatchNorm1d)
    actual = Threads(copy.deepcopy(expected), 2)
    bagua_syncbn.convert_sync_batchnorm(actual)
    batch = inputs_of(nn.BatchNorm1d, 6)
    with pytest.raises(RuntimeError, match=r"use bagua_syncbn.data_parallel.DataParallelWithCallback"):
        actual(batch)
    make(actual)
    cls = type(actual)
    make(actual)
    assert type(actual) is cls
    assert issubclass(cls, Threads)
    for model in (actual, copy.deepcopy(actual), pickle.loads(pickle.dumps(actual))):
        assert type(model) is cls
        grad_output = torch.randn(6, 2, 2, dtype=torch.float64)
        reference = copy.deepcopy(expected)
        check_equal(run(model, batch, grad_output), run(reference, batch, grad_output))


def test_in_a_users_subclass_a_replica_that_raises_frees_the_others():
    model = Threads(Steps(lambda module, copy_id, input: module.late(input) if copy_id == 0 else input.missing), 2)
    patch_replication_callback(model)
    with pytest.raises(AttributeError, match="missing"):
        promptly(model, torch.randn(4, 2))
    assert len(model.module.freed) == 1


def test_patch_takes_only_data_parallel():
    with pytest.raises(TypeError, match=r"data_parallel: expected a torch.nn.DataParallel, got Linear"):
        patch_replication_callback(nn.Linear(2, 2))


def test_torchs_wrapper_is_patched_in_place():
    model = nn.DataParallel(build(nn.BatchNorm2d))
    model.note = "kept"
    module = model.module
    assert convert_model(model) is model
    assert type(model) is DataParallelWithCallback
    assert model.module is module
    assert type(module[0]) is type(module[1][1][0]) is SynchronizedBatchNorm2d
    assert model.note == "kept"


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
def test_torchs_wrapper_on_gpus(count):
    expected = build(nn.BatchNorm2d)
    actual = nn.DataParallel(copy.deepcopy(expected).cuda(), devices("several GPUs", count))
    batch = inputs_of(nn.BatchNorm2d, 7)
    grad_output = torch.randn(7, 2, 2, 3, dtype=torch.float64)
    check_equal(run(convert_model(actual), batch, grad_output), run(expected, batch, grad_output))


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["one GPU", "several GPUs"])
def test_streams(place):
    # Forward and backward in a stream that is not the default one, behind a wait that makes a missing one visible. What
    # comes from the host is there before: such a copy would sit the wait out.
    expected = build(nn.BatchNorm2d)
    actual = parallel(convert_model(copy.deepcopy(expected)), place, 2)
    batch, grad_output = inputs_of(nn.BatchNorm2d, 6), torch.randn(6, 2, 2, 3, dtype=torch.float64)
    reference = run(expected, batch, grad_output)
    arguments = batch.cuda(), grad_output.cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        result = run(actual, *arguments)
    torch.cuda.synchronize()
    check_equal(result, reference)


def test_copies_and_pickles_of_wrapped_models():
    model = parallel(build(SynchronizedBatchNorm1d, eps_mode="clamp"), "cpu", 2)
    model(inputs_of(nn.BatchNorm1d, 4))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert twin.module[0].eps_mode == "clamp"
        batch = inputs_of(nn.BatchNorm1d, 4, 1)
        assert torch.equal(twin(batch), copy.deepcopy(model)(batch))
    # A replica's layer too: it leaves the others behind.
    with torch.no_grad():
        replica, _ = model.replicate(model.module, model.device_ids)
    assert replica[0]._replica is not None
    assert copy.deepcopy(replica[0])._replica is None


# Conversion and the layers.


@pytest.mark.parametrize(("cls", "torchs"), PAIRS.items())
def test_layers_have_the_arguments_and_the_state_of_torchs(cls, torchs):
    layer = cls(3, 1e-4, 0.2, True, True)
    assert (layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats) == (
        *(3, 1e-4, 0.2),
        *(True, True),
    )
    assert isinstance(layer, torchs)
    assert isinstance(layer, bagua_syncbn.SyncBatchNorm)
    reference = torchs(3)
    nn.init.normal_(reference.weight)
    layer.load_state_dict(reference.state_dict())
    torchs(3).load_state_dict(layer.state_dict())
    assert torch.equal(layer.weight, reference.weight)
    assert cls(3, device="cpu", dtype=torch.float64, bias=False).weight.dtype == torch.float64
    assert cls(3, bias=False).bias is None
    assert type(bagua_syncbn.revert_sync_batchnorm(nn.Sequential(layer))[0]) is torchs
    assert "eps_mode" not in repr(layer)
    assert "eps_mode='clamp'" in repr(cls(3, eps_mode="clamp"))
    with pytest.raises(ValueError, match="expected"):
        layer(torch.randn(2, 3, 1, 1, 1, 1))


def test_eps_mode_is_checked():
    with pytest.raises(ValueError, match=r'eps_mode: expected "plus" or "clamp", got \'clmap\''):
        SynchronizedBatchNorm1d(3, eps_mode="clmap")
    layer = SynchronizedBatchNorm1d(3)
    layer.eps_mode = "max"
    with pytest.raises(ValueError, match="got 'max'"):
        layer(torch.randn(4, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_clamp_in_evaluation_takes_buffers_of_any_dtype(dtype):
    layer = SynchronizedBatchNorm1d(3, eps=1e-3, eps_mode="clamp", dtype=dtype).eval()
    layer.running_var.copy_(torch.tensor([1e-5, 1e-2, 4.0]))
    batch = torch.randn(4, 3)
    expected = batch / layer.running_var.float().clamp(min=1e-3).sqrt()
    torch.testing.assert_close(layer(batch), expected)


class Doubling(nn.BatchNorm1d):
    def forward(self, input):
        return 2 * super().forward(input)


def test_convert_model_keeps_objects_and_subclasses():
    layers = [nn.BatchNorm1d(3), Doubling(3), SynchronizedBatchNorm1d(3, eps_mode="clamp")]
    model = nn.Sequential(*layers).double()
    expected = nn.Sequential(nn.BatchNorm1d(3), Doubling(3), Clamped(nn.BatchNorm1d(3))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert convert_model(model) is model
    assert list(model) == layers
    assert type(layers[0]) is SynchronizedBatchNorm1d
    assert isinstance(layers[1], Doubling)
    assert layers[2].eps_mode == "clamp"
    batch = torch.randn(5, 3, dtype=torch.float64)
    output = parallel(model, "cpu", 2)(batch)
    assert_close(output, expected(batch), "output")
    output.sin().sum().backward()
    assert all(parameter.grad is not None for parameter in optimizer.param_groups[0]["params"])


def test_convert_model_of_a_layer_returns_a_copy():
    layer = nn.BatchNorm3d(3)
    converted = convert_model(layer)
    assert type(layer) is nn.BatchNorm3d
    assert type(converted) is SynchronizedBatchNorm3d
    assert converted.weight is layer.weight


def test_patch_sync_batchnorm():
    torchs = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d

    def fail():
        with patch_sync_batchnorm():
            raise KeyError

    with patch_sync_batchnorm():
        model = nn.Sequential(nn.BatchNorm1d(2, device="cpu"), nn.BatchNorm3d(2))
        assert isinstance(model[0], nn.BatchNorm1d)
        with patch_sync_batchnorm():
            nested = nn.BatchNorm2d(2, eps=1e-3)
    assert (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) == torchs
    assert [type(layer) for layer in model] == [SynchronizedBatchNorm1d, SynchronizedBatchNorm3d]
    assert type(nested) is SynchronizedBatchNorm2d
    with pytest.raises(KeyError):
        fail()
    assert (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) == torchs


class TwoRanks:
    size, rank = 2, 0

    def all_gather(self, packed):
        raise AssertionError

    all_reduce = all_gather


def test_replicas_and_a_job_exclude_each_other():
    layer = SynchronizedBatchNorm1d(3)
    layer.process_group = TwoRanks()
    model = parallel(layer, "cpu", 2)
    with pytest.raises(
        RuntimeError, match=r"process_group: expected a group of one .* one of 2 replicas, got .* 2 ranks"
    ):
        model(torch.randn(4, 3))
    layer.process_group = LOCAL
    model(torch.randn(4, 3))
    assert layer.num_batches_tracked == 1


# What goes wrong.


class Steps(nn.Module):
    """Does in each replica what the test says, with two synchronized layers."""

    def __init__(self, script):
        super().__init__()
        self.early, self.late = SynchronizedBatchNorm1d(2), SynchronizedBatchNorm1d(2)
        self.script = script
        self.freed = []

    def __data_parallel_replicate__(self, ctx, copy_id):
        self.copy_id = copy_id

    def forward(self, *args):
        try:
            return self.script(self, self.copy_id, *args)
        except replicas.ReplicaError as error:
            self.freed.append(error)
            raise


def promptly(function, *args):
    start = time.monotonic()
    try:
        return function(*args)
    finally:
        assert time.monotonic() - start < PROMPTLY


class OwnError(Exception):
    """Takes arguments that its text does not show, so it can only be passed on as it is."""

    def __init__(self, number, *, detail):
        super().__init__(number)
        self.detail = detail


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("after", ["nothing", "early", "late"])
def test_a_replica_that_raises_frees_the_others(failing, after):
    def script(module, copy_id, input):
        for name in ("nothing", "early", "late"):
            if name != "nothing":
                input = getattr(module, name)(input)
            if name == after and copy_id == failing:
                raise OwnError(7, detail=copy_id) from KeyError("cause")
        return input

    module = Steps(script)
    model = parallel(module, "cpu", 3)
    with pytest.raises(OwnError) as caught:
        promptly(model, torch.randn(6, 2))
    assert caught.value.detail == failing
    assert isinstance(caught.value.__cause__, KeyError)
    assert any(entry.name == "script" for entry in caught.traceback)
    assert len(module.freed) == (0 if after == "late" else 2)
    for error in module.freed:
        assert error.__cause__ is caught.value
        assert "SynchronizedBatchNorm1d at '" in str(error)
        assert "OwnError: 7" in str(error)
    module.script = lambda module, copy_id, input: module.late(input)
    assert model(torch.randn(6, 2)).shape == (6, 2)  # nothing is left behind


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit("mine")], ids=repr)
def test_a_hook_of_the_model_that_raises_frees_the_others(error):
    def fail(module, args):
        if module.copy_id == 1:
            raise error

    module = Steps(lambda module, copy_id, input: module.late(input))
    module.register_forward_pre_hook(fail)
    with pytest.raises(type(error), match="mine"):
        promptly(parallel(module, "cpu", 2), torch.randn(4, 2))
    assert len(module.freed) == 1


def test_a_layer_that_raises_frees_the_others():
    def script(module, copy_id, input):
        return module.late(input[0] if copy_id == 1 else input)

    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        promptly(parallel(Steps(script), "cpu", 2), torch.randn(4, 2))
    with pytest.raises(ValueError, match="mine"):
        promptly(parallel(Steps(lambda *_: raise_(ValueError("mine"))), "cpu", 2), torch.randn(4, 2))


def raise_(error):
    raise error


def test_replicas_with_different_channels():
    def script(module, copy_id, input):
        module.late.weight = module.late.bias = module.late.running_mean = module.late.running_var = None
        module.late.track_running_stats = False
        return module.late(input[:, : copy_id + 1])

    with pytest.raises(RuntimeError, match="equal size"):
        promptly(parallel(Steps(script), "cpu", 2), torch.randn(4, 2))


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("then", ["ends", "goes on"])
def test_different_numbers_of_calls(more, then):
    def script(module, copy_id, input):
        for _ in range(2 + (copy_id == more)):
            input = module.early(input)
        return module.late(input) if then == "goes on" else input

    with pytest.raises(RuntimeError, match=r"SynchronizedBatchNorm1d at 'early'") as caught:
        promptly(parallel(Steps(script), "cpu", 2), torch.randn(4, 2))
    calls = [3, 2] if more == 0 else [2, 3]
    assert f"{calls} by replicas 0 to 1" in str(caught.value) if then == "ends" else "call 3 of" in str(caught.value)
    assert not isinstance(caught.value, replicas.ReplicaError)


def test_a_replica_that_skips_a_layer():
    def script(module, copy_id, input):
        return input if copy_id == 2 else module.late(input)

    with pytest.raises(RuntimeError, match=r"at 'late': expected the same number of calls .* when replica 2 ended"):
        promptly(parallel(Steps(script), "cpu", 3), torch.randn(6, 2))


@pytest.mark.parametrize("raises", [False, True])
def test_replicas_that_wait_already_are_woken(raises):
    def script(module, copy_id, input):
        if copy_id < 2:
            return module.late(input)
        time.sleep(0.1)  # the others get there first
        return input.missing if raises else input

    error, text = (AttributeError, "missing") if raises else (RuntimeError, "when replica 2 ended")
    with pytest.raises(error, match=text):
        promptly(parallel(Steps(script), "cpu", 3), torch.randn(6, 2))


def test_layers_in_different_orders():
    def script(module, copy_id, input):
        first, second = (module.early, module.late)[:: 1 - 2 * copy_id]
        return second(first(input))

    with pytest.raises(RuntimeError, match="same layers in the same order") as caught:
        promptly(parallel(Steps(script), "cpu", 2), torch.randn(4, 2))
    assert "'early'" in str(caught.value)
    assert "'late'" in str(caught.value)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_in_backward_is_refused(use_reentrant):
    def script(module, copy_id, input):
        return checkpoint(module.late, input, use_reentrant=use_reentrant)

    output = parallel(Steps(script), "cpu", 2)(torch.randn(4, 2, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"at 'late': expected calls during the forward pass.*checkpointing"):
        promptly(output.sum().backward)


def test_replicas_that_never_run(monkeypatch):
    # One after the other, on one thread: the first cannot know that the second is not on its way.
    monkeypatch.setattr(replicas, "TIMEOUT", 0.1)
    model = parallel(build(SynchronizedBatchNorm1d), "cpu", 2)
    first, _ = model.replicate(model.module, model.device_ids)
    with pytest.raises(RuntimeError, match=r"at '0': .* got \[1, 0\] .* no more in 0.1 seconds"):
        first(inputs_of(nn.BatchNorm1d, 2))


def test_replicas_that_are_called_by_their_parts():
    # Not watched, because they are not called themselves. What a layer finds out still reaches the others.
    model = parallel(Steps(None), "cpu", 2)
    first, second = model.replicate(model.module, model.device_ids)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(first.early, torch.randn(2, 2))
        time.sleep(0.1)
        error = promptly(pool.submit(second.late, torch.randn(2, 2)).exception)
        assert "same layers in the same order" in str(error)
        assert promptly(waiting.exception).__cause__ is error


def test_replicas_that_run_twice():
    # As code that replicates once and applies several times has it.
    model = parallel(build(SynchronizedBatchNorm1d), "cpu", 3)
    copies = model.replicate(model.module, model.device_ids)
    for step in range(20):
        batch = inputs_of(nn.BatchNorm1d, 6, step)
        outputs = model.parallel_apply(copies, [(part,) for part in batch.chunk(3)], [{}] * 3)
        assert torch.cat(outputs).shape == (6, 2, 2)
    assert model.module[0].num_batches_tracked == 20


@pytest.mark.parametrize("deeper", [0, 1])
def test_a_model_that_calls_itself(deeper):
    def script(module, copy_id, input, depth=4):
        if depth < 4:
            return input if depth == 0 else module(input, depth - 1)
        late = module(input, 3) if copy_id == deeper else input
        return module.late(late)

    module = Steps(script)
    promptly(parallel(module, "cpu", 2), torch.randn(4, 2))
    assert module.late.num_batches_tracked == 1


def test_many_meetings():
    # What a lost wakeup would hang in.
    def script(module, copy_id, input):
        for _ in range(300):
            input = module.early(input)
        return input

    model = Steps(script)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with torch.no_grad():
            promptly(parallel(model, "cpu", 4), torch.randn(8, 2))
    finally:
        sys.setswitchinterval(interval)
    assert model.early.num_batches_tracked == 300


# The CPU form.

Pair = namedtuple("Pair", ["a", "b"])


@pytest.mark.parametrize(
    ("device_ids", "shared"),
    [
        ([0, 0], True),
        ([0, "cuda:0"], True),
        ([torch.device("cuda", 1), 1], True),
        (["cuda:0", "cpu"], True),
        (["cpu"], True),
        ([0, 1], False),
        (["cuda:0", torch.device("cuda", 1), 2], False),
        ([], False),
    ],
    ids=str,
)
def test_devices_that_are_named_twice(device_ids, shared):
    assert dp.wrapper._are_shared(device_ids) == shared


class Echo(nn.Module):
    def forward(self, *args, **kwargs):
        return {"args": list(args), "kwargs": kwargs, "pair": Pair(args[0], None), "count": torch.tensor(len(args[0]))}


def test_what_is_split_and_gathered():
    x, y = torch.arange(10).view(5, 2), torch.arange(5.0)
    model = DataParallelWithCallback(Echo(), ["cpu"] * 2)
    output = model(x, [y, {"deep": (x,)}], options={"mask": y})
    assert torch.equal(output["args"][0], x)
    assert torch.equal(output["args"][1][0], y)
    assert torch.equal(output["args"][1][1]["deep"][0], x)
    assert torch.equal(output["kwargs"]["options"]["mask"], y)
    assert isinstance(output["pair"], Pair)
    assert output["pair"].b is None
    assert output["count"].tolist() == [3, 2]
    with pytest.raises(ValueError, match=r"inputs: expected tensors that split .* got some that split into \[1, 2\]"):
        model(x, y[:1])


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value, self.got = value, []

    def forward(self, *args, **kwargs):
        self.got.append((args, kwargs))
        return self.value


def test_inputs_without_tensors():
    module = Constant(torch.ones(1))
    model = DataParallelWithCallback(module, ["cpu"] * 2)
    assert model().shape == (1,)
    assert model(3, name=None).shape == (2,)  # as torch has it: one for each device
    assert module.got == [((), {}), ((3,), {"name": None}), ((3,), {"name": None})]
    with pytest.raises(TypeError, match=r"module: expected outputs that are tensors or None, .* got int"):
        DataParallelWithCallback(Constant(3), ["cpu"] * 2)(torch.ones(2))


def test_dim():
    expected = nn.BatchNorm1d(3)
    layer = nn.Sequential(Transposed(), SynchronizedBatchNorm1d(3), Transposed())
    batch = torch.randn(3, 8)
    torch.testing.assert_close(DataParallelWithCallback(layer, ["cpu"] * 2, dim=1)(batch), expected(batch.T).T)


class Transposed(nn.Module):
    def forward(self, input):
        return input.T


class Modes(nn.Module):
    def forward(self, input):
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        return torch.tensor([[*modes, torch.get_autocast_dtype("cpu") == torch.float16]])


def test_modes_reach_the_threads():
    model = DataParallelWithCallback(Modes(), ["cpu"] * 2)
    assert model(torch.ones(2)).tolist() == [[True, False, False, False]] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert model(torch.ones(2)).tolist() == [[False, False, True, True]] * 2
    with torch.inference_mode():
        assert model(torch.ones(2)).tolist() == [[False, True, False, False]] * 2


class Varied(nn.Module):
    """Parameters and buffers of other kinds: tied, recurrent, none, of no module."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(3, 4, batch_first=True)
        self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        self.missing = None
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("nothing", None)
        self.heads = nn.ParameterList([torch.ones(4), torch.ones(4)])

    def forward(self, input):
        assert self.encode.weight is self.decode.weight
        # As in torch's replicas.
        assert (list(self.parameters()) == []) == hasattr(self, "_is_replica")
        return self.decode(self.encode(self.recurrent(input)[0])) * self.scale * self.heads[0]


def test_replicas_of_other_modules():
    expected = Varied()
    actual = copy.deepcopy(expected)
    batch, grad_output = torch.randn(6, 5, 3), torch.randn(6, 5, 4)
    expected(batch).backward(grad_output)
    DataParallelWithCallback(actual, ["cpu"] * 3)(batch).backward(grad_output)
    for (name, parameter), reference in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert (parameter.grad is None) == (reference.grad is None) == (name == "heads.1")
        if name != "heads.1":
            torch.testing.assert_close(parameter.grad, reference.grad)


def test_the_module_must_be_on_the_first_device():
    with pytest.raises(RuntimeError, match="must have its parameters and buffers on device cpu"):
        DataParallelWithCallback(nn.Linear(2, 2, device="meta"), ["cpu"] * 2)(torch.ones(2, 2))


def test_the_example(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("data_parallel_cpu")
    example.main(["--replicas", "3", "--steps", "4", "--batch-size", "50"])
    assert "largest difference" in capsys.readouterr().out


def test_context_holds_any_attribute():
    ctx = CallbackContext(replicas.Replicas(1), "layer")
    ctx.anything = 1
    assert ctx.anything == 1
