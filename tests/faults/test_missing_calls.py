"""Functions that communicate, called on some ranks only: the error names the function, and what peers do instead."""

from datetime import timedelta
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_syncbn
from bagua_syncbn.communicators import shared
from tests.faults.programs import is_odd, message_of

X = torch.randn(4, 3)
# Functions that all ranks must call, with the model and the group.
CALLS = {
    "measure_batch_noise": lambda model, group: bagua_syncbn.measure_batch_noise(model, [X], process_group=group),
    "mean_over_ranks": lambda model, group: bagua_syncbn.mean_over_ranks(X, process_group=group),
    "merge_statistics": bagua_syncbn.merge_statistics,
    "recalibrate_statistics": lambda model, group: bagua_syncbn.recalibrate_statistics(model, [X], process_group=group),
    "verify_synchronization": lambda model, group: bagua_syncbn.verify_synchronization(
        model, X, lambda model, x: model(x).sum(), process_group=group
    ),
    "with_bagua": lambda model, group: bagua_syncbn.with_bagua(model, [], process_group=group),
}


def make_model(group):
    return bagua_syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_a_function_on_one_rank_is_named_on_all_ranks_while_peers_train(name):
    group = dist.new_group()
    model = make_model(group)
    for _ in range(2):
        model(X)
    message = message_of(lambda: model(X) if is_odd() else CALLS[name](model, group))
    assert f"rank 0: {name}" in message
    assert "rank 1: forward of SyncBatchNorm1d '0' of Sequential" in message


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "is_first_use"), [
    ("measure_batch_noise", True), ("verify_synchronization", False), ("with_bagua", False),
])  # fmt: skip
def test_a_function_on_one_rank_is_named_at_half_of_the_timeout(name, is_first_use):
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = make_model(group)
    if not is_first_use:
        model(X)
    if not is_odd():
        with TestCase().assertLogs("bagua_syncbn", "WARNING") as logs:
            message = message_of(CALLS[name], model, group)
        assert name in message
        assert shared.problem() or "rank 1" in message
        (record,) = logs.records
        assert ("for rank 1 for" if is_first_use else f"in the {name} of Sequential (") in record.getMessage()
    dist.barrier()
