"""Layers do not depend on when DistributedDataParallel sends gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua_syncbn import convert_sync_batchnorm

CHANNELS, SAMPLES = 16, 5


class Skipping(nn.Module):
    """A norm between a block that some ranks skip and a final layer. The block's gradients are in the first bucket.

    A rank that skips the block sends this bucket before the norm's sums, and other ranks send it after them.
    """

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(CHANNELS, CHANNELS)
        self.norm = nn.BatchNorm1d(CHANNELS)
        self.last = nn.Linear(CHANNELS, CHANNELS)
        self.wide = nn.ParameterList([torch.randn(2, width)])
        self.block = nn.ParameterList([torch.randn(2, CHANNELS)])  # the block's gradients are sent first

    def before_norm(self, input, skips):
        hidden = _scaled(self.first(input), self.wide)
        return hidden if skips else hidden + _scaled(hidden, self.block)

    def forward(self, input, skips):
        return self.last(self.norm(self.before_norm(input, skips)))


def _scaled(hidden, parameters):
    scale, shift = parameters[0][:, :CHANNELS]
    return torch.tanh(hidden * scale + shift)


def make(width):
    torch.manual_seed(0)
    return Skipping(width).double()


# A bucket for each tensor, with the block's as large as the norm's message; or torch's default buckets.
@pytest.mark.ranks(3)
@pytest.mark.parametrize(("width", "bucket_cap_mb"), [(CHANNELS, 2 * CHANNELS * 8 / 2**20), (80_000, None)])
@pytest.mark.parametrize("kind", ["none", "given", "description"])
def test_a_block_that_one_rank_skips_trains_like_one_process(kind, width, bucket_cap_mb):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(2, world_size, SAMPLES, CHANNELS, dtype=torch.float64, generator=generator)
    inputs, grad_outputs = values
    expected = make(width)
    hidden = torch.cat([expected.before_norm(input, other == 0) for other, input in enumerate(inputs)])
    expected.last(expected.norm(hidden)).backward(grad_outputs.flatten(0, 1) / world_size)
    process_group = {"none": None, "given": dist.group.WORLD, "description": world_size}[kind]
    model = convert_sync_batchnorm(make(width), process_group)
    model = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=bucket_cap_mb)
    for _ in range(2):
        model.zero_grad()
        model(inputs[rank], rank == 0).backward(grad_outputs[rank])
    grads = [[parameter.grad for parameter in net.parameters()] for net in (model, expected)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)
