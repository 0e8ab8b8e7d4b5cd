"""Lines that PyTorch shows: the test of its pull request for SyncBatchNorm, on CPU, and the examples of its docs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import through_file

from bagua_syncbn import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm3d, convert_sync_batchnorm
from bagua_syncbn.data_parallel import DataParallelWithCallback


class BatchNormNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 40, bias=False), nn.BatchNorm1d(4), nn.Linear(40, 4, bias=False)

    def forward(self, input):
        normalized = self.norm(self.first(input).view(-1, 4, 10))
        return self.last(normalized.view(-1, 40)).softmax(1)


def net():
    torch.manual_seed(1)
    return BatchNormNet().double()


def five_steps(model, share):
    """Returns the state after five steps on rows ``share`` of the batches; the third is followed by save and load."""
    generator = torch.Generator().manual_seed(1337)
    inputs = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    targets = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    for step in range(5):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        nn.functional.mse_loss(model(inputs[share]), targets[share]).backward()
        optimizer.step()
        optimizer.zero_grad()
        model = through_file(model) if step == 2 else model
        inputs = inputs[torch.randperm(4, generator=generator)]
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


def pull_request(options):
    rank = dist.get_rank()
    return five_steps(DistributedDataParallel(convert_sync_batchnorm(net()), **options), slice(2 * rank, 2 * rank + 2))


@pytest.mark.parametrize("options", [{}, {"device_ids": None, "output_device": None}, {"device_ids": []}], ids=str)
def test_torchs_pull_request(pool, options):
    expected = five_steps(net(), slice(4))
    assert not torch.allclose(expected["norm.weight"], net().norm.weight)
    for state in pool.run(pull_request, 2, options):
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-12)


def wrap_with_several_devices():
    for options, said in [
        ({"device_ids": [0, 1]}, "device_ids can only be None or contain a single element"),
        ({"device_ids": [0], "output_device": 0}, "device_ids and output_device arguments only work with"),
    ]:
        for model in (net(), convert_sync_batchnorm(net())):
            with pytest.raises(ValueError, match=said):
                DistributedDataParallel(model, **options)
    model = DataParallelWithCallback(convert_sync_batchnorm(net()), ["cpu", "cpu"])
    with pytest.raises(
        RuntimeError, match=r"expected a group of one where .* 2 replicas, .* use one device for each rank"
    ):
        DistributedDataParallel(model)(torch.randn(4, 2, dtype=torch.float64))


def test_several_devices_in_one_process_are_refused(pool):
    pool.run(wrap_with_several_devices, 2)


def test_without_a_job_layers_compute_alone_and_torchs_wrapper_says_what_is_missing():
    model, plain = convert_sync_batchnorm(net()), net()
    input = torch.randn(4, 2, dtype=torch.float64)
    torch.testing.assert_close(model(input), plain(input))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    for unwrapped in (model, plain):
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            DistributedDataParallel(unwrapped)


def two_groups():
    """The examples of torch's docs: layers in two groups of ranks, built and converted."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = list(range(size))
    groups = [dist.new_group(members) for members in (ranks[: size // 2], ranks[size // 2 :])]
    group = groups[0 if rank < size // 2 else 1]
    generator = torch.Generator().manual_seed(rank)
    layer = SyncBatchNorm3d(100, affine=False, process_group=group)
    output = layer(torch.randn(2, 100, 3, 4, 2, generator=generator) + rank)
    network = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(net(), group), device_ids=None)
    rows = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    network(rows).sum().backward()
    return output, layer.state_dict(), rows, network.module.norm.running_mean


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_two_groups_of_torchs_docs(pool, size):
    results = pool.run(two_groups, size)
    for members in (range(size // 2), range(size // 2, size)):
        reference = nn.BatchNorm3d(100, affine=False).double()
        inputs, plain = [], net()
        for rank in members:
            generator = torch.Generator().manual_seed(rank)
            inputs.append(torch.randn(2, 100, 3, 4, 2, generator=generator) + rank)
        expected = reference(torch.cat(inputs).double())
        plain(torch.cat([results[rank][2] for rank in members]))
        outputs, states, _, means = zip(*(results[rank] for rank in members), strict=True)
        torch.testing.assert_close(torch.cat(outputs).double(), expected, rtol=2e-5, atol=2e-5)
        for state, mean in zip(states, means, strict=True):
            torch.testing.assert_close(state["running_var"].double(), reference.running_var, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(mean, plain.norm.running_mean)


class Mine(SyncBatchNorm1d):
    @classmethod
    def convert_sync_batchnorm(cls, module, process_group=None):
        return super().convert_sync_batchnorm(module, process_group=process_group)


def test_the_converter_of_a_subclass_converts_to_the_classes_of_the_package():
    for cls in (SyncBatchNorm, SyncBatchNorm3d, Mine):
        model = net()
        assert cls.convert_sync_batchnorm(model) is model
        assert type(model.norm) is SyncBatchNorm1d


def test_torch_does_not_do_all_that_its_docs_say():
    for cls in (nn.SyncBatchNorm, SyncBatchNorm):
        assert torch.equal(cls(8).weight, torch.ones(8))  # said to be drawn from U(0, 1)
    with pytest.raises(TypeError, match="process_group"):
        nn.BatchNorm3d(100, process_group=None)
