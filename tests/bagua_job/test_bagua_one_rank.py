"""One rank that communicates all the same: over NCCL where there is a GPU, over the stand-ins where there is none.

``pytest -m gpu`` runs the first form, not run on one yet; the other one rehearses its Python. Over the stand-ins
test_bagua_wrapper.py tries all algorithms.
"""

import pytest
import torch
import torch.nn.functional as F
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from streams import Watch, timeline
from test_bagua_wrapper import ALGORITHMS
from torch import nn

import bagua_syncbn
from bagua_syncbn.communicators import bagua

PLACES = ["host", pytest.param("gpu", marks=pytest.mark.gpu)]
RUNS = [("host", "gradient_allreduce"), *(pytest.param("gpu", name, marks=pytest.mark.gpu) for name in ALGORITHMS)]


@pytest.fixture(scope="module")
def one_rank(request):
    """Runs a function on the one rank of a Bagua job."""
    from native import join_job_on_a_gpu
    from workers import WorkerPool

    on_host = request.param == "host"
    workers = request.getfixturevalue("pool") if on_host else WorkerPool(join_job_on_a_gpu)
    yield lambda function, *args: workers.run(function, 1, "cpu" if on_host else "cuda", *args)[0]
    if not on_host:
        workers.close()


class Forced:
    """The communicator of one rank, for layers that believe there are two: the other one has what this one has."""

    size, rank = 2, 0

    def __init__(self):
        self.one = bagua.communicator_among((0,))

    def all_gather(self, packed):
        return self.one.all_gather(packed).repeat(2, 1)

    def all_reduce(self, packed):
        return self.one.all_reduce(packed).mul_(2)


def make_model(device):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4), nn.BatchNorm1d(4)
    return nn.Sequential(*layers).to(device)


def train_model(device, algorithm):
    model, local = make_model(device), make_model(device)
    bagua_syncbn.convert_sync_batchnorm(model, Forced())
    options = {"async": {"sync_interval_ms": 1}}.get(algorithm, {})
    if algorithm == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
        options = {"q_adam_optimizer": optimizer}
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua_syncbn.with_bagua(model, [optimizer], Algorithm.init(algorithm, **options))
    local_optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        input, target = torch.randn(6, 3, 6, 6, generator=generator), torch.randn(6, 4, generator=generator)
        for net, its, ranks in ((model, optimizer, 1), (local, local_optimizer, 2)):
            its.zero_grad()
            loss = F.mse_loss(net(input.repeat(ranks, 1, 1, 1).to(device)), target.repeat(ranks, 1).to(device))
            loss.backward()
            its.step()
            assert loss.isfinite()
        if step == 0:  # before the algorithms go ways of their own
            torch.testing.assert_close(model[1].running_var, local[1].running_var)
            torch.testing.assert_close(model[5].running_mean, local[5].running_mean)
    if algorithm == "async":
        model.bagua_algorithm.abort(model)
    assert model[1].num_batches_tracked.item() == 5
    if algorithm == "gradient_allreduce":  # the gradients of one rank
        for name, value in local.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("one_rank", "algorithm"), RUNS, indirect=["one_rank"])
def test_every_algorithm_trains_a_converted_model(one_rank, algorithm):
    one_rank(train_model, algorithm)


def watch_layer(device):
    layer = bagua_syncbn.SyncBatchNorm2d(8, process_group=Forced()).to(device)
    input = torch.randn(6, 8, 5, 5, device=device, requires_grad=True)
    grad_output = torch.randn(6, 8, 5, 5, device=device)
    for _ in range(2):  # until the ranks have agreed on what they send
        layer(input).backward(grad_output)
    if device == "cpu":
        timeline.clear()
        with Watch():
            layer(input).backward(grad_output)
        assert [what for what, *_ in timeline.collectives] == ["allgather", "allreduce"]
        assert timeline.host_waits == timeline.races == []
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(input).backward(grad_output)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("one_rank", PLACES, indirect=True)
def test_the_host_does_not_wait_for_a_step(one_rank):
    one_rank(watch_layer)
