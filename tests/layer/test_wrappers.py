"""Whole models over several ranks against one process on the concatenated batch, in each wrapper."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from bagua_syncbn import SyncBatchNorm, SyncBatchNorm2d, convert_sync_batchnorm, recompute_outputs, with_bagua
from bagua_syncbn.communicators import LOCAL, RankGroup
from tests.helpers.training import check, make_batches, make_model, make_optimizer, one_process, through_file, train

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
    check(pool.run(train_ddp, len(sizes), sizes, process_group, options, saved), sizes, "module.")


def accumulate(wrap):
    """Steps of two micro-batches each; without communication after the first."""
    model = convert_sync_batchnorm(make_model())
    model = wrap(model) if wrap else model
    optimizer = make_optimizer(model)
    for inputs, targets in make_batches(8):
        halves = list(zip(inputs.split(4), targets.split(4), strict=True))
        optimizer.zero_grad()
        for index, (input, target) in enumerate(halves):
            if wrap:
                input, target = (part.split((1, 3))[dist.get_rank()] for part in (input, target))
            with model.no_sync() if hasattr(model, "no_sync") and index == 0 else nullcontext():
                loss = (model(input) - target).square().sum() * (2 if wrap else 1) / 8
                loss.backward()
        optimizer.step()
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, partial(with_bagua, optimizers=[])])
def test_accumulated_gradients_equal_one_process(pool, wrap):
    expected = accumulate(None)
    for state in pool.run(accumulate, 2, wrap):
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-9)


# Sharded


def full(state):
    """Whole tensors, and buffers under the names that they have in the model."""
    return {
        name.replace("_fsdp_wrapped_module.", ""): value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in state.items()
    }


def train_fully_shard(prepare=convert_sync_batchnorm):
    model = prepare(make_model())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return full(train(model, make_optimizer(model), (1, 3), dist.get_rank()))


def train_fsdp(wrap_each, prepare=convert_sync_batchnorm):
    policy = ModuleWrapPolicy({nn.Conv2d, SyncBatchNorm2d}) if wrap_each else None
    model = FullyShardedDataParallel(
        prepare(make_model()),
        auto_wrap_policy=policy,
        backward_prefetch=None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    train(model, make_optimizer(model), (1, 3), dist.get_rank())
    with FullyShardedDataParallel.summon_full_params(model):
        return full({name: value.clone() for name, value in model.state_dict(keep_vars=True).items()})


def recomputing(model):
    """Layers follow whose backward needs outputs when the parameters that made them are not there."""
    return recompute_outputs(convert_sync_batchnorm(model))


@pytest.mark.parametrize("prepare", [convert_sync_batchnorm, recomputing])
def test_fully_sharded_models_train_like_one_process(pool, prepare):
    check(pool.run(train_fully_shard, 2, prepare), (1, 3))


FSDP_WARNINGS = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@FSDP_WARNINGS
@pytest.mark.parametrize(
    ("wrap_each", "prepare"), [(False, convert_sync_batchnorm), (True, convert_sync_batchnorm), (True, recomputing)]
)
def test_fsdp_trains_like_one_process(pool, wrap_each, prepare):
    expected = one_process((1, 3))
    for state in pool.run(train_fsdp, 2, wrap_each, prepare):
        for name, value in expected.items():
            torch.testing.assert_close(state[name].view(value.shape), value, rtol=1e-9, atol=1e-9)


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False))


def rows(rank):
    """Whose mean and scale differ from rank to rank, so that unsynchronized outputs are far off."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(16, 4, generator=generator) * (1 + rank) + 4 * rank


def mixed_precision(kind):
    model = convert_sync_batchnorm(small())
    if kind == "fully_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    else:
        precision = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
        policy = ModuleWrapPolicy({nn.Linear}) if kind == "fsdp, layers apart" else None
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            mixed_precision=precision,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    outputs = model(rows(dist.get_rank()))
    outputs.float().square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    last = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)][-1]
    return outputs.detach().float(), last.running_mean.float(), all(bool(g.isfinite().all()) for g in gradients)


@FSDP_WARNINGS
@pytest.mark.parametrize("kind", ["fully_shard", "fsdp", "fsdp, layers apart"])
def test_sharded_models_in_mixed_precision_stay_synchronized(pool, kind):
    reference = small()
    expected = reference(torch.cat([rows(0), rows(1)])).detach()
    unsynchronized = small()(rows(0)).detach()
    assert (unsynchronized - expected[:16]).abs().max() > 0.5
    for rank, (outputs, running_mean, finite) in enumerate(pool.run(mixed_precision, 2, kind)):
        torch.testing.assert_close(outputs, expected[rank * 16 : rank * 16 + 16], rtol=0.03, atol=0.05)
        torch.testing.assert_close(running_mean, reference[3].running_mean, rtol=0.03, atol=0.01)
        assert finite


# with_bagua, on torch


def train_with_bagua(sizes):
    rank = dist.get_rank()
    model = make_model(seed=rank)  # rank 0's parameters are to reach the other ranks
    if rank:
        for buffer in model.buffers():
            buffer.add_(rank)
    module = convert_sync_batchnorm(model)
    optimizer = make_optimizer(module)
    assert with_bagua(module, [optimizer]) is model
    return train(model, optimizer, sizes, rank)


@pytest.mark.parametrize("sizes", [(2, 1, 3)], ids=str)
def test_with_bagua_on_torch_trains_like_one_process(pool, sizes):
    check(pool.run(train_with_bagua, len(sizes), sizes), sizes)


def resume():
    """Only rank 0 has loaded a checkpoint."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if dist.get_rank() == 0:
        model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
    asked = []
    optimizer.register_state_dict_post_hook(lambda *args: asked.append(args))
    with_bagua(model, [optimizer])
    times = len(asked)
    state = optimizer.state_dict()
    return state["param_groups"][0]["lr"], {key: value["exp_avg"] for key, value in state["state"].items()}, times


def test_with_bagua_on_torch_broadcasts_the_optimizer_state(pool):
    (first_rate, first, first_asked), (second_rate, second, second_asked) = pool.run(resume, 2)
    assert (first_asked, second_asked) == (1, 0)  # a copy on the host, of which only the first is sent
    assert first_rate == second_rate == 0.5
    assert first.keys() == second.keys() != set()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "weights", "means"), [
    (2, [0, 0, 2, 2], [0.5, 0.5, 2.5, 2.5]),
    ([[0, 3], [1, 2]], [0, 1, 1, 0], [1.5] * 4),
    ("node", [0] * 4, [1.5] * 4),
    ("ranks", [0, 1, 0, 1], [1, 2, 1, 2]),
    ("mesh", [0] * 4, [1.5] * 4),
], ids=str)  # fmt: skip
def test_with_bagua_on_torch_in_a_group_by_description(kind, weights, means):
    rank = dist.get_rank()
    process_group = RankGroup((rank % 2, rank % 2 + 2)) if kind == "ranks" else kind
    process_group = init_device_mesh("cpu", (4,)) if kind == "mesh" else process_group
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, momentum=1.0))
    nn.init.constant_(model[0].weight, float(rank))
    nn.init.zeros_(model[0].bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(rank))
    with_bagua(convert_sync_batchnorm(model), [optimizer], process_group=process_group)
    # Layers keep the group that a mesh stands for.
    assert model[1].process_group == (process_group.get_group() if kind == "mesh" else process_group)
    assert model[0].weight.item() == weights[rank]
    nn.init.ones_(model[0].weight)
    model(torch.full((2, 1), float(rank))).sum().backward()
    assert model[1].running_mean.item() == means[rank]


@pytest.mark.ranks(2, timeout=20)
def test_evaluation_of_a_wrapped_model_waits_for_nobody():
    """Before any training step, as validation scripts do; rank 1 stays away."""
    model = with_bagua(convert_sync_batchnorm(make_model()), []).eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    dist.barrier()


def test_with_bagua_without_a_job_changes_nothing():
    model = make_model()
    optimizer = make_optimizer(model)
    assert with_bagua(convert_sync_batchnorm(model), [optimizer], "gradient_allreduce") is model
    state = train(model, optimizer, (4,), 0)
    check([state], (4,))


@pytest.mark.parametrize(("optimizers", "process_group", "message"), [
    (torch.optim.SGD([torch.ones(1)]), None, r"optimizers: expected a list of torch\.optim\.Optimizer, got SGD"),
    (["sgd"], None, r"optimizers: expected torch\.optim\.Optimizer objects, got str"),
    ([], "everyone", "process_group: expected"),
])  # fmt: skip
def test_with_bagua_checks_its_arguments(optimizers, process_group, message):
    with pytest.raises(TypeError, match=message):
        with_bagua(make_model(), optimizers, process_group=process_group)


@pytest.mark.ranks(2)
def test_with_bagua_refuses_what_torch_cannot_do_and_changes_nothing():
    with pytest.warns(UserWarning, match="with_bagua: found no synchronized layer in Sequential") as caught:
        model = with_bagua(make_model(), [])
    assert caught[0].filename == __file__
    with pytest.raises(RuntimeError, match="not data parallel yet, got DDPSequential"):
        with_bagua(model, [])
    with pytest.raises(RuntimeError, match="at least one parameter that requires a gradient"):
        with_bagua(make_model().requires_grad_(False), [])
    model = make_model()
    with pytest.raises(TypeError, match=r"process_group: expected None, a torch\.distributed.* got LocalCommunicator"):
        with_bagua(model, [], process_group=LOCAL)
    with pytest.raises(ValueError, match="process_group: expected a number that divides the 2 ranks of the job, got 3"):
        with_bagua(model, [], process_group=3)
    with_bagua(model, [])  # refused, it is as it was
