"""``launched.py DIRECTORY``, for a launcher: trains in a Bagua job on the host, by the launcher's own variables."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import bagua_syncbn
from tests.bagua_job.native import install


def main():
    dist.init_process_group("gloo")
    install()
    import bagua.torch_api as bagua

    bagua.init_process_group()
    rank = bagua.get_rank()
    torch.manual_seed(0)
    model = bagua_syncbn.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = bagua_syncbn.with_bagua(model, [optimizer], "gradient_allreduce")
    batch = torch.randn(8, 4).chunk(bagua.get_world_size())[rank]
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
    torch.save(model.state_dict(), f"{sys.argv[1]}/rank{rank}")


if __name__ == "__main__":
    main()
    # The threads of the gloo groups that stand in for NCCL's communicators can abort an interpreter that ends.
    os._exit(0)
