"""Models in data parallel and sharded wrappers train like one process on the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from bagua_syncbn import SyncBatchNorm, SyncBatchNorm2d, convert_sync_batchnorm, recompute_outputs, with_bagua
from bagua_syncbn.communicators import LOCAL, RankGroup
from tests.helpers.steps import check_training, draw, gathered, make_model, make_optimizer, through_file, train

# DistributedDataParallel


def train_ddp(sizes, process_group, options, saved):
    model = convert_sync_batchnorm(make_model(), process_group)
    model = nn.parallel.DistributedDataParallel(model, **options)
    model = through_file(model) if saved else model
    return train(model, make_optimizer(model), sizes, dist.get_rank())


@pytest.mark.parametrize(("sizes", "process_group", "options", "saved"), [
    ((2, 0, 3), None, {}, False),
    ((1, 3), None, {"static_graph": True}, True),
    ((1, 3), "node", {"broadcast_buffers": False, "find_unused_parameters": True}, False),
], ids=str)  # fmt: skip
def test_ddp_trains_like_one_process(pool, sizes, process_group, options, saved):
    check_training(pool.run(train_ddp, len(sizes), sizes, process_group, options, saved), sizes, "module.")


# Sharded


def shard(kind, model, dtype=None):
    """Returns ``model`` in a wrapper that computes in ``dtype``."""
    if kind == "fully_shard":
        options = {"mesh": init_device_mesh("cpu", (2,)), "mp_policy": MixedPrecisionPolicy(dtype)}
        for layer in model:
            if isinstance(layer, nn.Conv2d):
                fully_shard(layer, **options)
        return fully_shard(model, **options)
    options = {"backward_prefetch": None, "device_id": torch.device("cpu"), "use_orig_params": True}
    if kind == "fsdp, layers apart":
        options["auto_wrap_policy"] = ModuleWrapPolicy({nn.Linear, nn.Conv2d, SyncBatchNorm2d})
    precision = MixedPrecision(dtype, dtype, dtype) if dtype else None
    return FullyShardedDataParallel(model, mixed_precision=precision, **options)


def recomputing(model):
    """Backward recomputes outputs after the gathered parameters have been freed."""
    return recompute_outputs(convert_sync_batchnorm(model))


SHARDED = pytest.mark.parametrize("kind", ["fully_shard", "fsdp", "fsdp, layers apart"])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("prepare", [convert_sync_batchnorm, recomputing])
@SHARDED
def test_sharded_models_train_like_one_process(kind, prepare):
    model = shard(kind, prepare(make_model()))
    state = {
        name.replace("_fsdp_wrapped_module.", ""): value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in train(model, make_optimizer(model), (1, 3), dist.get_rank()).items()
    }
    check_training([state], (1, 3))


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.ranks(2)
@SHARDED
def test_sharded_models_in_mixed_precision_stay_synchronized(kind):
    rank, reference = dist.get_rank(), small()
    rows = [draw(16, 4, seed=seed, dtype=torch.float32) * (1 + seed) + 4 * seed for seed in range(2)]
    model = shard(kind, convert_sync_batchnorm(small()), torch.bfloat16)
    outputs = model(rows[rank])
    outputs.float().square().sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    torch.testing.assert_close(outputs.float(), reference(torch.cat(rows)).chunk(2)[rank], rtol=0.03, atol=0.05)
    *_, last = (layer for layer in model.modules() if isinstance(layer, SyncBatchNorm))
    torch.testing.assert_close(last.running_mean.float(), reference[3].running_mean, rtol=0.03, atol=0.01)


# Setup by with_bagua over torch. test_contrib.py tests training.


@pytest.mark.ranks(2)
def test_with_bagua_on_torch_broadcasts_the_optimizer_state():
    """Only rank 0 has loaded a checkpoint."""
    rank, model, asked = dist.get_rank(), make_model(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if rank == 0:
        model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
    optimizer.register_state_dict_post_hook(lambda *args: asked.append(args))
    with_bagua(model, [optimizer])
    assert len(asked) == (rank == 0)  # only rank 0 copies its state to the host
    assert optimizer.param_groups[0]["lr"] == 0.5
    for name in ("exp_avg", "exp_avg_sq"):
        for parameter in model.parameters():
            first, second = gathered(optimizer.state[parameter][name])
            assert torch.equal(first, second)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "weights", "means"), [
    (2, [0, 0, 2, 2], [0.5, 0.5, 2.5, 2.5]),
    ([[0, 3], [1, 2]], [0, 1, 1, 0], [1.5] * 4),
    ("node", [0] * 4, [1.5] * 4),
    ("ranks", [0, 1, 0, 1], [1, 2, 1, 2]),
    ("mesh", [0] * 4, [1.5] * 4),
], ids=str)  # fmt: skip
def test_with_bagua_on_torch_accepts_descriptions_of_groups(kind, weights, means):
    rank = dist.get_rank()
    process_group = RankGroup((rank % 2, rank % 2 + 2)) if kind == "ranks" else kind
    process_group = init_device_mesh("cpu", (4,)) if kind == "mesh" else process_group
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, momentum=1.0))
    nn.init.constant_(model[0].weight, float(rank))
    nn.init.zeros_(model[0].bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(rank))
    with_bagua(convert_sync_batchnorm(model), [optimizer], process_group=process_group)
    assert optimizer.param_groups[0]["lr"] == rank  # an optimizer without a state keeps its options
    # Layers keep the group that a mesh describes.
    assert model[1].process_group == (process_group.get_group() if kind == "mesh" else process_group)
    assert model[0].weight.item() == weights[rank]
    nn.init.ones_(model[0].weight)
    model(torch.full((2, 1), float(rank))).sum().backward()
    assert model[1].running_mean.item() == means[rank]


@pytest.mark.ranks(2)
def test_with_bagua_on_torch_raises_on_all_ranks_for_a_buffer_that_cannot_be_sent():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("conjugate", torch.ones(2, dtype=torch.complex64).conj())
    with pytest.raises(RuntimeError, match="conjugate"):
        with_bagua(model, [])


@pytest.mark.ranks(2)
def test_with_bagua_raises_for_unsupported_arguments_on_torch():
    with pytest.warns(UserWarning, match="with_bagua: found no synchronized layer in Sequential") as caught:
        wrapped = with_bagua(make_model(), [])
    assert caught[0].filename == __file__
    model, frozen = make_model(), make_model().requires_grad_(False)
    sgd = make_optimizer(model)
    for error, message, module, optimizers, process_group in [
        (TypeError, r"optimizers: expected a list of torch\.optim\.Optimizer, got SGD$", model, sgd, None),
        (TypeError, r"optimizers: expected a list of torch\.optim\.Optimizer, got \[SGD, 1\]$", model, [sgd, 1], None),
        (TypeError, "process_group: expected .*, got SGD$", model, [], sgd),
        (TypeError, r"process_group: expected None, a torch\.distributed.* got LocalCommunicator", model, [], LOCAL),
        (ValueError, "expected a divisor of the job's 2 ranks, got 3", model, [], 3),
        (RuntimeError, "not data parallel yet, got DDPSequential", wrapped, [], None),
        (RuntimeError, "at least one parameter that requires a gradient", frozen, [], None),
    ]:
        with pytest.raises(error, match=message):
            with_bagua(module, optimizers, process_group=process_group)
    with_bagua(model, [])  # unchanged after the error
