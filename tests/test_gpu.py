"""On a CUDA device: ``pytest -m gpu``, with FAIL_WITHOUT_CUDA=1 where there must be one. Not run on one yet."""

import pytest
import torch
import torch.distributed as dist
from cases import laid_out
from comparison import check_ops
from tolerances import assert_close
from torch.profiler import ProfilerActivity, profile

import bagua_syncbn
from bagua_syncbn import ops
from bagua_syncbn.communicators.torch import TorchCommunicator
from bagua_syncbn.ops import reference

pytestmark = pytest.mark.gpu

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# Light and split, with rows that are aligned and rows that are not, and more channels than the target of blocks.
SHAPES = [(5, 3), (70, 33), (4100, 8), (3, 5, 49), (8, 64, 28, 28), (4, 3, 100, 101), (2, 2000, 7, 7), (1, 2, 300000)]


def tensors(shape, dtype, layout="contiguous"):
    pair = (torch.randn(shape) * 2 + 1).to(dtype), torch.randn(shape).to(dtype)
    return [laid_out(tensor.cuda(), layout) for tensor in pair]


def test_the_library_has_cuda_kernels():
    assert ops.KERNELS.endswith(", cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ops(shape, dtype):
    check_ops(ops, *tensors(shape, dtype))
    if len(shape) == 4:
        check_ops(ops, *tensors(shape, dtype, "channels_last"), torch.float32)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("buffer_dtype", DTYPES, ids=str)
def test_gather_stats(buffer_dtype, momentum):
    rows = torch.stack([reference.batch_norm_stats(torch.randn(n, 300)) for n in (4, 0, 7)]).cuda()
    buffers = [torch.rand(300).to("cuda", buffer_dtype) for _ in range(2)] + [torch.tensor(4, device="cuda")]
    wide = [buffer.double() if buffer.is_floating_point() else buffer.clone() for buffer in buffers]
    results = ops.batch_norm_gather_stats(rows, *buffers, momentum, 1e-5)
    expected = reference.batch_norm_gather_stats(rows.double(), *wide, momentum, 1e-5)
    for actual, wanted in zip((*results[:2], *buffers[:2]), (*expected[:2], *wide[:2]), strict=True):
        assert_close(actual, wanted, "merged")
    assert results[2] == expected[2]
    assert buffers[2] == wide[2]


def test_side_streams_do_not_disturb_each_other():
    input, grad_output = tensors((4, 8, 200, 200), torch.float32)
    ones = torch.ones(8, device="cuda")
    expected = ops.batch_norm_stats(input), ops.batch_norm_backward_reduce(grad_output, input, ones, ones, ones)[0]
    torch.cuda.synchronize()
    results = []
    for stream in [torch.cuda.Stream() for _ in range(4)] * 10:
        with torch.cuda.stream(stream):
            sums, *_ = ops.batch_norm_backward_reduce(grad_output, input, ones, ones, ones)
            results.append((ops.batch_norm_stats(input), sums))
    torch.cuda.synchronize()
    for result in results:
        assert all(torch.equal(actual, wanted) for actual, wanted in zip(result, expected, strict=True))


def test_graphs():
    input, _ = tensors((4, 8, 200, 200), torch.float32)
    expected = ops.batch_norm_stats(input)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = ops.batch_norm_stats(input)
    for _ in range(3):
        graph.replay()
        assert torch.equal(ops.batch_norm_stats(input), expected)
    torch.cuda.synchronize()
    assert torch.equal(packed, expected)


def kernels_of(function):
    function()  # makes the counters of the stream
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        function()
        torch.cuda.synchronize()
    return [event.name for event in prof.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (16, 64, 56, 56)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_each_op_is_one_launch_and_does_not_wait(shape, layout):
    input, grad_output = tensors(shape, torch.float16, layout)
    ones = torch.ones(shape[1], device="cuda")
    packed = ops.batch_norm_stats(input)[None]
    counter, running = torch.tensor(0, device="cuda"), (ones.clone(), ones.clone())
    sums = ones.repeat(2)
    calls = [
        lambda: ops.batch_norm_stats(input),
        lambda: ops.batch_norm_gather_stats(packed, *running, counter, None, 1e-5),
        lambda: ops.batch_norm_elemt(input, ones, ones, ones, ones),
        lambda: ops.batch_norm_backward_reduce(grad_output, input, ones, ones, ones),
        lambda: ops.batch_norm_backward_elemt(grad_output, input, ones, ones, ones, sums, counter),
    ]
    for call in calls:
        call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(kernels_of(call)) == 1


def train_on_gpu():
    """A rank's part of a batch, through a layer on the one GPU that all share."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    batch, grad_output = (t.cuda().chunk(size) for t in torch.randn(2, 8, 6, 20, 20))
    layer = bagua_syncbn.SyncBatchNorm2d(6).cuda()
    input = batch[rank].clone().requires_grad_()
    output = layer(input)
    output.backward(grad_output[rank])
    return [t.detach().cpu() for t in (output, input.grad, layer.weight.grad, layer.running_var)]


def test_ranks_that_share_the_gpu(pool):
    results = pool.run(train_on_gpu, 2)
    torch.manual_seed(0)
    batch, grad_output = torch.randn(2, 8, 6, 20, 20).double()
    layer = torch.nn.BatchNorm2d(6, dtype=torch.float64)
    batch.requires_grad_()
    output = layer(batch)
    output.backward(grad_output)
    assert_close(torch.cat([result[0] for result in results]), output.detach(), "output")
    assert_close(torch.cat([result[1] for result in results]), batch.grad, "input.grad")
    torch.testing.assert_close(sum(result[2] for result in results).double(), layer.weight.grad, rtol=1e-4, atol=1e-3)
    for result in results:
        assert_close(result[3], layer.running_var, "running_var")


def train_over_nccl(store):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        input, grad_output = tensors((8, 6, 20, 20), torch.float32)
        communicator = TorchCommunicator(dist.group.WORLD)
        packed = ops.batch_norm_stats(input)
        mean, invstd, count = ops.batch_norm_gather_stats(communicator.all_gather(packed), None, None, None, 0.1, 1e-5)
        sums, *_ = ops.batch_norm_backward_reduce(grad_output, input, mean, invstd, None)
        sums = communicator.all_reduce(sums)
        grad_input = ops.batch_norm_backward_elemt(grad_output, input, None, mean, invstd, sums, count)
        wide = input.double().requires_grad_()
        torch.nn.functional.batch_norm(wide, None, None, training=True).backward(grad_output.double())
        assert_close(grad_input, wide.grad, "grad_input")
    finally:
        dist.destroy_process_group()


def test_one_rank_over_nccl(tmp_path):
    train_over_nccl(tmp_path / "store")
