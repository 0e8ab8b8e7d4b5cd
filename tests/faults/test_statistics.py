"""Ranks that diverge in merge_statistics or recalibrate_statistics: the error names all these ranks, and buffers do not
change."""

import pytest
import torch
from torch import nn

from bagua_syncbn import convert_sync_batchnorm, merge_statistics, recalibrate_statistics
from tests.faults.programs import Critic, is_odd, message_of, own_group
from tests.helpers.steps import unchanged

BATCHES = [torch.randn(4, 8), torch.randn(3, 8)]


def raising():
    yield BATCHES[0]
    raise KeyError("no such file")


def recalibrate(model, group, batches=BATCHES):
    recalibrate_statistics(model, batches, process_group=group)


# Calls of the last rank while its peers merge statistics (with "batches" in the name: recalibrate), and parts of the
# errors that the peers raise.
DIVERGENCES = {
    "merges another model": (
        lambda model, group: merge_statistics(Critic(model[0]), group),
        ("merge_statistics of Critic (channels: 16 in 2 layers", "(channels: 8 in 1 layers"),
    ),
    "merges a layer of another name": (
        lambda model, group: (model.add_module("other", model.pop(1)), merge_statistics(model, group)),
        ("merge_statistics of Critic (channels: 16 in 2 layers, of names and sizes",),
    ),
    "passes an invalid weight": (
        lambda model, group: merge_statistics(model, group, weight=-1),
        ("weight: expected a finite number above 0, got -1",),
    ),
    "has infinite statistics": (
        lambda model, group: (model[1].running_var.fill_(torch.inf), merge_statistics(model, group)),
        ("statistics are not finite in 1 on some rank, so none was updated; call recalibrate_statistics instead",),
    ),
    "raises in its batches": (lambda model, group: recalibrate(model, group, raising()), ("no such file",)),
    "recalibrates": (
        recalibrate, ("merge_statistics of Critic", "recalibrate_statistics of Critic (before its batches)")
    ),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "first"), [
    *((name, False) for name in DIVERGENCES),
    *((name, True) for name in ("merges another model", "raises in its batches", "recalibrates")),
])  # fmt: skip
def test_diverging_ranks_are_named_and_keep_their_statistics(name, first):
    odd, named = DIVERGENCES[name]
    do = recalibrate if "batches" in name else merge_statistics
    with own_group() as communicator:
        model = convert_sync_batchnorm(Critic(nn.BatchNorm1d(8), nn.BatchNorm1d(8)), communicator)
        if not first:
            do(model, communicator)
        if is_odd():
            assert message_of(odd, model, communicator) != "finished"
        else:
            with unchanged(model):
                message = message_of(do, model, communicator)
            assert all(part in message for part in named), message
