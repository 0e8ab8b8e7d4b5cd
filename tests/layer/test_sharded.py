"""DTensor input on ranks equals one process on the whole tensor."""

import copy
import math
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, masked, sync_batch_norm
from bagua_syncbn._groups import LOCAL
from tests.helpers.one_rank import Twin
from tests.helpers.steps import draw, step

N, C, H, W, R = Shard(0), Shard(1), Shard(2), Shard(-1), Replicate()


def place(layer, mesh, parameters, buffers):
    """Replaces parameters and buffers with DTensors, like a ``partition_fn`` of distribute_module."""
    for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
        placements = parameters if isinstance(value, nn.Parameter) else buffers
        placed = distribute_tensor(value.detach(), mesh, placements if value.dim() else [R] * mesh.ndim)
        setattr(layer, name, nn.Parameter(placed) if isinstance(value, nn.Parameter) else placed)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(mesh, placements, group=None, parameters=None, buffers=None, samples=5, training=True, order=1, **options):
    """Compares a layer on a mesh with a single process.

    ``group`` is "local", the name of a mesh dimension, or None for all ranks. Tensors without placements are plain.
    """
    mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "sp")[: len(mesh)])
    layer = SyncBatchNorm(3, process_group=LOCAL, **options).double().train(training)
    for seed, tensor in enumerate((*layer.parameters(), layer.running_mean), 3):
        tensor.data.copy_(draw(3, seed=seed))
    input, grad_output = draw(samples, 3, 7, 2), draw(samples, 3, 7, 2, seed=1)
    expected = step(copy.deepcopy(layer), input, grad_output, order=order)
    layer.process_group = LOCAL if group == "local" else group and mesh[group]
    layer = copy.deepcopy(layer)
    if parameters is not None:
        place(layer, mesh, parameters, buffers or parameters)
    input = distribute_tensor(input, mesh, placements)
    results = step(layer, input, distribute_tensor(grad_output, mesh, [R] * mesh.ndim), order=order)
    assert results["output"].placements == results["input.grad"].placements == input.placements
    replicas = math.prod(mesh.size(dim) for dim, placement in enumerate(placements) if placement == R)
    for name, value in results.items():
        if name.endswith(".grad") and not isinstance(value, DTensor):  # a share per rank; replicas have equal shares
            dist.all_reduce(value)
            value /= replicas
    results = {name: full(value) for name, value in results.items()}
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-9)


CASES = {
    "one rank": {"mesh": (1,), "placements": (N,)},
    "samples, an empty shard": {"mesh": (3,), "placements": (N,), "samples": 2},
    "columns, two empty shards": {"mesh": (4,), "placements": (W,)},
    "samples and rows": {"mesh": (2, 2), "placements": (N, H)},
    "samples, with replicas": {"mesh": (2, 2), "placements": (N, R), "group": "dp"},
    "replicas": {"mesh": (2,), "placements": (R,), "group": "local"},
    "sharded parameters": {"mesh": (2,), "placements": (N,), "parameters": (N,), "buffers": (R,)},
    "samples, rows, sharded parameters": {
        "mesh": (2, 2), "placements": (N, H), "parameters": (R, N), "buffers": (R, R)
    },
    "channels": {"mesh": (2,), "placements": (C,), "group": "local", "parameters": (N,)},
    "samples and channels": {"mesh": (2, 2), "placements": (N, C), "group": "dp", "parameters": (R, N)},
    "evaluation": {"mesh": (2, 2), "placements": (H, C), "parameters": (R, N), "training": False},
    "momentum=None": {"mesh": (2,), "placements": (H,), "parameters": (R,), "momentum": None},
    "no parameters": {"mesh": (2,), "placements": (H,), "affine": False},
    "second derivatives": {"mesh": (2,), "placements": (N,), "order": 2, "activation": "silu"},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: math.prod(CASES[name]["mesh"])))
def test_sharded_input_equals_one_process(pool, name):
    pool.run(partial(run, **CASES[name]), math.prod(CASES[name]["mesh"]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("columns", [5, 10])
def test_sharded_input_and_residual_keep_the_memory_format(columns):
    mesh = init_device_mesh("cpu", (2,))
    wide = (draw(4, 3, 6, columns, seed=seed).to(memory_format=torch.channels_last) for seed in range(2))
    input, residual = (whole[..., :5] for whole in wide)  # 5 of 10 columns are not dense
    shards = [
        DTensor.from_local(whole.chunk(2)[dist.get_rank()], mesh, [N], shape=whole.shape, stride=whole.stride())
        for whole in (input, residual)
    ]
    output = SyncBatchNorm(3).double()(*shards)
    assert output.stride() == torch.empty_like(input).stride()
    assert output.to_local().stride() == torch.empty_like(shards[0].to_local()).stride()
    torch.testing.assert_close(full(output), SyncBatchNorm(3, process_group=LOCAL).double()(input, residual))


@pytest.mark.ranks(4)
def test_fully_shard_and_tensor_parallel_train_like_one_process():
    """Shards parameters over "dp", and activations over "tp": by channels first, by samples in the last layer."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layers = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4)
    plain = nn.Sequential(*layers).double()
    model = convert_sync_batchnorm(copy.deepcopy(plain))
    model[1].process_group = mesh["dp"]  # the last layer synchronizes all ranks
    plan = {
        "0": ColwiseParallel(use_local_output=False),
        "3": RowwiseParallel(output_layouts=N, use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], plan)
    place(model[1], mesh["tp"], (N,), (N,))
    place(model[4], mesh["tp"], (R,), (R,))
    fully_shard(model, mesh=mesh["dp"])
    own, input, grad_output = mesh["dp"].get_local_rank(), draw(12, 6), draw(12, 4, seed=1)
    (model(input.chunk(2)[own]).full_tensor() * grad_output.chunk(2)[own]).sum().backward()
    plain(input).backward(grad_output / 2)  # fully_shard averages over two ranks
    for each in (model, plain):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    state = {name: full(value) for name, value in model.state_dict().items()}
    torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-9, atol=1e-9)


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
        "process_group: expected ranks [0, 1, 2, 3], which share the samples and positions": lambda: of_rows(both),
        "positions of this input, got ranks [0, 1, 2, 3]": lambda: layer(distribute_tensor(tensor, mesh, [N, R])),
        "positions of this input, got ranks []": lambda: SyncBatchNorm(3, process_group=Twin())(both),
        "running_mean: expected a DTensor if channels of input are sharded": lambda: layer(channels),
        "residual: expected a DTensor with placements": lambda: layer(both, rows),
        "residual: expected a plain tensor, like input": lambda: layer(tensor, rows),
        "weight: expected a DTensor on the input's mesh": lambda: sync_batch_norm(rows, None, None, vector),
        "weight: expected a plain tensor, like input": lambda: sync_batch_norm(tensor, None, None, vector),
        "running_var: expected a DTensor with placements": lambda: sync_batch_norm(both, vector, wrong),
        "mask: expected None with a DTensor input": lambda: layer(both, mask=mask),
        "input: expected at least 2 dimensions": lambda: layer(vector),
    }
    for message, call in calls.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()
    with masked(layer, mask), pytest.raises(TypeError, match="mask: expected None"):
        layer(both)
    assert layer.num_batches_tracked == layer.running_mean.abs().sum() == 0
