"""Ranks that diverge in merge_statistics or recalibrate_statistics: the error names all of them, and buffers do not
change."""

import copy

import pytest
import torch
from torch import nn

from bagua_syncbn import convert_sync_batchnorm, merge_statistics, recalibrate_statistics
from tests.faults.programs import is_odd, message_of, own_group

BATCHES = [torch.randn(4, 8), torch.randn(3, 8)]


class Critic(nn.Sequential):
    pass


def raising():
    yield BATCHES[0]
    raise KeyError("no such file")


def smaller(model):
    return Critic(*list(model)[:1])


# Calls of all ranks, a different call of the last rank, and parts of its peers' errors.
DIVERGENCES = {
    "merges another model": (
        lambda model, group: merge_statistics(model, group),
        lambda model, group: merge_statistics(smaller(model), group),
        ("merge_statistics of Critic (channels: 16 in 2 layers", "(channels: 8 in 1 layers"),
    ),
    "trains while others merge": (
        lambda model, group: (model(BATCHES[0]), merge_statistics(model, group)),
        lambda model, group: (model(BATCHES[0]), model(BATCHES[0])),
        ("merge_statistics of Critic (channels: 16", "forward of SyncBatchNorm1d '0' of Critic"),
    ),
    "passes an invalid weight": (
        lambda model, group: merge_statistics(model, group),
        lambda model, group: merge_statistics(model, group, weight=-1),
        ("weight: expected a finite number above 0, got -1",),
    ),
    "has infinite statistics": (
        lambda model, group: merge_statistics(model, group),
        lambda model, group: (model[1].running_var.fill_(torch.inf), merge_statistics(model, group)),
        ("merge_statistics: statistics are not finite in 1",),
    ),
    "raises in its batches": (
        lambda model, group: recalibrate_statistics(model, BATCHES, process_group=group),
        lambda model, group: recalibrate_statistics(model, raising(), process_group=group),
        ("no such file",),
    ),
    "recalibrates while others merge": (
        lambda model, group: merge_statistics(model, group),
        lambda model, group: recalibrate_statistics(model, BATCHES, process_group=group),
        ("merge_statistics of Critic", "recalibrate_statistics of Critic (before its batches)"),
    ),
}


def run(name, first):
    do, do_instead, _ = DIVERGENCES[name]
    with own_group() as communicator:
        model = convert_sync_batchnorm(Critic(nn.BatchNorm1d(8), nn.BatchNorm1d(8)), communicator)
        if not first:
            do(model, communicator)
        before = copy.deepcopy(model.state_dict())
        message = message_of(lambda: (do_instead if is_odd() else do)(model, communicator))
        if not is_odd() and not name.startswith("trains"):
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    return message


FROM_THE_FIRST_CALL = "merges another model", "raises in its batches", "recalibrates while others merge"


@pytest.mark.parametrize(("name", "ranks", "first"), [
    *((name, 2, False) for name in DIVERGENCES),
    *((name, 2, True) for name in FROM_THE_FIRST_CALL),
    *(pytest.param(name, 4, False, marks=pytest.mark.slow) for name in DIVERGENCES),
])  # fmt: skip
def test_diverging_ranks_are_named_and_keep_their_statistics(pool, name, ranks, first):
    *peers, odd = pool.run(run, ranks, name, first)
    for message in peers:
        assert all(part in message for part in DIVERGENCES[name][2]), message
    assert odd != "finished"
