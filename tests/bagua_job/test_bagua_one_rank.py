"""A single rank over NCCL on a GPU that nevertheless communicates: ``pytest -m gpu``. Not run on a GPU yet."""

import pytest
import torch
import torch.distributed as dist

import bagua_syncbn
from bagua_syncbn.bagua import engine
from tests.bagua_job.native import start_autotune_thread
from tests.bagua_job.test_bagua_wrapper import ALGORITHMS, make_algorithm, make_model, make_optimizer
from tests.helpers.one_rank import Twin
from tests.helpers.steps import STEPS, batch_of, take_step
from tests.helpers.workers import WorkerPool


def join_job(store, rank, world_size):
    import bagua.torch_api.communication as communication

    communication.start_autotune_server = start_autotune_thread
    torch.cuda.set_device(rank)
    communication.init_process_group(dist.FileStore(store, world_size), rank, world_size, world_size)


@pytest.fixture(scope="module")
def one_rank():
    workers = WorkerPool(join_job)
    yield workers
    workers.close()


class Forced(Twin):
    """A twin that also runs the collectives of a single rank."""

    def __init__(self):
        self.one = engine.make_communicator((0,))

    def all_gather(self, packed):
        return super().all_gather(self.one.all_gather(packed))

    def all_reduce(self, packed):
        return super().all_reduce(self.one.all_reduce(packed))


def train(algorithm):
    model, local = make_model().cuda(), make_model().cuda()
    bagua_syncbn.convert_sync_batchnorm(model, Forced())
    optimizer, local_optimizer = make_optimizer(model, algorithm), make_optimizer(local)
    bagua_syncbn.with_bagua(model, [optimizer], make_algorithm(algorithm, optimizer))
    for number in range(STEPS):
        input, target = batch_of(number, (6,), 0, model[0].weight)
        take_step(model, optimizer, input, target, (6,))
        take_step(local, local_optimizer, input.repeat(2, 1, 1, 1), target.repeat(2, 1), (12,))
        if number == 0:  # some algorithms differ in later steps
            torch.testing.assert_close(model[1].running_var, local[1].running_var)
    if algorithm == "async":
        model.bagua_algorithm.abort(model)
    assert model[1].num_batches_tracked.item() == STEPS
    assert model[0].weight.isfinite().all()
    if algorithm == "gradient_allreduce":  # one rank's gradients
        torch.testing.assert_close(model.state_dict(), local.state_dict(), rtol=1e-3, atol=1e-4)


def call_without_host_waits():
    layer = bagua_syncbn.SyncBatchNorm2d(8, process_group=Forced()).cuda()
    input, grad_output = torch.randn(2, 6, 8, 5, 5, device="cuda").unbind()
    input.requires_grad_()
    for _ in range(2):  # until the ranks have agreed on their messages
        layer(input).backward(grad_output)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(input).backward(grad_output)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains_a_converted_model(one_rank, algorithm):
    one_rank.run(train, 1, algorithm)


@pytest.mark.gpu
def test_the_host_waits_for_no_layer(one_rank):
    one_rank.run(call_without_host_waits, 1)
