"""DTensor input on ranks equals one process on the whole tensor."""

import math
import re
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, masked, sync_batch_norm
from bagua_syncbn.communicators import LOCAL, LocalCommunicator
from bagua_syncbn.data_parallel import DataParallelWithCallback
from tests.helpers.cases import Case, compare

N, C, H, W, R = Shard(0), Shard(1), Shard(2), Shard(-1), Replicate()


CASE = Case((5,), (3, 7, 2), torch.float64, steps=1)


@dataclass(frozen=True)
class Sharded:
    """A layer on a mesh, with the same results as ``case`` on a single rank."""

    mesh: tuple[int, ...]
    placements: tuple
    group: str | None = None  # "local", or name of a mesh dimension; None for all ranks
    parameters: tuple | None = None  # placements of parameters; None for plain tensors
    buffers: tuple | None = None
    case: Case = CASE


def place(layer, mesh, parameters, buffers):
    """Replaces parameters and buffers by DTensors, like a ``partition_fn`` of distribute_module."""
    for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
        placements = parameters if isinstance(value, nn.Parameter) else buffers
        placed = distribute_tensor(value.detach(), mesh, placements if value.dim() else [R] * mesh.ndim)
        setattr(layer, name, nn.Parameter(placed) if isinstance(value, nn.Parameter) else placed)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(sharded):
    case, mesh = sharded.case, init_device_mesh("cpu", sharded.mesh, mesh_dim_names=("dp", "sp")[: len(sharded.mesh)])
    layer = case.layer().train(case.trains(0))
    layer.process_group = LOCAL if sharded.group == "local" else sharded.group and mesh[sharded.group]
    if sharded.parameters is not None:
        place(layer, mesh, sharded.parameters, sharded.buffers or sharded.parameters)
    input, _, grad_output = case.batch(0)
    input = distribute_tensor(input, mesh, sharded.placements).requires_grad_()
    output = layer(input)
    assert output.placements == input.placements
    assert output.to_local().stride() == input.to_local().stride()
    output.backward(distribute_tensor(grad_output, mesh, [R] * mesh.ndim))
    assert input.grad.placements == input.placements
    results = {"output": full(output).detach(), "1. derivative by input": full(input.grad)}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            assert grad.placements == parameter.placements
        else:  # this rank's share; replicas have equal shares
            dist.all_reduce(grad)
            grad /= math.prod(mesh.size(dim) for dim, placement in enumerate(sharded.placements) if placement == R)
        results[f"1. derivative by {name}"] = full(grad)
    return {"steps": [results], "buffers": {name: full(buffer) for name, buffer in layer.named_buffers()}}


CASES = {
    "one rank": Sharded((1,), (N,)),
    "samples": Sharded((2,), (N,)),
    "samples, an empty shard": Sharded((3,), (N,), case=replace(CASE, splits=(2,))),
    "rows": Sharded((3,), (H,)),
    "columns, two empty shards": Sharded((4,), (W,)),
    "samples and rows": Sharded((2, 2), (N, H)),
    "samples, with replicas": Sharded((2, 2), (N, R), group="dp"),
    "replicas": Sharded((2,), (R,), group="local"),
    "samples and sharded parameters": Sharded((2,), (N,), parameters=(N,), buffers=(R,)),
    "samples, rows, sharded parameters, replicated buffers": Sharded((2, 2), (N, H), parameters=(R, N), buffers=(R, R)),
    "channels": Sharded((2,), (C,), group="local", parameters=(N,)),
    "samples and channels": Sharded((2, 2), (N, C), group="dp", parameters=(R, N)),
    "channels in evaluation mode": Sharded((2, 2), (H, C), parameters=(R, N), case=replace(CASE, evaluates=True)),
    "momentum=None": Sharded((2,), (H,), parameters=(R,), case=replace(CASE, options={"momentum": None})),
    "no parameters": Sharded((2,), (H,), case=replace(CASE, options={"affine": False})),
}


@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: math.prod(CASES[name].mesh)))
def test_sharded_input_equals_one_process(pool, name):
    sharded = CASES[name]
    for result in pool.run(run, math.prod(sharded.mesh), sharded):
        compare(sharded.case, [result])


def tensor_parallel_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4)).double()


def train_tensor_parallel():
    """Shards parameters over the first mesh dimension, and channels, then samples, over the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = convert_sync_batchnorm(tensor_parallel_model())
    model[1].process_group = mesh["dp"]  # the last layer synchronizes all ranks
    plan = {
        "0": ColwiseParallel(use_local_output=False),
        "3": RowwiseParallel(output_layouts=N, use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], plan)
    place(model[1], mesh["tp"], (N,), (N,))
    place(model[4], mesh["tp"], (R,), (R,))
    fully_shard(model, mesh=mesh["dp"])
    input, grad_output = torch.randn(2, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    own = mesh["dp"].get_local_rank()
    output = model(input.chunk(2)[own])
    (output.full_tensor() * grad_output[:, :4].chunk(2)[own]).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {name: full(value) for name, value in model.state_dict().items()}


def test_fully_shard_and_tensor_parallel_train_like_one_process(pool):
    model = tensor_parallel_model()
    input, grad_output = torch.randn(2, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    model(input).backward(grad_output[:, :4] / 2)  # fully_shard averages over two ranks
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for state in pool.run(train_tensor_parallel, 4):
        torch.testing.assert_close(state, model.state_dict(), rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(2)
def test_second_derivatives_and_memory_format_of_sharded_input():
    """With an activation and a residual, in channels_last."""
    mesh, results = init_device_mesh("cpu", (2,)), []
    case = Case((4,), (3, 6, 5), torch.float64, options={"activation": "silu"})
    whole = [tensor.to(memory_format=torch.channels_last) for tensor in case.batch(0)]
    shards = [
        DTensor.from_local(tensor.chunk(2)[dist.get_rank()], mesh, [N], shape=tensor.shape, stride=tensor.stride())
        for tensor in whole
    ]
    for group, tensors in ((None, shards), (LOCAL, whole)):
        layer = case.layer()
        layer.process_group = group
        input, residual, grad_output = (tensor.detach().requires_grad_() for tensor in tensors)
        output = layer(input, residual)
        assert output.stride() == input.stride()
        if group is None:
            assert output.to_local().stride() == input.to_local().stride()
        (grad,) = torch.autograd.grad(output, input, grad_output, create_graph=True)
        grad.square().sum().backward()
        results.append([full(tensor) for tensor in (output, grad, input.grad, residual.grad, grad_output.grad)])
    torch.testing.assert_close(*results)


class Unknown(LocalCommunicator):
    size = 2


@pytest.mark.ranks(4)
def test_unsupported_sharded_input_raises():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    tensor = torch.randn(4, 3, 4)
    both, rows = distribute_tensor(tensor, mesh, [N, H]), distribute_tensor(tensor, mesh["sp"], [N])
    channels = distribute_tensor(tensor, mesh["sp"], [C])
    vector, wrong = (distribute_tensor(torch.ones(3), mesh, placements) for placements in ([R, R], [R, N]))
    mask, layer = torch.ones(4, 1, 4, dtype=torch.bool), SyncBatchNorm(3)
    of_rows = SyncBatchNorm(3, process_group=mesh["sp"])
    calls = {
        "process_group: expected ranks [0, 1, 2, 3] of the input's mesh": lambda: of_rows(both),
        "are sharded, got ranks [0, 1, 2, 3]": lambda: layer(distribute_tensor(tensor, mesh, [N, R])),
        "are sharded, got ranks []": lambda: SyncBatchNorm(3, process_group=Unknown())(both),
        "running_mean: expected a DTensor if channels of input are sharded": lambda: layer(channels),
        "residual: expected a DTensor of placements": lambda: layer(both, rows),
        "residual: expected a tensor of this rank, as input is": lambda: layer(tensor, rows),
        "weight: expected a DTensor on the input's mesh": lambda: sync_batch_norm(rows, None, None, vector),
        "weight: expected a tensor of this rank, as input is": lambda: sync_batch_norm(tensor, None, None, vector),
        "running_var: expected a DTensor of placements": lambda: sync_batch_norm(both, vector, wrong),
        "mask, lengths: expected None with a DTensor input": lambda: layer(both, mask=mask),
        "input: expected at least 2 dimensions": lambda: layer(vector),
    }
    for message, call in calls.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()
    with masked(layer, mask), pytest.raises(TypeError, match="mask, lengths: expected None"):
        layer(both)
    assert layer.num_batches_tracked == layer.running_mean.abs().sum() == 0


@pytest.mark.ranks(1)
def test_a_dtensor_is_refused_in_replicas():
    mesh = init_device_mesh("cpu", (1,))
    model = DataParallelWithCallback(nn.Sequential(SyncBatchNorm(3, process_group=LOCAL)), ["cpu"] * 2)
    with pytest.raises(TypeError, match=r"^SyncBatchNorm: input: expected a tensor of this process, .* got DTensor"):
        model(distribute_tensor(torch.randn(4, 3), mesh, [R]))
