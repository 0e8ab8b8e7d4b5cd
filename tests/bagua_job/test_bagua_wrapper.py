"""Bagua's ``with_bagua`` and ours: all algorithms with synchronized layers."""

import copy
import time

import bagua.torch_api.communication as communication
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel
from torch import nn

import bagua_syncbn
from bagua_syncbn.communicators import bagua
from tests.bagua_job.native import log
from tests.helpers.own_groups import communicator_of

ALGORITHMS = ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "async"]
SPLITS = (3, 5)


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2), nn.BatchNorm1d(2))


def make_optimizer(model, algorithm="gradient_allreduce"):
    if algorithm == "qadam":
        return QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_algorithm(name, optimizer):
    options = {"qadam": {"q_adam_optimizer": optimizer}, "async": {"sync_interval_ms": 1}}
    return Algorithm.init(name, **options.get(name, {}))


def batches(steps):
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(steps)]


def step(model, optimizer, batch):
    """Runs a step whose gradients, averaged over two ranks, equal those of the whole batch."""
    input, target = (part.split(SPLITS)[dist.get_rank()] for part in batch)
    optimizer.zero_grad()
    (F.mse_loss(model(input), target, reduction="sum") * 2 / len(batch[0])).backward()
    optimizer.step()


def check_against_one_process(start, trained):
    """Compares six steps of an exact algorithm with one process on the whole batches."""
    model = make_model().double()
    model.load_state_dict(start)
    optimizer = make_optimizer(model)
    for input, target in batches(6):
        optimizer.zero_grad()
        F.mse_loss(model(input.double()), target.double(), reduction="sum").div(len(input)).backward()
        optimizer.step()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(trained[name].double(), expected.double(), rtol=1e-4, atol=1e-5)


def train(algorithm, own_method):
    # Different weights and statistics on each rank, which Bagua and with_bagua broadcast.
    model = make_model(seed=dist.get_rank())
    model[1].running_mean += dist.get_rank()
    optimizer = make_optimizer(model, algorithm)
    assert bagua_syncbn.convert_sync_batchnorm(model) is model
    if own_method:
        wrapped = model.with_bagua([optimizer], make_algorithm(algorithm, optimizer))
    else:  # by name, except for the one that needs an option here
        given = make_algorithm(algorithm, optimizer) if algorithm == "async" else algorithm
        wrapped = bagua_syncbn.with_bagua(model, [optimizer], given)
    assert wrapped is model
    start = copy.deepcopy(model.state_dict())
    for batch in batches(6):
        step(model, optimizer, batch)
        if algorithm == "async":
            time.sleep(0.01)  # time for the averages in the background
    if algorithm == "async":
        model.bagua_algorithm.abort(model)
        assert model.bagua_buckets[0]._async_op.call_count > 0, "nothing ran in the background"
    return start, model.state_dict()


@pytest.mark.parametrize("own_method", [True, False], ids=["model.with_bagua", "bagua_syncbn.with_bagua"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains_synchronized_layers(pool, algorithm, own_method):
    (start, first), (other_start, second) = pool.run(train, 2, algorithm, own_method)
    for name in start:
        if not (own_method and "running" in name):  # Bagua's method sends parameters only
            assert torch.equal(start[name], other_start[name]), name
        if not own_method and algorithm != "async" and "running" in name:
            assert torch.equal(first[name], second[name]), name
    assert first["1.num_batches_tracked"] == second["1.num_batches_tracked"] == 6
    if algorithm in ("gradient_allreduce", "bytegrad"):
        check_against_one_process(start, first)
        for name in first:
            assert torch.equal(first[name], second[name]) or (own_method and "running_mean" in name), name


def wrap_in_group(kind):
    rank = dist.get_rank()
    pair = [rank % 2, rank % 2 + 2]
    new_group = communication.new_group if kind == "Bagua" else dist.new_group
    group = [new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    model = bagua_syncbn.convert_sync_batchnorm(make_model(seed=rank))
    model[4].process_group = dist.group.WORLD  # keeps it
    model[1].running_var += rank
    bagua_syncbn.with_bagua(model, [make_optimizer(model)], "gradient_allreduce", process_group=group)
    assert model[1].process_group is group
    assert model[4].process_group is dist.group.WORLD
    # Communicators exist before the first gradient, and buffers are broadcast among the same ranks.
    assert {tuple(pair), (0, 1, 2, 3)} <= bagua._communicators.keys()
    assert communicator_of(model[1].process_group).group.ranks == pair
    assert model[1].running_var.tolist() == [1.0 + pair[0]] * 6
    model(torch.full((2, 4), float(rank))).sum().backward()
    return model[0].weight.detach(), model[0].weight.grad, model[1].running_mean, model[4].running_mean


@pytest.mark.parametrize("kind", ["Bagua", "torch"])
def test_layers_get_the_group_of_the_wrapper(pool, kind):
    results = pool.run(wrap_in_group, 4, kind)
    for rank, result in enumerate(results):  # weights, gradients and statistics of the pair, statistics of all
        same = [torch.equal(one, other) for one, other in zip(result, results[rank - 2], strict=True)]
        others = [torch.equal(one, other) for one, other in zip(result, results[rank - 1], strict=True)]
        assert (same, others) == ([True] * 4, [False, False, False, True])


def leave_out():
    rank = dist.get_rank()
    model = bagua_syncbn.convert_sync_batchnorm(make_model(seed=rank))
    for layer in (model[1], model[4]):
        layer.running_var += rank
    model._bagua_params_and_buffers_to_ignore = ["3.weight", "4.running_var"]
    model._ddp_params_and_buffers_to_ignore = ["1.running_var"]
    model.register_buffer("flags", torch.tensor([rank == 0, True]))
    model.register_buffer("nothing", torch.empty(0))
    model.register_buffer("wide", torch.arange(6.0, dtype=torch.float64).view(2, 3).t() + rank)
    bagua_syncbn.with_bagua(model, [make_optimizer(model)])
    step(model, model.bagua_optimizers[0], batches(1)[0])
    return model.state_dict(), model[3].weight.grad


def test_buffers_are_broadcast_unless_ignored(pool):
    (first, first_grad), (second, second_grad) = pool.run(leave_out, 2)
    differ = {name for name in first if not torch.equal(first[name], second[name])}
    assert differ == {"3.weight", "1.running_var", "4.running_var"}
    assert not torch.equal(first_grad, second_grad)
    assert second["flags"].tolist() == [True, True]
    assert torch.equal(second["wide"], torch.arange(6.0, dtype=torch.float64).view(2, 3).t())


@pytest.mark.ranks(2)
def test_a_second_model_in_the_same_process_trains_like_one_process():
    """The steps are interleaved, as in a GAN, and the second model has a separate group."""
    models = [bagua_syncbn.convert_sync_batchnorm(make_model(seed=dist.get_rank())) for _ in range(2)]
    optimizers = [make_optimizer(model) for model in models]
    bagua_syncbn.with_bagua(models[0], [optimizers[0]])
    bagua_syncbn.with_bagua(models[1], [optimizers[1]], "bytegrad", communication.new_group())
    starts = [copy.deepcopy(model.state_dict()) for model in models]
    for batch in batches(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, batch)
    for start, model in zip(starts, models, strict=True):
        check_against_one_process(start, model.state_dict())


@pytest.mark.ranks(2)
def test_converting_after_wrapping_raises():
    model, inside = make_model(), make_model()
    model.with_bagua([make_optimizer(model)], GradientAllReduceAlgorithm())
    wrapper = DistributedDataParallel(inside, optimizers=[make_optimizer(inside)])
    wrapped = model, nn.Sequential(model), wrapper, inside
    for late in (*wrapped, nn.parallel.DistributedDataParallel(make_model())):
        with pytest.raises(RuntimeError, match="convert first, then wrap"):
            bagua_syncbn.convert_sync_batchnorm(late)
    for late in wrapped:
        with pytest.raises(RuntimeError, match="not data parallel yet"):
            bagua_syncbn.with_bagua(late, [])
    assert type(model[1]) is type(inside[1]) is nn.BatchNorm1d


@pytest.mark.ranks(2)
def test_wrong_arguments_raise_before_any_message():
    model = bagua_syncbn.convert_sync_batchnorm(make_model())
    optimizers = [make_optimizer(model)]
    others = communication.BaguaProcessGroup([1 - dist.get_rank()], None, "others")
    log.clear()
    for error, message, arguments in [
        (ValueError, "algorithm: expected one of gradient_allreduce, .*, got 'adam'", (optimizers, "adam")),
        (ValueError, "optimizers: expected one QAdamOptimizer, .* got SGD", (optimizers, "qadam")),
        (ValueError, "optimizers: expected one QAdamOptimizer, .* got none", ([], "qadam")),
        (ValueError, "process_group: expected ranks of this job that include this one", (optimizers, None, others)),
        (TypeError, "process_group: expected .* got float", (optimizers, None, 2.0)),
        (TypeError, "process_group: expected None, a BaguaProcessGroup or .* got int", (optimizers, None, 2)),
    ]:
        with pytest.raises(error, match=message):
            bagua_syncbn.with_bagua(model, *arguments)
    with pytest.raises(RuntimeError, match="at least one parameter that requires a gradient"):
        bagua_syncbn.with_bagua(make_model().requires_grad_(False), [])
    assert model[1].process_group is None
    assert not log
