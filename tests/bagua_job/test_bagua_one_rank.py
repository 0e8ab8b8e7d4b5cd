"""One rank that communicates all the same: over NCCL where there is a GPU, over the stand-ins where there is none.

``pytest -m gpu`` runs the first form, not run on one yet; the other one rehearses its Python. Over the stand-ins
test_bagua_wrapper.py tries all algorithms.
"""

import pytest
import torch
import torch.nn.functional as F

import bagua_syncbn
from bagua_syncbn.communicators import bagua
from tests.bagua_job.native import log
from tests.bagua_job.test_bagua_wrapper import ALGORITHMS, make_algorithm, make_model, make_optimizer

RUNS = [("host", "gradient_allreduce"), *(pytest.param("gpu", name, marks=pytest.mark.gpu) for name in ALGORITHMS)]


@pytest.fixture(scope="module")
def one_rank(request):
    """Runs a function on the one rank of a Bagua job."""
    from tests.bagua_job.native import join_job_on_a_gpu
    from tests.helpers.workers import WorkerPool

    on_host = request.param == "host"
    workers = request.getfixturevalue("pool") if on_host else WorkerPool(join_job_on_a_gpu)
    yield lambda function, *args: workers.run(function, 1, "cpu" if on_host else "cuda", *args)
    if not on_host:
        workers.close()


class Forced:
    """The communicator of one rank, for layers that believe there are two: the other one has what this one has."""

    size, rank = 2, 0

    def __init__(self):
        self.one = bagua.BaguaCommunicator(bagua._make_group((0,)))

    def all_gather(self, packed):
        return self.one.all_gather(packed).repeat(2, 1)

    def all_reduce(self, packed):
        return self.one.all_reduce(packed).mul_(2)


def train(device, algorithm):
    model, local = make_model().to(device), make_model().to(device)
    bagua_syncbn.convert_sync_batchnorm(model, Forced())
    optimizer, local_optimizer = make_optimizer(model, algorithm), make_optimizer(local)
    bagua_syncbn.with_bagua(model, [optimizer], make_algorithm(algorithm, optimizer))
    for step in range(5):
        input, target = torch.randn(6, 4), torch.randn(6, 2)
        for net, its, ranks in ((model, optimizer, 1), (local, local_optimizer, 2)):
            its.zero_grad()
            loss = F.mse_loss(net(input.repeat(ranks, 1).to(device)), target.repeat(ranks, 1).to(device))
            loss.backward()
            its.step()
            assert loss.isfinite()
        if step == 0:  # before the algorithms go ways of their own
            torch.testing.assert_close(model[1].running_var, local[1].running_var)
            torch.testing.assert_close(model[4].running_mean, local[4].running_mean)
    if algorithm == "async":
        model.bagua_algorithm.abort(model)
    assert model[1].num_batches_tracked.item() == 5
    if algorithm == "gradient_allreduce":  # the gradients of one rank
        torch.testing.assert_close(model.state_dict(), local.state_dict(), rtol=1e-3, atol=1e-4)
    host_does_not_wait(device)


def host_does_not_wait(device):
    layer = bagua_syncbn.SyncBatchNorm2d(8, process_group=Forced()).to(device)
    input, grad_output = torch.randn(2, 6, 8, 5, 5, device=device).unbind()
    input.requires_grad_()
    for _ in range(2):  # until the ranks have agreed on what they send
        layer(input).backward(grad_output)
    log.clear()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        layer(input).backward(grad_output)
    finally:
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("default")
    assert "host waits" not in log


@pytest.mark.parametrize(("one_rank", "algorithm"), RUNS, indirect=["one_rank"])
def test_every_algorithm_trains_a_converted_model_and_the_host_waits_for_no_layer(one_rank, algorithm):
    one_rank(train, algorithm)
