"""Layers on a CUDA device: one rank, several ranks that share the device, and a device per rank."""

import itertools
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua_syncbn
from bagua_syncbn.communicators import TorchCommunicator, jobs
from bagua_syncbn.groups import spec_of
from bagua_syncbn.reliability.history import history_in
from bagua_syncbn.torch_internals.nccl import nccl_id, nccl_progress
from benchmarks.one_rank import OneRankGroup
from tests.helpers.cases import laid_out
from tests.helpers.large_groups import LargeGroups
from tests.helpers.tolerances import DTYPES, assert_close
from tests.helpers.traced import count, trace
from tests.helpers.workers import WorkerPool

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def nccl(tmp_path_factory):
    """A communicator for a job of one rank over NCCL."""
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


def test_waits_of_the_host_are_counted():
    """Otherwise the next test could not find a wait."""
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
    for _ in range(2):  # so that everything cached is there
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
    # One of them belongs to the communicator. Without a momentum, another one adds the counter of batches to the
    # message, so that ranks notice different counters.
    for counted, kernels in ((forward, 3 if momentum else 4), (backward, 3)):
        # A reduction over several parts has a second kernel. NCCL copies if a group has one rank, or does nothing.
        assert counted["kernels"] <= kernels + (shape[0] == 4), counted
        assert counted["copies"] <= 2, counted
        assert (counted["fills"], counted["collectives"], counted["waits"]) == (0, 1, 0), counted


@pytest.mark.parametrize("zero_masked", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_masks_together_with_an_activation_and_a_residual(layout, zero_masked):
    input, residual, grad_output = torch.randn(3, 4, 6, 9, 11).double().unbind()
    mask, weight, bias = torch.rand(4, 1, 9, 11) < 0.5, torch.randn(6).double(), torch.randn(6).double()
    results = []
    for device in ("cpu", "cuda"):
        tensors = [
            t.to(device).requires_grad_() for t in (*(laid_out(t, layout) for t in (input, residual)), weight, bias)
        ]
        x, r, w, b = tensors
        options = {"activation": "silu", "residual": r, "mask": mask.to(device), "zero_masked": zero_masked}
        output = bagua_syncbn.sync_batch_norm(x, None, None, w, b, **options)
        gradients = torch.autograd.grad(output, tensors, laid_out(grad_output, layout).to(device))
        results.append([t.detach().cpu() for t in (output, *gradients)])
    for wanted, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)


def test_a_step_on_a_side_stream_waits_for_its_input(nccl):
    """Input and step are on a side stream, while a long kernel runs on the default stream."""
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


def little_model(momentum):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU(),
        nn.Conv2d(8, 5, 3, padding=1), nn.BatchNorm2d(5, momentum=momentum), nn.Flatten(), nn.Linear(5 * 64 * 64, 4),
    ).cuda()  # fmt: skip


@pytest.mark.parametrize(("momentum", "fused"), [(0.1, False), (None, False), (None, True)])
def test_a_captured_training_step_ends_where_eager_steps_end(nccl, momentum, fused):
    """One graph holds forward, backward and optimizer. Also with fused activations and recomputed outputs."""
    converted = bagua_syncbn.convert_sync_batchnorm(little_model(momentum), nccl)
    if fused:
        converted = bagua_syncbn.recompute_outputs(bagua_syncbn.fuse_activations(converted))
    eager = bagua_syncbn.convert_sync_batchnorm(little_model(momentum), nccl)
    batches = torch.randn(7, 4, 3, 64, 64, device="cuda")
    labels = torch.randint(4, (7, 4), device="cuda")
    input, label = batches[0].clone(), labels[0].clone()

    def make_step(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x, y):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            return loss

        return step

    captured_step, eager_step = make_step(converted), make_step(eager)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):  # gradients and the communicator exist before the capture
            captured_step(batches[i], labels[i])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # "thread_local": NCCL's watchdog thread queries events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = captured_step(input, label)
    for i in range(7):
        expected = eager_step(batches[i], labels[i])
        if i < 3:
            continue
        input.copy_(batches[i])
        label.copy_(labels[i])
        graph.replay()
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-4)
    state, wanted = converted.state_dict(), eager.state_dict()
    for name in state:
        torch.testing.assert_close(state[name], wanted[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert state["1.num_batches_tracked"] == 7


def train_on_gpu(layout, splits):
    """Trains a layer on this rank's part of a batch, on the GPU that all ranks share."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    batch, grad_output = (t.cuda().split(splits) for t in torch.randn(2, sum(splits), 6, 20, 20))
    layer = bagua_syncbn.SyncBatchNorm2d(6, momentum=None).cuda()
    input = laid_out(batch[rank], layout).detach().requires_grad_()
    output = layer(input)
    output.backward(laid_out(grad_output[rank], layout))
    return [t.detach().cpu() for t in (output, input.grad, layer.weight.grad, layer.running_var)]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("splits", [(4, 4), (5, 0, 2)], ids=str)
def test_ranks_that_share_the_gpu(pool, splits, layout):
    """Over gloo: NCCL refuses two ranks on one device."""
    results = pool.run(train_on_gpu, len(splits), layout, splits)
    torch.manual_seed(0)
    batch, grad_output = torch.randn(2, sum(splits), 6, 20, 20).double()
    layer = nn.BatchNorm2d(6, momentum=None, dtype=torch.float64)
    batch.requires_grad_()
    output = layer(batch)
    output.backward(grad_output)
    assert_close(torch.cat([result[0] for result in results]), output.detach(), "output")
    assert_close(torch.cat([result[1] for result in results]), batch.grad, "input.grad")
    torch.testing.assert_close(sum(result[2] for result in results).double(), layer.weight.grad, rtol=1e-4, atol=1e-3)
    for result in results:
        assert_close(result[3], layer.running_var, "running_var")


def train_with_ddp(local_rank, process_group=None, fuses=False):
    """Trains two steps on this rank's half of a batch, as users do. Returns parameters and buffers."""
    torch.manual_seed(0)
    model = bagua_syncbn.convert_sync_batchnorm(little_model(0.1), process_group)
    if fuses:
        bagua_syncbn.fuse_activations(model)
    model = DistributedDataParallel(model, device_ids=[local_rank], output_device=local_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch, labels in batches_of_ddp():
        own = slice(dist.get_rank(), None, dist.get_world_size())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[own].to(local_rank)), labels[own].to(local_rank)).backward()
        optimizer.step()
    return {name: value.cpu() for name, value in model.module.state_dict().items()}


def batches_of_ddp():
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        yield torch.randn(8, 3, 64, 64, generator=generator), torch.randint(4, (8,), generator=generator)


def check_trained(states, buffers=True):
    """Compares the ranks' parameters and buffers with one process that trains on the whole batch in float64."""
    torch.manual_seed(0)
    model = little_model(0.1).double().cpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch, labels in batches_of_ddp():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.double()), labels).backward()
        optimizer.step()
    for state in states:
        for name, wanted in (model.state_dict() if buffers else dict(model.named_parameters())).items():
            actual = state[name].to(wanted.dtype)
            torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_ddp_with_device_ids(pool):
    """Two ranks share the GPU, over gloo."""
    check_trained(pool.run(train_with_ddp, 2, 0))


def join_nccl(store, rank, size):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size, device_id=device)


def train_on_own_gpu(shares, fuses):
    """Trains with layers in the job's group, or in a group that is split from it."""
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
    check_trained(two_gpus.run(train_on_own_gpu, 2, shares, fuses))


def test_a_group_that_adds_statistics_up_over_nccl(two_gpus):
    check_trained(LargeGroups(two_gpus).run(train_on_own_gpu, 2, False, True))


WARM_UP = 11  # steps of DistributedDataParallel before a capture, as torch's notes on graphs ask


def batches_of_graph():
    return torch.randn(WARM_UP + 3, 8, 3, 64, 64, generator=torch.Generator().manual_seed(2)).unbind()


def train_in_a_graph():
    """Trains on this rank's half of each batch; the last steps replay a graph. Returns parameters and buffers."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = bagua_syncbn.convert_sync_batchnorm(little_model(0.1))
    batches = [batch[rank::2].to(rank) for batch in batches_of_graph()]
    input, stream = batches[0].clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        wrapped = DistributedDataParallel(model, device_ids=[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step():
            optimizer.zero_grad(set_to_none=False)
            wrapped(input).square().mean().backward()
            optimizer.step()

        for batch in batches[:WARM_UP]:
            input.copy_(batch)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for batch in batches[WARM_UP:]:
        input.copy_(batch)
        graph.replay()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def test_ddp_within_a_graph_ends_where_one_process_ends(two_gpus):
    states = two_gpus.run(train_in_a_graph, 2)
    torch.manual_seed(0)
    model = little_model(0.1).double().cpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches_of_graph():
        optimizer.zero_grad()
        model(batch.double()).square().mean().backward()
        optimizer.step()
    for state in states:
        for name, wanted in model.state_dict().items():
            actual = state[name].to(wanted.dtype)
            torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def autocast_step(model, part, dtype):
    """Trains one step on a part of a batch, under autocast except in float64. Returns output and gradients."""
    (batch, labels), *_ = batches_of_ddp()
    device = next(model.parameters()).device
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype != torch.float64):
        output = model(batch[part].to(device, dtype))
    nn.functional.cross_entropy(
        output.to(torch.promote_types(dtype, torch.float32)), labels[part].to(device), reduction="sum"
    ).backward()
    return {"output": output, **{name: p.grad for name, p in model.named_parameters()}}


def autocast_on_own_gpu():
    torch.manual_seed(0)
    model = bagua_syncbn.convert_sync_batchnorm(little_model(0.1))
    results = autocast_step(model, slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4), torch.float32)
    return {name: value.detach().cpu().double() for name, value in results.items()}


def test_ranks_under_autocast_are_as_exact_as_one_process(two_gpus):
    """Both round to bfloat16 in the same places, so both are equally far from float64.

    The norm of the ranks' error may be larger by half: roundings average out over hundreds of values.
    """
    ranks = two_gpus.run(autocast_on_own_gpu, 2)
    results = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        model = little_model(0.1).to("cpu" if dtype == torch.float64 else "cuda", dtype)
        results.append(autocast_step(model, slice(None), dtype))
    exact, one = ({name: value.detach().cpu().double() for name, value in result.items()} for result in results)
    ours = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    ours["output"] = torch.cat([rank["output"] for rank in ranks])
    for name, wanted in exact.items():
        if name in ("0.bias", "3.bias"):  # normalization removes them: their gradient is rounding only
            continue
        error, errors_of_one = ((result[name] - wanted).norm() / wanted.norm() for result in (ours, one))
        assert error <= 1.5 * errors_of_one, f"{name}: {error:.3g}, one process {errors_of_one:.3g}"
        assert 1e-5 < error < 0.1, f"{name}: {error:.3g}"


class Skipping(nn.Sequential):
    skipped: int | None = None  # layer that forward skips

    def forward(self, input):
        for number, layer in enumerate(self):
            if number != self.skipped:
                input = layer(input)
        return input


def differ_in_ddp(change):
    """Trains in DistributedDataParallel up to the first error. Returns the error and the parameters.

    From the third step on, rank 1 has a different eps or skips a layer.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = bagua_syncbn.convert_sync_batchnorm(Skipping(*little_model(0.1)))
    wrapped = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    message = "no error"
    for step, (batch, labels) in enumerate(itertools.chain(batches_of_ddp(), batches_of_ddp())):
        if step == 2 and rank == 1:
            model.skipped, model[4].eps = (4, 1e-5) if change == "skip" else (None, 1e-3)
        try:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapped(batch[rank::2].to(rank)), labels[rank::2].to(rank))
            loss.item()  # a wait: this rank raises before it sends a message that no rank answers
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            message = str(error)
            break
    return message, {name: value.detach().cpu() for name, value in model.named_parameters()}


@pytest.mark.parametrize("change", ["eps", "skip"])
def test_ranks_that_differ_in_ddp_raise_by_name_and_train_no_further(two_gpus, change):
    messages, parameters = zip(*two_gpus.run(differ_in_ddp, 2, change), strict=True)
    for message in messages:
        assert "ranks made different calls" in message
        assert "'4' of Skipping" in message
    check_trained(parameters, buffers=False)


def differ_late(change):
    """Runs two layers, which differ on rank 1 from the fourth step on. Returns the error of each later step."""
    torch.manual_seed(0)
    first, second = (bagua_syncbn.SyncBatchNorm2d(5, device="cuda") for _ in range(2))
    input = torch.randn(3, 5, 6, 7, device="cuda", requires_grad=True)
    messages = []
    for step in range(8):
        if step == 4 and dist.get_rank() == 1:
            if change == "eps":
                second.eps = 1e-3
            if change == "order":
                first, second = second, first
        try:
            output = first(input) if change == "skip" and step >= 4 and dist.get_rank() == 1 else second(first(input))
            output.sum().backward()
        except (
            RuntimeError
        ) as error:  # no wait for the device: rank 0 may have sent a message that rank 1 does not answer
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("change", ["eps", "order", "skip"])
def test_ranks_that_differ_late_raise_by_name_in_each_further_call(two_gpus, change):
    for first, *further in two_gpus.run(differ_late, 2, change):
        assert "ranks made different calls" in first
        assert "call 18" in first or "call 17" in first
        assert further
        for message in further:
            # Not "in the RuntimeError in": this rank would have sent its error in one more message.
            assert message == first or re.search(r"failed before, in the (for|back)ward of", message)


def train_and_count():
    """Returns the collectives of the layers' group that NCCL has started and finished, and this package's count."""
    layer = bagua_syncbn.SyncBatchNorm2d(5, device="cuda")
    for _ in range(3):
        layer(torch.randn(3, 5, 6, 7, device="cuda", requires_grad=True)).sum().backward()
    torch.cuda.synchronize()
    communicator = spec_of(None).communicator()
    history, number = history_in(communicator), nccl_id(communicator.group)
    sent, deadline = history.calls + history.probes, time.monotonic() + 10
    while nccl_progress(number) != (sent, sent) and time.monotonic() < deadline:
        time.sleep(0.1)  # torch's watchdog records finished collectives
    return nccl_progress(number), (sent, sent)


def test_the_watch_over_groups_knows_what_nccl_has_ended(two_gpus):
    for by_nccl, by_us in two_gpus.run(train_and_count, 2):
        assert by_nccl == by_us


def test_the_layers_own_group_of_one_rank(nccl):
    """Layers split their own group from the job's; a step over it works like a step over the job's group."""
    job = jobs.job_of(dist.group.WORLD)
    group = job.layers_group((0,))
    assert group is job.layers_group((0,)) is not dist.group.WORLD
    assert dist.get_backend(group) == dist.get_backend()
    layer = bagua_syncbn.SyncBatchNorm2d(6, process_group=OneRankGroup(group), device="cuda")
    steps = torch.randn(2, 2, 8, 6, 20, 20, device="cuda").unbind()
    check_steps(layer, steps, *take(layer, steps))


def test_ddp_over_nccl(nccl):
    """NCCL takes one rank per GPU. DDP's reducer and the layers' group are used together."""
    local_rank = 0
    model = bagua_syncbn.convert_sync_batchnorm(little_model(None), nccl)
    model = DistributedDataParallel(model, device_ids=[local_rank], output_device=local_rank)
    wide = little_model(None)
    for batch, labels in batches_of_ddp():
        for each in (model, wide):
            nn.functional.cross_entropy(each(batch.to(local_rank)), labels.to(local_rank)).backward()
    for actual, wanted in zip(model.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, wanted.grad, rtol=1e-3, atol=1e-4)
