"""Replicas are told of each other: callbacks, wrappers, users' subclasses of them, streams and copies."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import bagua_syncbn
from bagua_syncbn import data_parallel as dp
from bagua_syncbn.data_parallel import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    convert_model,
    execute_replication_callbacks,
    patch_replication_callback,
    replicas,
)
from tests.helpers.replicated import GPU_PLACES, PLACES, Steps, build, check_equal, inputs_of, parallel, promptly, run
from tests.helpers.training import through_file

pytestmark = pytest.mark.usefixtures("single_threaded")


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
def test_callbacks_reach_any_module_once_for_each_replica(place):
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


def test_a_replica_may_call_itself():
    def script(replica, rank, input, again=True):
        output = replica.early(input)
        return replica.late(replica(output, False)) if again else output

    model = Steps(script)
    promptly(parallel(model, "cpu", 2), torch.randn(6, 2))
    assert (model.early.num_batches_tracked, model.late.num_batches_tracked) == (2, 1)


def test_callbacks_are_refused_what_is_no_set_of_replicas():
    for modules in ([], [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]):
        with pytest.raises(ValueError, match="modules: expected replicas of one model"):
            execute_replication_callbacks(modules)
    with pytest.raises(TypeError, match=r"ctx: expected a bagua_syncbn.data_parallel.CallbackContext"):
        SynchronizedBatchNorm1d(2).__data_parallel_replicate__(object(), 0)


def test_replicas_that_are_told_again_forget_the_replicas_of_before():
    layers = [SynchronizedBatchNorm1d(2) for _ in range(2)]
    for _ in range(2):
        execute_replication_callbacks(layers)
    assert [len(layer._sync_state.attachments) for layer in layers] == [1, 1]


class Threads(nn.DataParallel):
    """A user's subclass of torch's wrapper, with replicas of its own."""

    def __init__(self, module, count):
        super().__init__(module)
        self.module, self.dim, self.output_device = module, 0, None
        self.device_ids, self.src_device_obj = list(range(count)), torch.device("cpu")

    def scatter(self, inputs, kwargs, device_ids):
        return [(chunk,) for chunk in inputs[0].chunk(len(device_ids))], [{}] * len(device_ids)

    def replicate(self, module, device_ids):
        return [dp.wrapper._replica(module, torch.device("cpu"), rank) for rank in range(len(device_ids))]

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
    make(other := Threads(copy.deepcopy(expected), 2))
    assert type(actual) is type(other) is cls
    assert issubclass(cls, Threads)
    for model in (actual, copy.deepcopy(actual)):
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


def test_torchs_wrapper_is_patched_in_place():
    model = nn.DataParallel(build(nn.BatchNorm2d))
    model.note = "kept"
    module = model.module
    assert convert_model(model) is model
    assert type(model) is DataParallelWithCallback
    assert model.module is module
    assert type(module[0]) is type(module[1][1][0]) is SynchronizedBatchNorm2d
    assert model.note == "kept"
    with pytest.raises(TypeError, match=r"data_parallel: expected a torch.nn.DataParallel, got Linear"):
        patch_replication_callback(nn.Linear(2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("place", GPU_PLACES)
def test_replicas_on_a_side_stream_wait_for_their_input(place):
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


class InAStream(nn.Module):
    """Runs a layer in a stream of its device, behind waits in both passes."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, input):
        input = input * 1  # a node of the outer stream: torch's scatter of replicas would not wait for the inner one
        outer, stream = torch.cuda.current_stream(input.device), torch.cuda.Stream(input.device)
        stream.wait_stream(outer)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            output = self.layer(input * 1).tanh()
            output.register_hook(lambda _: torch.cuda._sleep(50_000_000))
        outer.wait_stream(stream)
        return output * 1


@pytest.mark.gpu
@pytest.mark.parametrize("place", GPU_PLACES)
def test_each_replica_may_run_in_a_stream_of_its_own(place):
    expected = nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Tanh()).double()
    actual = parallel(nn.Sequential(InAStream(SynchronizedBatchNorm2d(3, affine=False))).double(), place, 2)
    batch, grad_output = inputs_of(nn.BatchNorm2d, 6), torch.randn(6, 3, 2, 3, dtype=torch.float64)
    result = run(actual, batch.cuda(), grad_output.cuda())
    found = {name.replace("layer.", ""): value for name, value in result.items()}
    check_equal(found, run(expected, batch, grad_output))


@pytest.mark.gpu
def test_memory_that_another_replica_still_reads_is_not_given_out_again():
    sent = replicas._send([torch.ones(1000, device="cuda")])
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        received = sent.receive()[0].clone()
    del sent
    torch.zeros(1000, device="cuda")  # would take the same memory
    torch.cuda.synchronize()
    assert received.eq(1).all()


def test_copies_and_pickles_of_wrapped_models_compute_the_same():
    model = parallel(build(SynchronizedBatchNorm1d, eps_mode="clamp"), "cpu", 2)
    model(inputs_of(nn.BatchNorm1d, 4))
    for twin in (copy.deepcopy(model), through_file(model)):
        assert twin.module[0].eps_mode == "clamp"
        batch = inputs_of(nn.BatchNorm1d, 4, 1)
        assert torch.equal(twin(batch), copy.deepcopy(model)(batch))
    # A replica's layer too: it leaves the other replicas behind.
    with torch.no_grad():
        replica, _ = model.replicate(model.module, model.device_ids)
    assert replica[0]._sync_state.attachments
    assert copy.deepcopy(replica[0])._sync_state.attachments == ()
