"""DTensor input on ranks against torch's batch norm in one process on the whole tensor."""

import math
import re
from dataclasses import dataclass

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
from tests.helpers.tolerances import assert_close

N, C, H, W, R = Shard(0), Shard(1), Shard(2), Shard(-1), Replicate()


@dataclass(frozen=True)
class Case:
    """One layer on a mesh."""

    mesh: tuple[int, ...]
    placements: tuple
    group: str | None = None  # "local", or names of a dimension of the mesh; None for all ranks
    parameters: tuple | None = None  # placements of parameters; None for those that each rank has
    buffers: tuple | None = None
    shape: tuple[int, ...] = (5, 3, 7, 2)
    training: bool = True
    options: tuple = ()

    def layer(self, dtype=torch.float64):
        torch.manual_seed(1)
        layer = SyncBatchNorm(self.shape[1], dtype=dtype, **dict(self.options))
        with torch.no_grad():
            for tensor in (*layer.parameters(), layer.running_mean):
                tensor.normal_()
        return layer.train(self.training)

    def tensor(self, seed):
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def place(layer, mesh, parameters, buffers):
    """Makes DTensors of parameters and buffers, as a partition function of distribute_module does it."""
    for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
        placements = parameters if isinstance(value, nn.Parameter) else buffers
        placed = distribute_tensor(value.detach(), mesh, placements if value.dim() else [R] * mesh.ndim)
        setattr(layer, name, nn.Parameter(placed) if isinstance(value, nn.Parameter) else placed)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(case):
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=("dp", "sp")[: len(case.mesh)])
    layer = case.layer()
    layer.process_group = LOCAL if case.group == "local" else case.group and mesh[case.group]
    if case.parameters is not None:
        place(layer, mesh, case.parameters, case.buffers or case.parameters)
    input = distribute_tensor(case.tensor(2), mesh, case.placements).requires_grad_()
    output = layer(input)
    assert output.placements == input.placements
    assert output.to_local().stride() == input.to_local().stride()
    output.backward(distribute_tensor(case.tensor(3), mesh, [R] * len(case.mesh)))
    grads = []
    for parameter in layer.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            assert grad.placements == parameter.placements
        else:  # the share of this rank, which replicas share
            dist.all_reduce(grad)
            grad /= math.prod(size for size, placed in zip(case.mesh, case.placements, strict=True) if placed == R)
        grads.append(full(grad))
    assert input.grad.placements == input.placements
    return full(output).detach(), full(input.grad), grads, [full(buffer) for buffer in layer.buffers()]


def reference(case):
    layer, input = case.layer(), case.tensor(2).requires_grad_()
    alone = nn.BatchNorm2d(case.shape[1], **dict(case.options)).double().train(case.training)
    alone.load_state_dict(layer.state_dict())
    output = alone(input)
    output.backward(case.tensor(3))
    return output.detach(), input.grad, [p.grad for p in alone.parameters()], list(alone.buffers())


CASES = {
    "one rank": Case((1,), (N,)),
    "samples": Case((2,), (N,)),
    "samples, of which one rank has none": Case((3,), (N,), shape=(2, 3, 4, 2)),
    "rows": Case((3,), (H,)),
    "columns, of which two ranks have none": Case((4,), (W,)),
    "samples and rows": Case((2, 2), (N, H)),
    "samples, with replicas": Case((2, 2), (N, R), group="dp"),
    "replicas": Case((2,), (R,), group="local"),
    "samples beside sharded parameters": Case((2,), (N,), parameters=(N,), buffers=(R,)),
    "samples and rows beside both": Case((2, 2), (N, H), parameters=(R, N), buffers=(R, R)),
    "channels": Case((2,), (C,), group="local", parameters=(N,)),
    "samples and channels": Case((2, 2), (N, C), group="dp", parameters=(R, N)),
    "evaluation of channels": Case((2, 2), (H, C), parameters=(R, N), training=False),
    "momentum=None": Case((2,), (H,), parameters=(R,), options=(("momentum", None),)),
    "no parameters": Case((2,), (H,), options=(("affine", False),)),
}


@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: math.prod(CASES[name].mesh)))
def test_sharded_input_equals_one_process(pool, name):
    case = CASES[name]
    output, input_grad, grads, buffers = reference(case)
    for result in pool.run(run, math.prod(case.mesh), case):
        assert_close(result[0], output, "output")
        assert_close(result[1], input_grad, "gradient of input")
        for actual, expected in zip((*result[2], *result[3]), (*grads, *buffers), strict=True):
            assert_close(actual.double(), expected.double(), "gradients of parameters, and buffers")


def tensor_parallel_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4)).double()


def train_tensor_parallel():
    """Two dimensions of a mesh: fully_shard over one, channels and then samples sharded over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = convert_sync_batchnorm(tensor_parallel_model())
    model[1].process_group = mesh["dp"]  # the last layer's is all ranks
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


def data(shape=(5, 3, 6, 4)):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(memory_format=CL) for _ in range(3)]


CL = torch.channels_last


def step(layer, tensors):
    """Returns output, and the gradient of the norm of the gradient, with an activation and a residual."""
    input, residual, grad_output = (tensor.detach().requires_grad_() for tensor in tensors)
    output = layer(input, residual)
    (grad,) = torch.autograd.grad(output, input, grad_output, create_graph=True)
    grad.square().sum().backward()
    return [full(tensor).detach() for tensor in (output, grad, input.grad, residual.grad, grad_output.grad)]


def run_step():
    mesh = init_device_mesh("cpu", (2,))
    layer = SyncBatchNorm(3, activation="silu", dtype=torch.float64)
    tensors = [
        DTensor.from_local(tensor.chunk(2)[dist.get_rank()], mesh, [N], shape=tensor.shape, stride=tensor.stride())
        for tensor in data()
    ]
    output = layer(*tensors[:2])
    assert output.to_local().is_contiguous(memory_format=CL)
    assert output.stride() == tensors[0].stride()
    return step(layer, tensors)


def test_double_backward_with_activation_and_residual_of_sharded_input(pool):
    layer = nn.BatchNorm2d(3).double()
    expected = step(lambda input, residual: nn.functional.silu(layer(input) + residual), data())
    for result in pool.run(run_step, 2):
        for actual, wanted in zip(result, expected, strict=True):
            assert_close(actual, wanted, "output or gradient")


class Unknown(LocalCommunicator):
    size = 2


@pytest.mark.ranks(4)
def test_sharded_input_that_has_no_right_result_is_refused_by_name():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    tensor = torch.randn(4, 3, 4)
    both, rows = distribute_tensor(tensor, mesh, [N, H]), distribute_tensor(tensor, mesh["sp"], [N])
    channels = distribute_tensor(tensor, mesh["sp"], [C])
    vector, wrong = (distribute_tensor(torch.ones(3), mesh, placements) for placements in ([R, R], [R, N]))
    mask, layer = torch.ones(4, 1, 4, dtype=torch.bool), SyncBatchNorm(3)
    of_rows = SyncBatchNorm(3, process_group=mesh["sp"])
    calls = {
        "process_group: expected ranks [0, 1, 2, 3] of the mesh": lambda: of_rows(both),
        "are sharded, got ranks [0, 1, 2, 3]": lambda: layer(distribute_tensor(tensor, mesh, [N, R])),
        "process_group: expected a group whose ranks": lambda: SyncBatchNorm(3, process_group=Unknown())(both),
        "running_mean: expected a DTensor with an input that is sharded over channels": lambda: layer(channels),
        "residual: expected a DTensor placed as input": lambda: layer(both, rows),
        "residual: expected a tensor of this rank, as input is": lambda: layer(tensor, rows),
        "weight: expected a DTensor on the mesh of input": lambda: sync_batch_norm(rows, None, None, vector),
        "weight: expected a tensor of this rank, as input is": lambda: sync_batch_norm(tensor, None, None, vector),
        "running_var: expected a DTensor of placements": lambda: sync_batch_norm(both, vector, wrong),
        "mask, lengths: expected none with a DTensor input": lambda: layer(both, mask=mask),
        "input: expected at least 2 dimensions": lambda: layer(vector),
    }
    for message, call in calls.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()
    with masked(layer, mask), pytest.raises(TypeError, match="mask, lengths: expected none"):
        layer(both)
    assert layer.num_batches_tracked == layer.running_mean.abs().sum() == 0
