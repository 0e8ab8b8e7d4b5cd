"""The layers' groups."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm, sync_batch_norm
from bagua_syncbn._groups import EVERYONE, spec_of
from bagua_syncbn.communicators import shared, torch_engine

needs_shared_memory = pytest.mark.skipif(bool(shared.problem()), reason=shared.problem() or "none")


def forget_groups():
    """Makes the job create its groups again."""
    job = torch_engine.running_job()
    for known in (job._ranks, job._communicators):
        known.clear()
    EVERYONE._communicator = None


def communicator_of(process_group=None):
    """Returns the communicator of a layer with ``process_group``."""
    return spec_of(process_group).communicator()


def mean_over(process_group):
    """Returns the batch mean of a layer with ``process_group``, where each rank's input is its rank."""
    return mean_by(SyncBatchNorm(1, momentum=1.0, process_group=process_group))


def mean_by(layer, offset=0):
    layer(torch.full((2, 1), float(dist.get_rank() + offset)))
    return layer.running_mean.item()


def check_refused(process_group, error, message):
    """Checks that all functions with a ``process_group`` argument raise."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    for use in (
        lambda: SyncBatchNorm(2, process_group=process_group),
        lambda: convert_sync_batchnorm(model, process_group),
        lambda: sync_batch_norm(torch.randn(4, 2), None, None, process_group=process_group),
        lambda: communicator_of(process_group),
    ):
        with pytest.raises(error, match=message):
            use()
    assert type(model[0]) is nn.BatchNorm1d
