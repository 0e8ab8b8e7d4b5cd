"""Rows of the table in docs/switching.md: what torch's converter makes of a case, and what ours does."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm
from tests.helpers.user_layers import BatchNormAct, Doubled

CONVERTERS = {"torch": nn.SyncBatchNorm.convert_sync_batchnorm, "ours": convert_sync_batchnorm}
SAMPLES = torch.ones(4, 2)


def synchronized(layer):
    return isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm))


def identity(convert):
    model = nn.Sequential(nn.BatchNorm2d(2))
    before = model[0]
    before.register_forward_hook(lambda *args: None)
    before.register_state_dict_post_hook(lambda *args: None)
    before.note = "kept"
    layer = convert(model)[0]
    return layer is before, len(layer._forward_hooks) + len(layer._state_dict_hooks), hasattr(layer, "note")


def two_names(convert):
    model = nn.Module()
    model.a = model.b = nn.BatchNorm2d(2)
    model = convert(model)
    return [synchronized(model.a), synchronized(model.b)]


def cycle(convert):
    model = nn.Sequential(nn.BatchNorm2d(2))
    model.me = model
    return synchronized(convert(model)[0])


def parametrized(convert):
    model = nn.Sequential(nn.BatchNorm2d(2))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    layer = convert(model)[0]
    return parametrize.is_parametrized(layer, "weight") and synchronized(layer)


def model_of(layer):
    return nn.Sequential(layer)


def in_a_group(convert):
    return convert(model_of(nn.BatchNorm2d(2)), dist.new_group([0, 1]))


def keeps_its_group(convert):
    group = dist.new_group([0, 1])
    return convert(model_of(nn.SyncBatchNorm(2, process_group=group)))[0].process_group is group


# Results with torch's converter and with ours, or the name of the error that is raised.
ROWS = {
    "references, hooks and attributes": (identity, (False, 0, False), (True, 2, True)),
    "a subclass": (lambda convert: isinstance(convert(model_of(BatchNormAct(2)))[0], BatchNormAct), False, True),
    "dimensions": (lambda convert: convert(model_of(nn.BatchNorm2d(2)).eval())(SAMPLES).shape, (4, 2), "ValueError"),
    "a layer under two names in one parent": (two_names, [True, False], [True, True]),
    "a module that holds itself": (cycle, "RecursionError", True),
    "lazy": (lambda convert: convert(model_of(nn.LazyBatchNorm1d())).eval()(SAMPLES).shape, "ValueError", (4, 2)),
    "a parametrized weight": (parametrized, "TypeError", True),
}
IN_A_JOB = {
    "the group of torch's layer": (keeps_its_group, False, True),
    "deepcopy with a group": (lambda convert: bool(copy.deepcopy(in_a_group(convert))), "TypeError", True),
    "pickle with a group": (lambda convert: bool(pickle.dumps(in_a_group(convert))), "TypeError", True),
    "data parallel": (
        lambda convert: bool(nn.parallel.DistributedDataParallel(convert(model_of(nn.BatchNorm2d(2))))),
        *("ValueError", True),
    ),
    "training": (lambda convert: convert(model_of(nn.BatchNorm1d(2)))(SAMPLES).shape, "ValueError", (4, 2)),
}


def outcomes(row):
    found = []
    for convert in CONVERTERS.values():
        try:
            found.append((ROWS | IN_A_JOB)[row][0](convert))
        except Exception as error:
            found.append(type(error).__name__)
    return tuple(found)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("row", ROWS)
def test_torchs_converter_gives_what_the_table_says(row):
    assert outcomes(row) == ROWS[row][1:]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("row", IN_A_JOB)
def test_torchs_converter_gives_what_the_table_says_in_a_job(row):
    assert outcomes(row) == IN_A_JOB[row][1:]


def test_torchs_converter_replaces_ours_and_ours_takes_it_back():
    """It takes all layers that derive from torch's, so it must not follow; after it ours makes these ours again."""
    model = CONVERTERS["torch"](convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(2), BatchNormAct(2))))
    assert [type(layer) for layer in model] == [nn.SyncBatchNorm] * 2
    assert all(isinstance(layer, SyncBatchNorm) for layer in convert_sync_batchnorm(model))
