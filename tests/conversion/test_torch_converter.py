"""Rows of the table in docs/conversion.md: what torch's converter makes of a case, and what ours does."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize
from user_layers import BatchNormAct, Doubled

from bagua_syncbn import SyncBatchNorm, convert_sync_batchnorm

CONVERTERS = {"torch": nn.SyncBatchNorm.convert_sync_batchnorm, "ours": convert_sync_batchnorm}


def synchronized(layer):
    return isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm))


def references_hooks_and_attributes(convert):
    model = nn.Sequential(nn.BatchNorm2d(2))
    before = model[0]
    before.register_forward_hook(lambda *args: None)
    before.register_state_dict_post_hook(lambda *args: None)
    before.note = "kept"
    layer = convert(model)[0]
    return layer is before, len(layer._forward_hooks) + len(layer._state_dict_hooks), hasattr(layer, "note")


def a_subclass_with_a_forward_of_its_own(convert):
    layer = convert(nn.Sequential(BatchNormAct(2)))[0]
    return synchronized(layer) and isinstance(layer, BatchNormAct)


def too_few_dimensions(convert):
    return convert(nn.Sequential(nn.BatchNorm2d(2).eval()))(torch.randn(4, 2)).shape


def a_layer_under_two_names_in_one_parent(convert):
    model = nn.Module()
    model.a = model.b = nn.BatchNorm2d(2)
    model = convert(model)
    return [synchronized(model.a), synchronized(model.b)]


def a_module_that_holds_itself(convert):
    model = nn.Sequential(nn.BatchNorm2d(2))
    model.me = model
    return synchronized(convert(model)[0])


def a_lazy_layer(convert):
    return convert(nn.Sequential(nn.LazyBatchNorm1d())).eval()(torch.randn(4, 2)).shape


def a_parametrized_weight(convert):
    model = nn.Sequential(nn.BatchNorm2d(2))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    layer = convert(model)[0]
    return parametrize.is_parametrized(layer, "weight") and synchronized(layer)


# What comes of them with torch's converter, and with ours; or the name of the error that is raised.
ROWS = {
    references_hooks_and_attributes: ((False, 0, False), (True, 2, True)),
    a_subclass_with_a_forward_of_its_own: (False, True),
    too_few_dimensions: ((4, 2), "ValueError"),
    a_layer_under_two_names_in_one_parent: ([True, False], [True, True]),
    a_module_that_holds_itself: ("RecursionError", True),
    a_lazy_layer: ("ValueError", (4, 2)),
    a_parametrized_weight: ("TypeError", True),
}


def the_group_of_torchs_layer(convert):
    group = dist.new_group([0, 1])
    return convert(nn.Sequential(nn.SyncBatchNorm(2, process_group=group)))[0].process_group is group


def a_copy_of_a_layer_with_a_group(convert, copied=copy.deepcopy):
    return bool(copied(convert(nn.Sequential(nn.BatchNorm2d(2)), dist.new_group([0, 1]))))


def a_pickle_of_a_layer_with_a_group(convert):
    return a_copy_of_a_layer_with_a_group(convert, pickle.dumps)


def data_parallel_on_cpu(convert):
    return bool(nn.parallel.DistributedDataParallel(convert(nn.Sequential(nn.BatchNorm2d(2)))))


def training_on_cpu(convert):
    return convert(nn.Sequential(nn.BatchNorm2d(2)))(torch.randn(2, 2, 3, 3)).shape == (2, 2, 3, 3)


IN_A_JOB = {
    the_group_of_torchs_layer: (False, True),
    a_copy_of_a_layer_with_a_group: ("TypeError", True),
    a_pickle_of_a_layer_with_a_group: ("TypeError", True),
    data_parallel_on_cpu: ("ValueError", True),
    training_on_cpu: ("ValueError", True),
}


def outcomes(row):
    found = []
    for convert in CONVERTERS.values():
        try:
            found.append(row(convert))
        except Exception as error:
            found.append(type(error).__name__)
    return tuple(found)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("row", ROWS)
def test_rows_of_one_process(row):
    assert outcomes(row) == ROWS[row]


@pytest.mark.parametrize("row", IN_A_JOB)
def test_rows_of_a_job(pool, row):
    assert pool.run(outcomes, 2, row) == [IN_A_JOB[row]] * 2


def test_torchs_converter_replaces_ours_and_ours_takes_it_back():
    """It takes all layers that derive from torch's, so it must not follow; after it ours makes these ours again."""
    model = CONVERTERS["torch"](convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(2), BatchNormAct(2))))
    assert [type(layer) for layer in model] == [nn.SyncBatchNorm] * 2
    assert all(isinstance(layer, SyncBatchNorm) for layer in convert_sync_batchnorm(model))
