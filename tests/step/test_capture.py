"""Training steps can be captured in CUDA graphs: the host reads no device value, and no shape depends on data."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_syncbn import convert_sync_batchnorm, fuse_activations, masked, recompute_outputs
from tests.helpers.observed import ForbidHostReads


def make_model():
    layers = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, momentum=None), nn.ReLU(), nn.Conv1d(4, 3, 3), nn.BatchNorm1d(3)
    return convert_sync_batchnorm(nn.Sequential(*layers))


def plain(model, input):
    return model(input).square().mean()


def checkpointed(model, input):
    outputs = [checkpoint(model, scale * input, use_reentrant=False) for scale in (1, 2)]
    return sum(output.square().mean() for output in outputs)


def gradient_penalty(model, input):
    (grad,) = torch.autograd.grad(model(input).sin().sum(), input, create_graph=True)
    return grad.square().sum()


def with_fewer_outputs(model, input):
    return recompute_outputs(fuse_activations(model))(input).square().mean()


def with_residual(model, input):
    model[1].fused_activation = "silu"
    y = model[0](input)
    return model[1](y, y.cos()).square().mean()


def with_padding(model, input):
    mask = torch.arange(9).view(1, 1, 9) < 4
    with masked(model, mask, rule=lambda mask, shape: mask[..., : shape[2]], zero_masked=True):
        return model(input).square().mean()


LOSSES = [plain, checkpointed, gradient_penalty, with_fewer_outputs, with_residual, with_padding]


def step_without_host_reads(loss, sizes):
    with ForbidHostReads():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            loss(model, torch.randn(sizes[dist.get_rank()], 2, 9, requires_grad=True)).backward()
            optimizer.step()
    return model[1].num_batches_tracked.item()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sizes", [(3, 3), (2, 5), (3, 0, 2)], ids=str)
def test_nothing_is_read_on_the_host(pool, loss, sizes):
    counted = 4 if loss is checkpointed else 2
    assert pool.run(step_without_host_reads, len(sizes), loss, sizes) == [counted] * len(sizes)
