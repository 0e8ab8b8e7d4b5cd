"""The groups that layers have to themselves: found, and forgotten as in a job where nobody has used any yet."""

from datetime import timedelta

import torch
import torch.distributed as dist

from bagua_syncbn import SyncBatchNorm
from bagua_syncbn.communicators import jobs
from bagua_syncbn.groups import EVERYONE, spec_of

SECONDS = 2.0  # time-out of the job that join() begins


def forget_groups():
    job = jobs.job_of(dist.group.WORLD)
    for known in (job._own_ranks, job._made, job._given):
        known.clear()
    EVERYONE._communicator = None


def communicator_of(process_group=None):
    """Returns the communicator that a layer with ``process_group`` uses."""
    return spec_of(process_group).communicator()


def mean_over(process_group):
    """Returns what a layer with ``process_group`` sees of ranks that each have their rank as input."""
    layer = SyncBatchNorm(1, momentum=1.0, process_group=process_group)
    layer(torch.full((2, 1), float(dist.get_rank())))
    return layer.running_mean.item()


def join(store, world_size, rank, seconds=SECONDS):
    """Begins a job with a time-out of ``seconds``, and a store of the kind that is named."""
    dist.barrier()
    dist.destroy_process_group()
    kind, place = store
    timeout = timedelta(seconds=seconds)
    if kind == "tcp":
        keeper = dist.TCPStore("localhost", place, world_size, rank == 0, timeout, multi_tenant=True)
    else:
        keeper = dist.FileStore(place, world_size)
        keeper.set_timeout(timeout)
    dist.init_process_group("gloo", store=keeper, rank=rank, world_size=world_size, timeout=timeout)
