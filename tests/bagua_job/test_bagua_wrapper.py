"""``with_bagua``, Bagua's own and ours: every algorithm it ships over layers that synchronize."""

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
from own_groups import communicator_of
from streams import timeline
from torch import nn

import bagua_syncbn
from bagua_syncbn.communicators import bagua

ALGORITHMS = ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "async"]
SPLITS = (3, 5)


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2), nn.BatchNorm1d(2))


def batches(steps):
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(steps)]


def step(model, optimizer, batch, share):
    """A step whose gradients, averaged over two ranks, are those of the whole batch."""
    input, target = batch
    optimizer.zero_grad()
    loss = F.mse_loss(model(input[share]), target[share], reduction="sum") * 2 / len(input)
    loss.backward()
    optimizer.step()


def share_of_rank():
    start = sum(SPLITS[: dist.get_rank()])
    return slice(start, start + SPLITS[dist.get_rank()])


def buffers_of(model):
    return [buffer for name, buffer in model.named_buffers() if "num_batches" not in name]


def train(algorithm, own_method):
    # Other weights and statistics on each rank: Bagua and with_bagua bring them together.
    model = make_model(seed=dist.get_rank())
    model[1].running_mean += dist.get_rank()
    optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2) if algorithm == "qadam" else None
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    assert bagua_syncbn.convert_sync_batchnorm(model) is model
    options = {"q_adam_optimizer": optimizer} if algorithm == "qadam" else {}
    if algorithm == "async":
        options = {"sync_interval_ms": 1}
    if own_method:
        wrapped = model.with_bagua([optimizer], Algorithm.init(algorithm, **options))
    elif algorithm == "async":
        wrapped = bagua_syncbn.with_bagua(model, [optimizer], Algorithm.init(algorithm, **options))
    else:
        wrapped = bagua_syncbn.with_bagua(model, [optimizer], algorithm)
    assert wrapped is model
    start = copy.deepcopy(model.state_dict())
    for batch in batches(6):
        step(model, optimizer, batch, share_of_rank())
        if algorithm == "async":
            time.sleep(0.01)  # time for what runs beside
    if algorithm == "async":
        model.bagua_algorithm.abort(model)
        assert model.bagua_buckets[0]._async_op.runs > 0, "nothing ran beside"
    return start, model.state_dict()


@pytest.mark.parametrize("own_method", [True, False], ids=["model.with_bagua", "bagua_syncbn.with_bagua"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_statistics_are_those_of_all_ranks_under_every_algorithm(pool, algorithm, own_method):
    (start, first), (other_start, second) = pool.run(train, 2, algorithm, own_method)
    for name in start:
        if own_method and "running" in name:  # Bagua's method sends parameters only
            continue
        assert torch.equal(start[name], other_start[name]), name
    if not own_method and algorithm != "async":
        for name in ("1.running_mean", "1.running_var", "4.running_mean", "4.running_var"):
            assert torch.equal(first[name], second[name]), name
    assert first["1.num_batches_tracked"] == second["1.num_batches_tracked"] == 6
    if algorithm in ("gradient_allreduce", "bytegrad"):
        check_against_one_process(start, first)
        for name in first:
            assert torch.equal(first[name], second[name]) or (own_method and "running_mean" in name), name


def check_against_one_process(start, trained):
    """These two are exact here: six steps of them are those of one process on all batches."""
    model = make_model().double()
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for input, target in batches(6):
        optimizer.zero_grad()
        F.mse_loss(model(input.double()), target.double(), reduction="sum").div(len(input)).backward()
        optimizer.step()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(trained[name].double(), expected.double(), rtol=1e-4, atol=1e-5)


def wrap_in_group(kind):
    pair = [0, 2] if dist.get_rank() % 2 == 0 else [1, 3]
    if kind == "Bagua":
        group = [communication.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
    else:
        group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
    model = make_model(seed=dist.get_rank())
    bagua_syncbn.convert_sync_batchnorm(model)
    model[4].process_group = dist.group.WORLD  # it has its own
    model[1].running_var += dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua_syncbn.with_bagua(model, [optimizer], "gradient_allreduce", process_group=group)
    assert model[1].process_group is group
    assert model[4].process_group is dist.group.WORLD
    # Made before there are gradients, and buffers sent among the same ranks as these.
    assert {tuple(pair), (0, 1, 2, 3)} <= bagua._communicators.keys()
    assert communicator_of(model[1].process_group).group.ranks == pair
    assert model[1].running_var.tolist() == [1.0 + pair[0]] * 6
    model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    return model[0].weight.detach(), model[0].weight.grad, model[1].running_mean, model[4].running_mean


@pytest.mark.parametrize("kind", ["Bagua", "torch"])
def test_layers_have_the_group_of_the_wrapper(pool, kind):
    results = pool.run(wrap_in_group, 4, kind)
    for first, second in ((0, 2), (1, 3)):
        for mine, theirs in zip(results[first], results[second], strict=True):
            assert torch.equal(mine, theirs)
    for of_pair in range(3):  # weights, gradients, statistics
        assert not torch.equal(results[0][of_pair], results[1][of_pair])
    for result in results:
        assert torch.equal(result[3], results[0][3])


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
    bagua_syncbn.with_bagua(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    step(model, model.bagua_optimizers[0], batches(1)[0], share_of_rank())
    return model.state_dict(), model[3].weight.grad


def test_what_is_to_be_left_out_stays_and_all_other_buffers_are_sent(pool):
    (first, first_grad), (second, second_grad) = pool.run(leave_out, 2)
    differ = {name for name in first if not torch.equal(first[name], second[name])}
    assert differ == {"3.weight", "1.running_var", "4.running_var"}
    assert not torch.equal(first_grad, second_grad)
    assert second["flags"].tolist() == [True, True]
    assert torch.equal(second["wide"], torch.arange(6.0, dtype=torch.float64).view(2, 3).t())


def train_two_models():
    """Interleaved, as a GAN's are; the second in a group of its own."""
    models = [bagua_syncbn.convert_sync_batchnorm(make_model(seed=dist.get_rank())) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    bagua_syncbn.with_bagua(models[0], [optimizers[0]])
    bagua_syncbn.with_bagua(models[1], [optimizers[1]], "bytegrad", communication.new_group())
    start = [copy.deepcopy(model.state_dict()) for model in models]
    for batch in batches(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, batch, share_of_rank())
    return start, [model.state_dict() for model in models]


def test_a_second_model_in_the_same_process_trains_like_one_process(pool):
    results = pool.run(train_two_models, 2)
    for start, trained in zip(*results[0], strict=True):
        check_against_one_process(start, trained)
    for mine, theirs in zip(results[0][1], results[1][1], strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def too_late():
    model = make_model()
    model.with_bagua([torch.optim.SGD(model.parameters(), lr=0.1)], GradientAllReduceAlgorithm())
    inside = make_model()
    wrapper = DistributedDataParallel(inside, optimizers=[torch.optim.SGD(inside.parameters(), lr=0.1)])
    for late in (model, nn.Sequential(model), wrapper, inside, nn.parallel.DistributedDataParallel(make_model())):
        with pytest.raises(RuntimeError, match="convert first, then wrap"):
            bagua_syncbn.convert_sync_batchnorm(late)
    for late in (model, nn.Sequential(model), wrapper, inside):
        with pytest.raises(RuntimeError, match="not data parallel yet"):
            bagua_syncbn.with_bagua(late, [])
    return [type(layer).__name__ for layer in (model[1], inside[1])]


def test_converting_too_late_raises(pool):
    assert pool.run(too_late, 2) == [["BatchNorm1d"] * 2] * 2


def wrap_wrongly():
    model = bagua_syncbn.convert_sync_batchnorm(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = communication.BaguaProcessGroup([1 - dist.get_rank()], None, "others")
    timeline.clear()
    for error, message, arguments in [
        (ValueError, "algorithm: expected one of gradient_allreduce, .*, got 'adam'", ("adam",)),
        (ValueError, "optimizers: expected one QAdamOptimizer, .* got SGD", ("qadam",)),
        (ValueError, "process_group: expected ranks of this job that include this one", (None, others)),
        (TypeError, "process_group: expected .* got float", (None, 2.0)),
        (TypeError, "process_group: expected None, a BaguaProcessGroup or .* got int", (None, 2)),
    ]:
        with pytest.raises(error, match=message):
            bagua_syncbn.with_bagua(model, [optimizer], *arguments)
    with pytest.raises(ValueError, match=r"optimizers: expected one QAdamOptimizer, .* got none"):
        bagua_syncbn.with_bagua(model, [], "qadam")
    with pytest.raises(RuntimeError, match="at least one parameter that requires a gradient"):
        bagua_syncbn.with_bagua(make_model().requires_grad_(False), [])
    assert model[1].process_group is None
    assert not timeline.collectives


def test_wrong_arguments_raise_before_anything_is_sent(pool):
    pool.run(wrap_wrongly, 2)
