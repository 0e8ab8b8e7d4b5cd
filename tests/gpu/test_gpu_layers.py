"""Layers on a CUDA device: one rank, several ranks that share the device, and a device per rank."""

import time
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import bagua_syncbn
from bagua_syncbn._groups import spec_of
from bagua_syncbn._reliability.history import history_in
from bagua_syncbn._torch.process_groups import nccl_id, nccl_progress
from bagua_syncbn.communicators import TorchCommunicator, torch_engine
from tests.helpers.cases import WAYS, Case, compare, laid_out, run_ranks
from tests.helpers.messages import message_of
from tests.helpers.one_rank import OneRankGroup, Twin
from tests.helpers.steps import batch_of, check_training, make_model, make_optimizer, take_step, train
from tests.helpers.tolerances import DTYPES, assert_close
from tests.helpers.traced import count, trace
from tests.helpers.workers import WorkerPool, summing

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def nccl(tmp_path_factory):
    """A communicator for a single-rank job over NCCL."""
    store = tmp_path_factory.mktemp("nccl") / "store"
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1, device_id=device)
    yield OneRankGroup()
    dist.destroy_process_group()


def take(layer, steps):
    """Trains on ``steps``, pairs of input and gradient. Returns output and input gradient of the last step."""
    for input, grad_output in steps:
        layer.zero_grad()
        x = input.detach().requires_grad_()
        output = layer(x)
        output.backward(grad_output)
    return output.detach(), x.grad


def check_steps(layer, steps, output, grad):
    """Compares ``layer`` and the results of its last step with torch's layer in float64.

    Torch's layer gets each batch twice: :class:`OneRankGroup` simulates two ranks with the same batch.
    """
    wide = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum, dtype=torch.float64, device="cuda")
    with torch.no_grad():
        for target, source in zip(wide.parameters(), layer.parameters(), strict=True):
            target.copy_(source)
    twice = [(torch.cat([x, x]).double(), dy.double().repeat(2, 1, 1, 1) / 2) for x, dy in steps]
    expected, expected_grad = (both[: len(output)] for both in take(wide, twice))
    assert_close(output, expected, "output")
    assert_close(grad, 2 * expected_grad, "input.grad")
    assert_close(layer.running_mean, wide.running_mean, "running_mean", roundings=2)
    assert_close(layer.running_var, wide.running_var, "running_var", roundings=2)
    assert layer.num_batches_tracked == wide.num_batches_tracked == len(steps)
    for actual, wanted in zip(layer.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.double(), wanted.grad, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rank_over_nccl(nccl, dtype, layout, momentum):
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    layer = bagua_syncbn.SyncBatchNorm2d(6, momentum=momentum, process_group=nccl, device="cuda", dtype=parameter_dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(6) + 0.5)
        layer.bias.copy_(torch.randn(6))
    values = torch.randn(2, 2, 8, 6, 20, 20).to("cuda", dtype)
    steps = [(laid_out(x * 2 + 1, layout), laid_out(dy, layout)) for x, dy in values]
    check_steps(layer, steps, *take(layer, steps))


def test_the_trace_counts_host_waits():
    """Checks the counter that the next test uses."""
    ones = torch.ones(3, device="cuda")
    counted = count(trace(lambda: ones.sum().item(), torch.cuda.synchronize))
    if not counted["runtime"]:
        pytest.skip("torch's profiler does not see the device here")
    assert (counted["kernels"], counted["copies"], counted["fills"]) == (1, 1, 0), counted
    assert counted["waits"] >= 1, counted


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (4, 8, 56, 56)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_step_has_few_launches_one_collective_each_way_and_no_wait(nccl, shape, layout, momentum):
    layer = bagua_syncbn.SyncBatchNorm2d(shape[1], momentum=momentum, process_group=nccl, device="cuda")
    input, grad_output = (laid_out(torch.randn(shape).half().cuda(), layout) for _ in range(2))
    input.requires_grad_()
    parameters = (input, *layer.parameters())
    for _ in range(2):  # fill caches
        torch.autograd.grad(layer(input), parameters, grad_output)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(layer(input), parameters, grad_output)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    outputs = []
    forward = count(trace(lambda: outputs.append(layer(input)), torch.cuda.synchronize))
    backward = count(trace(lambda: torch.autograd.grad(outputs[0], parameters, grad_output), torch.cuda.synchronize))
    if not forward["runtime"]:
        pytest.skip("torch's profiler does not see the device here")
    # The communicator launches one kernel. With momentum=None, another kernel adds the batch counter to the message, so
    # that ranks detect different counters.
    for counted, kernels in ((forward, 3 if momentum else 4), (backward, 3)):
        # A reduction in several parts has a second kernel. With a single rank, NCCL copies or is a no-op.
        assert counted["kernels"] <= kernels + (shape[0] == 4), counted
        assert counted["copies"] <= 2, counted
        assert (counted["fills"], counted["collectives"], counted["waits"]) == (0, 1, 0), counted


def test_a_step_on_a_side_stream_waits_for_its_input(nccl):
    """Input and step run on a side stream while a long kernel runs on the default stream."""
    layer = bagua_syncbn.SyncBatchNorm2d(6, process_group=nccl, device="cuda")
    input, grad_output = torch.randn(2, 8, 6, 100, 100).pin_memory().unbind()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(20_000_000)
    with torch.cuda.stream(stream):
        x = input.cuda(non_blocking=True).requires_grad_()
        dy = grad_output.cuda(non_blocking=True)
        output = layer(x)
        output.backward(dy)
    stream.synchronize()
    check_steps(layer, [(x.detach(), dy)], output.detach(), x.grad)


def on_gpu(layer):
    layer.cuda()
    return lambda input: layer(input.cuda()).cpu()


def run_on_gpu(cases):
    with patch.dict(WAYS, forward=on_gpu):
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, run_ranks(cases))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("splits", [(4, 4), (5, 0, 2)], ids=str)
def test_ranks_that_share_the_gpu(pool, splits, layout):
    """Over gloo, because NCCL does not allow two ranks on one device."""
    case = Case(splits, (6, 20, 20), layout=layout, options={"momentum": None})
    compare(case, [result for (result,) in pool.run(run_on_gpu, len(splits), [case])])


SIZES = (4, 4)
CLOSE = 1e-3  # error of parameters and buffers in float32 after some steps


def train_with_ddp(local_rank, process_group=None, fuses=False):
    model = bagua_syncbn.convert_sync_batchnorm(make_model().float().to(local_rank), process_group)
    if fuses:
        bagua_syncbn.fuse_activations(model)
    model = DistributedDataParallel(model, device_ids=[local_rank], output_device=local_rank)
    state = train(model, make_optimizer(model), SIZES, dist.get_rank())
    return {name: value.cpu() for name, value in state.items()}


def test_ddp_with_device_ids(pool):
    """Two ranks share the GPU, over gloo."""
    check_training(pool.run(train_with_ddp, 2, 0), SIZES, "module.", CLOSE)


def join_nccl(store, rank, size):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size, device_id=device)


def train_on_own_gpu(shares, fuses):
    """Trains with layers in the job's group, or in a separate group."""
    group = TorchCommunicator(dist.group.WORLD) if shares else None
    return train_with_ddp(dist.get_rank(), group, fuses)


@pytest.fixture
def two_gpus():
    """Two ranks over NCCL, with a GPU for each rank."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = WorkerPool(join_nccl)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(("shares", "fuses"), [(False, False), (True, False), (False, True)])
def test_ddp_over_nccl_on_two_gpus(two_gpus, shares, fuses):
    check_training(two_gpus.run(train_on_own_gpu, 2, shares, fuses), SIZES, "module.", CLOSE)


def test_a_large_group_over_nccl(two_gpus):
    check_training(summing(two_gpus).run(train_on_own_gpu, 2, False, True), SIZES, "module.", CLOSE)


WARM_UP = 11  # number of DistributedDataParallel steps before a capture, as torch's CUDA graph notes require
IN_ALL = WARM_UP + 3


def train_in_a_graph(sizes, group=None, recomputes=False):
    """Trains on this rank's share; the last steps replay a graph. Returns parameters and buffers."""
    rank = dist.get_rank()
    model = bagua_syncbn.convert_sync_batchnorm(make_model().float().to(rank), group)
    if recomputes:
        model = bagua_syncbn.recompute_outputs(bagua_syncbn.fuse_activations(model))
    batches = [batch_of(number, sizes, rank, next(model.parameters())) for number in range(IN_ALL)]
    given = [tensor.clone() for tensor in batches[0]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        wrapped = DistributedDataParallel(model, device_ids=[rank])
        optimizer = make_optimizer(model)
        optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # replays write to the same gradients
        for batch in batches[:WARM_UP]:
            torch._foreach_copy_(given, batch)
            take_step(wrapped, optimizer, *given, sizes)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # "thread_local": NCCL's watchdog thread queries events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        take_step(wrapped, optimizer, *given, sizes)
    for batch in batches[WARM_UP:]:
        torch._foreach_copy_(given, batch)
        graph.replay()
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("recomputes", [False, True])
def test_training_in_a_cuda_graph_equals_eager_training(nccl, recomputes):
    eager = bagua_syncbn.convert_sync_batchnorm(make_model(), Twin())
    expected = train(eager, make_optimizer(eager), (8,), 0, IN_ALL)
    state = {name: value.to(expected[name]) for name, value in train_in_a_graph((8,), nccl, recomputes).items()}
    torch.testing.assert_close(state, expected, rtol=CLOSE, atol=CLOSE)


def test_ddp_in_a_cuda_graph_equals_one_process(two_gpus):
    check_training(two_gpus.run(train_in_a_graph, 2, SIZES), SIZES, "", CLOSE, IN_ALL)


@pytest.mark.parametrize("change", ["eps", "skip"])
def test_ranks_that_diverge_in_ddp_raise_errors_and_stop_training(two_gpus, change):
    two_gpus.run(differ_in_ddp, 2, change)


def differ_in_ddp(change):
    """From the third step on, rank 1 has a different eps or skips a layer."""
    rank = dist.get_rank()
    model = bagua_syncbn.convert_sync_batchnorm(make_model().float().to(rank))
    wrapped = DistributedDataParallel(model, device_ids=[rank])
    optimizer = make_optimizer(wrapped)
    train(wrapped, optimizer, SIZES, rank, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if rank == 1 and change == "skip":
        model[4].forward = lambda input: input
    elif rank == 1:
        model[4].eps = 1e-3
    # Waits, so that this rank raises before it sends a message that peers do not match.
    wrapped.register_forward_hook(lambda *_: torch.cuda.synchronize())
    message = message_of(train, wrapped, optimizer, SIZES, rank, 2)
    assert "ranks made different calls" in message
    assert "'4' of Sequential" in message
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)


def train_and_count():
    """Returns the collectives of the layers' group that NCCL has started and finished, and this package's count."""
    layer = bagua_syncbn.SyncBatchNorm2d(5, device="cuda")
    for _ in range(3):
        layer(torch.randn(3, 5, 6, 7, device="cuda", requires_grad=True)).sum().backward()
    torch.cuda.synchronize()
    communicator = spec_of(None).communicator()
    history, number = history_in(communicator), nccl_id(communicator.group)
    sent, deadline = history.messages + history.probes, time.monotonic() + 10
    while nccl_progress(number) != (sent, sent) and time.monotonic() < deadline:
        time.sleep(0.1)  # torch's watchdog thread records finished collectives
    return nccl_progress(number), (sent, sent)


def test_nccls_progress_is_known(two_gpus):
    for by_nccl, by_us in two_gpus.run(train_and_count, 2):
        assert by_nccl == by_us


def test_the_layers_own_group_of_one_rank(nccl):
    """A step over the layers' group works like a step over the job's group."""
    job = torch_engine.running_job()
    group = job.communicator("user", None).group
    assert group is job.communicator("user", None).group is not dist.group.WORLD
    assert dist.get_backend(group) == dist.get_backend()
    layer = bagua_syncbn.SyncBatchNorm2d(6, process_group=OneRankGroup(group), device="cuda")
    steps = torch.randn(2, 2, 8, 6, 20, 20, device="cuda").unbind()
    check_steps(layer, steps, *take(layer, steps))
