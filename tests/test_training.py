"""Whole models over several ranks against one process on the concatenated batch, in each wrapper."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import bagua_syncbn
from bagua_syncbn.communicators import LOCAL, RankGroup

STEPS = 5
SIZES = (2, 1, 3)


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(4 * 16, 5),
        nn.BatchNorm1d(5),
    ).double()


def make_batches(size):
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield (
            torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64),
            torch.randn(size, 5, generator=generator, dtype=torch.float64),
        )


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, sizes, rank):
    """Returns the state after training on this rank's share; the loss is such that DDP's mean is the batch's mean."""
    for inputs, targets in make_batches(sum(sizes)):
        input, target = inputs.split(sizes)[rank], targets.split(sizes)[rank]
        loss = (model(input) - target).square().sum() * len(sizes) / inputs.size(0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


def one_process(sizes):
    model = make_model()
    return train(model, make_optimizer(model), (sum(sizes),), 0)


def check(states, sizes, prefix=""):
    expected = one_process(sizes)
    for rank, state in enumerate(states):
        assert set(state) == {prefix + name for name in expected}
        for name, value in expected.items():
            error = (state[prefix + name] - value).abs().max()
            assert error < 1e-9, f"{name} of rank {rank} is off by {error:.1e}"


def train_ddp(sizes, options, through_file):
    model = bagua_syncbn.convert_sync_batchnorm(make_model())
    model = nn.parallel.DistributedDataParallel(model, **options)
    if through_file:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        model = torch.load(file, weights_only=False)
    return train(model, make_optimizer(model), sizes, dist.get_rank())


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (2, 1, 3), (2, 0, 3)], ids=str)
def test_distributed_data_parallel(pool, sizes):
    check(pool.run(train_ddp, len(sizes), sizes, {}, False), sizes, "module.")


@pytest.mark.parametrize("options", [{"broadcast_buffers": False}, {"static_graph": True}], ids=str)
def test_distributed_data_parallel_options(pool, options):
    check(pool.run(train_ddp, 2, (1, 3), options, False), (1, 3), "module.")


def test_save_and_load_of_the_wrapped_model(pool):
    check(pool.run(train_ddp, 2, (1, 3), {}, True), (1, 3), "module.")


def train_unsynchronized(sizes):
    model = nn.parallel.DistributedDataParallel(make_model())
    return train(model, make_optimizer(model), sizes, dist.get_rank())


def test_the_comparison_can_fail(pool):
    with pytest.raises(AssertionError, match="is off by"):
        check(pool.run(train_unsynchronized, 2, (2, 2)), (2, 2), "module.")


def train_with_bagua(sizes):
    rank = dist.get_rank()
    model = make_model(seed=rank)  # rank 0's parameters are to reach the others
    if rank:
        for buffer in model.buffers():
            buffer.add_(rank)
    module = bagua_syncbn.convert_sync_batchnorm(model)
    optimizer = make_optimizer(module)
    assert bagua_syncbn.with_bagua(module, [optimizer]) is model
    return train(model, optimizer, sizes, rank)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 3)], ids=str)
def test_with_bagua_on_torch(pool, sizes):
    check(pool.run(train_with_bagua, len(sizes), sizes), sizes)


def accumulate():
    """Two backward passes, the first without communication: the sum must be that of two synchronized ones."""
    grads = []
    for accumulated in (True, False):
        model = bagua_syncbn.convert_sync_batchnorm(make_model())
        bagua_syncbn.with_bagua(model, [])
        generator = torch.Generator().manual_seed(dist.get_rank())
        for last in (False, True):
            model.set_requires_gradient_sync(last or not accumulated)
            output = model(torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64))
            output.backward(torch.randn(2, 5, generator=generator, dtype=torch.float64))
        grads.append([parameter.grad for parameter in model.parameters()])
    return all(torch.allclose(first, second, rtol=1e-9, atol=1e-12) for first, second in zip(*grads, strict=True))


def test_gradient_accumulation_with_bagua_on_torch(pool):
    assert pool.run(accumulate, 2) == [True, True]


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
    bagua_syncbn.with_bagua(model, [optimizer])
    times = len(asked)
    state = optimizer.state_dict()
    return state["param_groups"][0]["lr"], {key: value["exp_avg"] for key, value in state["state"].items()}, times


def test_with_bagua_on_torch_broadcasts_the_optimizer_state(pool):
    (first_rate, first, first_asked), (second_rate, second, second_asked) = pool.run(resume, 2)
    assert (first_asked, second_asked) == (1, 0)  # a copy on the host, of which only the first is sent
    assert first_rate == second_rate == 0.5
    assert first.keys() == second.keys() != set()
    assert all(torch.equal(first[key], second[key]) for key in first)


def wrap_in_half(ranks):
    group = dist.new_group(ranks)
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, float(dist.get_rank()))
    if dist.get_rank() in ranks:
        bagua_syncbn.with_bagua(model, [], process_group=group)
    return model.weight.item()


def test_with_bagua_on_torch_in_a_group(pool):
    assert pool.run(wrap_in_half, 4, [1, 3]) == [0, 1, 2, 1]


def wrap_by_description(kind):
    process_group = kind
    if kind == "ranks":
        process_group = RankGroup((dist.get_rank() % 2, dist.get_rank() % 2 + 2))
    elif kind == "mesh":
        process_group = init_device_mesh("cpu", (4,))
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, momentum=1.0))
    nn.init.constant_(model[0].weight, float(dist.get_rank()))
    nn.init.zeros_(model[0].bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(dist.get_rank()))
    bagua_syncbn.with_bagua(bagua_syncbn.convert_sync_batchnorm(model), [optimizer], process_group=process_group)
    assert model[1].process_group is process_group
    weight = model[0].weight.item()
    nn.init.ones_(model[0].weight)
    model(torch.full((2, 1), float(dist.get_rank()))).sum().backward()
    return weight, model[1].running_mean.item()


@pytest.mark.parametrize(
    ("process_group", "weights", "means"),
    [
        (2, [0, 0, 2, 2], [0.5, 0.5, 2.5, 2.5]),
        ([[0, 3], [1, 2]], [0, 1, 1, 0], [1.5] * 4),
        ("node", [0] * 4, [1.5] * 4),
        ("ranks", [0, 1, 0, 1], [1, 2, 1, 2]),
        ("mesh", [0] * 4, [1.5] * 4),
    ],
    ids=str,
)
def test_with_bagua_on_torch_in_a_group_by_description(pool, process_group, weights, means):
    assert pool.run(wrap_by_description, 4, process_group) == list(zip(weights, means, strict=True))


def layers_in_pairs():
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group = pairs[dist.get_rank() % 2]
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, momentum=1.0), nn.BatchNorm1d(1, momentum=1.0))
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    bagua_syncbn.convert_sync_batchnorm(model)
    model[2].process_group = own = dist.new_group([0, 1, 2, 3])
    bagua_syncbn.with_bagua(model, [], process_group=group)
    assert model[1].process_group is group
    assert model[2].process_group is own
    model(torch.full((2, 1), float(dist.get_rank())))
    return model[1].running_mean.item()


def test_layers_have_the_group_of_the_wrapper(pool):
    assert pool.run(layers_in_pairs, 4) == [1.0, 2.0, 1.0, 2.0]


def evaluate_alone():
    """Before any training step, as validation scripts do; rank 1 stays away."""
    model = bagua_syncbn.with_bagua(bagua_syncbn.convert_sync_batchnorm(make_model()), []).eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    dist.barrier()


def test_evaluation_of_a_wrapped_model_waits_for_nobody(pool):
    pool.run(evaluate_alone, 2, timeout=20)


def test_with_bagua_without_a_job():
    model = make_model()
    optimizer = make_optimizer(model)
    assert (
        bagua_syncbn.with_bagua(bagua_syncbn.convert_sync_batchnorm(model), [optimizer], "gradient_allreduce") is model
    )
    state = train(model, optimizer, (4,), 0)
    check([state], (4,))


@pytest.mark.parametrize("algorithm", ["bytegrad", "gradient_all_reduce", object()], ids=str)
def test_without_bagua_there_is_one_algorithm(algorithm):
    with pytest.raises(ValueError, match='algorithm: expected None or "gradient_allreduce"'):
        bagua_syncbn.with_bagua(make_model(), [], algorithm)


def test_with_bagua_checks_its_arguments(pool):
    model = make_model()
    with pytest.raises(TypeError, match=r"optimizers: expected a list of torch\.optim\.Optimizer, got SGD"):
        bagua_syncbn.with_bagua(model, make_optimizer(model))
    with pytest.raises(TypeError, match=r"optimizers: expected torch\.optim\.Optimizer objects, got str"):
        bagua_syncbn.with_bagua(model, ["sgd"])
    with pytest.raises(TypeError, match="process_group: expected"):
        bagua_syncbn.with_bagua(model, [], process_group="everyone")
    pool.run(wrap_wrongly, 2)


def wrap_wrongly():
    model = bagua_syncbn.with_bagua(make_model(), [])
    with pytest.raises(RuntimeError, match="not data parallel yet, got DDPSequential"):
        bagua_syncbn.with_bagua(model, [])
    with pytest.raises(RuntimeError, match="at least one parameter that requires a gradient"):
        bagua_syncbn.with_bagua(make_model().requires_grad_(False), [])
    model = make_model()
    with pytest.raises(TypeError, match=r"process_group: expected None, a torch\.distributed.* got LocalCommunicator"):
        bagua_syncbn.with_bagua(model, [], process_group=LOCAL)
    with pytest.raises(ValueError, match="process_group: expected a number that divides the 2 ranks of the job, got 3"):
        bagua_syncbn.with_bagua(model, [], process_group=3)
    bagua_syncbn.with_bagua(model, [])  # refused, it is as it was


def copies_of_a_model_before_wrapping():
    model = bagua_syncbn.convert_sync_batchnorm(make_model())
    average = copy.deepcopy(model)
    bagua_syncbn.with_bagua(model, [])
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(model)
    average.load_state_dict(model.state_dict())
    return type(average[1]).__name__


def test_copies_are_made_before_wrapping(pool):
    assert pool.run(copies_of_a_model_before_wrapping, 2) == ["SyncBatchNorm2d"] * 2
