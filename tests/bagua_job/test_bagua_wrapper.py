"""Bagua's ``with_bagua`` and ours: all algorithms with synchronized layers."""

import time

import bagua.torch_api.communication as communication
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel
from torch import nn

import bagua_syncbn
from bagua_syncbn._groups import spec_of
from tests.bagua_job.native import log
from tests.helpers import steps
from tests.helpers.own_groups import communicator_of

ALGORITHMS = ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "async"]
EXACT = ["gradient_allreduce", "bytegrad"]
SPLITS = (3, 5)


def make_model(seed=0):
    """Returns a float32 model, because Bagua does not support float64, with different buffers for each seed."""
    model = steps.make_model(seed).float()
    model[1].running_mean += seed
    return model


def make_optimizer(model, algorithm="gradient_allreduce"):
    if algorithm == "qadam":
        return QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    return steps.make_optimizer(model)


def make_algorithm(name, optimizer):
    options = {"qadam": {"q_adam_optimizer": optimizer}, "async": {"sync_interval_ms": 1}}
    return Algorithm.init(name, **options.get(name, {}))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("own_method", [True, False], ids=["model.with_bagua", "bagua_syncbn.with_bagua"])
@pytest.mark.parametrize("algorithm", [*EXACT, "qadam", "async"])
def test_algorithms_train_synchronized_layers(algorithm, own_method):
    """Trains from different weights and statistics on each rank, which ``with_bagua`` broadcasts."""
    model = bagua_syncbn.convert_sync_batchnorm(make_model(dist.get_rank()))
    optimizer = make_optimizer(model, algorithm)
    if own_method:  # does not broadcast buffers
        model[1].running_mean.zero_()
        wrapped = model.with_bagua([optimizer], make_algorithm(algorithm, optimizer))
    else:  # algorithms without options are passed by name
        given = algorithm if algorithm in EXACT else make_algorithm(algorithm, optimizer)
        wrapped = bagua_syncbn.with_bagua(model, [optimizer], given)
    assert wrapped is model
    state = steps.train(model, optimizer, SPLITS, dist.get_rank())
    if algorithm == "async":
        time.sleep(0.05)  # time for averaging in the background
        model.bagua_algorithm.abort(model)
        assert model.bagua_buckets[0]._async_op.call_count > 0, "nothing ran in the background"
    states = steps.gathered(state)
    assert state["1.num_batches_tracked"] == steps.STEPS
    if algorithm in EXACT:
        steps.check_training(states, SPLITS, tolerance=1e-4)
    if algorithm != "async":
        assert torch.equal(states[0]["1.running_mean"], states[1]["1.running_mean"])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["Bagua", "torch"])
def test_layers_get_the_group_of_the_wrapper(kind):
    rank = dist.get_rank()
    pair = [rank % 2, rank % 2 + 2]
    new_group = communication.new_group if kind == "Bagua" else dist.new_group
    group = [new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    model = bagua_syncbn.convert_sync_batchnorm(make_model(rank))
    model[4].process_group = dist.group.WORLD  # keeps it
    bagua_syncbn.with_bagua(model, [make_optimizer(model)], "gradient_allreduce", process_group=group)
    assert model[1].process_group is group
    assert model[4].process_group is dist.group.WORLD
    # Communicators are created before the first gradient, and buffers are broadcast among the same ranks.
    assert all(spec_of(model[index].process_group).communicator_if_ready() for index in (1, 4))
    assert communicator_of(model[1].process_group).group.ranks == pair
    assert model[1].running_mean.tolist() == [pair[0]] * 6
    model(torch.full((2, 3, 8, 8), float(rank))).sum().backward()
    # The first three are equal in the pair of ranks, the last on all ranks.
    own = model[0].weight.detach(), model[0].weight.grad, model[1].running_mean, model[4].running_mean
    results = steps.gathered(own)
    assert [torch.equal(one, other) for one, other in zip(own, results[rank - 2], strict=True)] == [True] * 4
    others = [torch.equal(one, other) for one, other in zip(own, results[rank - 1], strict=True)]
    assert others == [False, False, False, True]


@pytest.mark.ranks(2)
def test_buffers_are_broadcast_unless_ignored():
    rank = dist.get_rank()
    model = bagua_syncbn.convert_sync_batchnorm(make_model(rank))
    for layer in (model[1], model[4]):
        layer.running_var += rank
    model._bagua_params_and_buffers_to_ignore = ["6.weight", "4.running_var"]
    model._ddp_params_and_buffers_to_ignore = ["1.running_var"]
    model.register_buffer("flags", torch.tensor([rank == 0, True]))
    model.register_buffer("nothing", torch.empty(0))
    model.register_buffer("wide", torch.arange(6.0, dtype=torch.float64).view(2, 3).t() + rank)
    bagua_syncbn.with_bagua(model, [make_optimizer(model)])
    first, second = steps.gathered(model.state_dict())
    assert {name for name in first if not torch.equal(first[name], second[name])} == {
        "6.weight", "1.running_var", "4.running_var",
    }  # fmt: skip
    assert second["flags"].tolist() == [True, True]
    assert torch.equal(second["wide"], torch.arange(6.0, dtype=torch.float64).view(2, 3).t())


@pytest.mark.ranks(2)
def test_converting_after_wrapping_raises():
    model, inside = make_model(), make_model()
    model.with_bagua([make_optimizer(model)], GradientAllReduceAlgorithm())
    wrapper = DistributedDataParallel(inside, optimizers=[make_optimizer(inside)])
    for late in (model, nn.Sequential(model), wrapper, inside):
        with pytest.raises(RuntimeError, match="convert first, then wrap"):
            bagua_syncbn.convert_sync_batchnorm(late)
        with pytest.raises(RuntimeError, match="not data parallel yet"):
            bagua_syncbn.with_bagua(late, [])
    assert type(model[1]) is type(inside[1]) is nn.BatchNorm2d


@pytest.mark.ranks(2)
def test_wrong_arguments_raise_before_any_message():
    model = bagua_syncbn.convert_sync_batchnorm(make_model())
    optimizers = [make_optimizer(model)]
    others = communication.BaguaProcessGroup([1 - dist.get_rank()], None, "others")
    log.clear()
    for error, message, arguments in [
        (KeyError, "adam", (optimizers, "adam")),
        (ValueError, "process_group: expected ranks of this job that include this one", (optimizers, None, others)),
        (TypeError, "process_group: expected .* got 2.0", (optimizers, None, 2.0)),
        (TypeError, "process_group: expected None, a BaguaProcessGroup or .* got 2", (optimizers, None, 2)),
    ]:
        with pytest.raises(error, match=message):
            bagua_syncbn.with_bagua(model, *arguments)
    with pytest.raises(RuntimeError, match="at least one parameter that requires a gradient"):
        bagua_syncbn.with_bagua(make_model().requires_grad_(False), [])
    assert model[1].process_group is None
    assert not log
