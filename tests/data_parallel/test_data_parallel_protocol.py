"""Callbacks, wrappers and subclasses of wrappers, conversion, CUDA streams and copies of replicas."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import bagua_syncbn
from bagua_syncbn import data_parallel as dp
from bagua_syncbn.data_parallel import (
    DataParallelWithCallback,
    SynchronizedBatchNorm2d,
    convert_model,
    execute_replication_callbacks,
    patch_replication_callback,
    replicas,
)
from tests.helpers.replicated import GPU_PLACES, PLACES, Steps, build, draw_step, parallel, promptly, run
from tests.helpers.steps import draw, through_file
from tests.helpers.user_layers import BatchNormReLU

pytestmark = pytest.mark.usefixtures("single_threaded")


class Told(nn.Module):
    """A user's module with a replication callback, which records its calls."""

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
def test_callbacks_reach_any_module_once_for_each_replica(place):
    calls = []
    shared = Told(calls)
    model = nn.Sequential(shared, nn.Sequential(Told(calls), shared))
    parallel(model, place, 3)(torch.randn(3, 2))
    contexts, copy_ids, modules = zip(*calls, strict=True)
    assert copy_ids == (0, 0, 1, 1, 2, 2)  # replica 0 first, each module once
    assert contexts == contexts[:2] * 3
    assert contexts[0] is not contexts[1]
    assert tuple(context.master for context in contexts[:2]) == modules[:2]
    assert len(set(modules)) == 6


def test_modules_that_are_not_replicas_of_one_model_raise():
    with pytest.raises(ValueError, match="modules: expected replicas of the same model, got 1 and 2 submodules"):
        execute_replication_callbacks([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
    for given, got in ((nn.Sequential(nn.ReLU()), "Sequential"), ([], r"\[\]"), ([1], r"\[1\]")):
        with pytest.raises(TypeError, match=rf"modules: expected a list of replicas, at least one, got {got}"):
            execute_replication_callbacks(given)


def test_invalid_arguments_of_the_wrapper_raise():
    for module, devices, message in (
        ([nn.Linear(2, 2)], None, "module: expected a torch.nn.Module, got list"),
        (["cpu"], nn.Linear(2, 2), "module: expected a torch.nn.Module, got list"),
        (nn.Linear(2, 2), 2, "device_ids: expected a list of devices, or None, got int"),
        (nn.Linear(2, 2), "cpu", "device_ids: expected a list of devices, or None, got str"),
    ):
        with pytest.raises(TypeError, match=message):
            DataParallelWithCallback(module, devices)


class Threads(nn.DataParallel):
    """A user's subclass of torch's wrapper, with custom replication."""

    def __init__(self, module):
        super().__init__(module)
        self.module, self.output_device = module, None
        self.device_ids, self.src_device_obj = [0, 1], torch.device("cpu")

    def scatter(self, inputs, kwargs, device_ids):
        return [(chunk,) for chunk in inputs[0].chunk(len(device_ids))], [{}] * len(device_ids)

    def replicate(self, module, device_ids):
        return [dp.wrapper._replica(module, torch.device("cpu"), rank) for rank in range(len(device_ids))]

    def parallel_apply(self, replicas, inputs, kwargs):
        with ThreadPoolExecutor(len(replicas)) as pool:
            return list(pool.map(lambda replica, input: replica(*input), replicas, inputs))

    def gather(self, outputs, output_device):
        return torch.cat(outputs)


@pytest.mark.parametrize("patch", [patch_replication_callback, convert_model])
def test_a_users_subclass_is_patched(patch):
    expected = build()
    actual = bagua_syncbn.convert_sync_batchnorm(Threads(copy.deepcopy(expected)))
    given = draw_step(6)
    with pytest.raises(RuntimeError, match=r"use bagua_syncbn.data_parallel.DataParallelWithCallback"):
        actual(given[0])
    patch(actual)
    cls = type(actual)
    patch(actual)
    assert issubclass(cls, Threads)
    for model in (copy.deepcopy(actual), actual):
        assert type(model) is cls
        torch.testing.assert_close(run(model, *given), run(copy.deepcopy(expected), *given))
    actual = Threads(Steps(lambda module, copy_id, input: module.late(input) if copy_id == 0 else input.missing))
    patch(actual)
    with pytest.raises(AttributeError, match="missing"):
        promptly(actual, torch.randn(4, 2))
    assert len(actual.module.freed) == 1


def test_torchs_wrapper_and_its_layers_are_converted_in_place():
    module = nn.Sequential(nn.BatchNorm2d(3), BatchNormReLU(3), SynchronizedBatchNorm2d(3, eps_mode="clamp"))
    model, layers = nn.DataParallel(module), list(module)
    model.note = "kept"
    assert convert_model(model) is model
    assert type(model) is DataParallelWithCallback
    assert model.module is module
    assert model.note == "kept"
    assert list(module) == layers
    assert all(isinstance(layer, bagua_syncbn.SyncBatchNorm) for layer in layers)
    assert isinstance(layers[1], BatchNormReLU)
    assert layers[2].eps_mode == "clamp"
    with pytest.raises(TypeError, match=r"data_parallel: expected a torch.nn.DataParallel, got Linear"):
        patch_replication_callback(nn.Linear(2, 2))


class InAStream(nn.Module):
    """Runs a layer in a new stream, delayed by a sleep in forward and backward."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, input):
        input = input * 1  # a node on the outer stream: torch's scatter of replicas would not wait for the inner stream
        outer, stream = torch.cuda.current_stream(input.device), torch.cuda.Stream(input.device)
        stream.wait_stream(outer)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            output = self.layer(input * 1)
            output.register_hook(lambda _: torch.cuda._sleep(50_000_000))
        outer.wait_stream(stream)
        return output * 1


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [lambda layer: layer, InAStream])
@pytest.mark.parametrize("place", GPU_PLACES)
def test_replicas_wait_for_side_streams_of_the_caller_and_of_each_other(place, inner):
    # Sleeps delay the streams, so that a missing synchronization changes results. Inputs are copied before the sleeps.
    expected = nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Tanh()).double()
    actual = nn.Sequential(SynchronizedBatchNorm2d(3, affine=False), nn.Tanh()).double()
    actual = parallel(nn.Sequential(inner(actual)), place, 2)
    batch, grad_output = draw(2, 6, 3, 2, 3)
    arguments, stream = (batch.cuda(), grad_output.cuda()), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found = run(actual, *arguments)
    torch.cuda.synchronize()
    expected = run(expected, batch, grad_output)
    for name in ("output", "input.grad"):
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.gpu
def test_memory_that_another_replica_still_reads_is_not_reused():
    sent = replicas.Sent([torch.ones(1000, device="cuda")], torch.cuda.current_stream())
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        received = sent.receive()[0].clone()
    del sent
    torch.zeros(1000, device="cuda")  # would reuse the same memory
    torch.cuda.synchronize()
    assert received.eq(1).all()


def test_copies_and_pickles_of_wrapped_models_compute_the_same():
    model, (batch, _) = parallel(build(SynchronizedBatchNorm2d, eps_mode="clamp"), "cpu", 2), draw_step(4)
    model(batch)
    for twin in (copy.deepcopy(model), through_file(model)):
        assert twin.module[0].eps_mode == "clamp"
        assert torch.equal(twin(batch), copy.deepcopy(model)(batch))
    # A copied layer of a replica has no peers.
    with torch.no_grad():
        replica, _ = model.replicate(model.module, model.device_ids)
    copy.deepcopy(replica[0])(batch)
