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
CASES = {}


def case(row, torchs, ours):
    """``row`` says what the case is; the function below returns ``torchs`` and ``ours`` for the two converters."""

    def register(function):
        CASES[row] = (function, {"torch": torchs, "ours": ours})
        return function

    return register


def synchronized(layer):
    return isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm))


@case("references, hooks and attributes", (False, 0, False), (True, 2, True))
def identity(convert):
    model = nn.Sequential(nn.BatchNorm2d(2))
    before = model[0]
    before.register_forward_hook(lambda *args: None)
    before.register_state_dict_post_hook(lambda *args: None)
    before.note = "kept"
    layer = convert(model)[0]
    return layer is before, len(layer._forward_hooks) + len(layer._state_dict_hooks), hasattr(layer, "note")


@case("a subclass with a forward of its own", False, True)
def subclass(convert):
    layer = convert(nn.Sequential(BatchNormAct(2)))[0]
    return synchronized(layer) and isinstance(layer, BatchNormAct)


@case("the number of dimensions of the input", "accepted", "ValueError")
def dimensions(convert):
    layer = convert(nn.Sequential(nn.BatchNorm2d(2).eval()))
    try:
        layer(torch.randn(4, 2))
    except ValueError:
        return "ValueError"
    return "accepted"


@case("a layer under two names in one parent", [True, False], [True, True])
def two_names(convert):
    model = nn.Module()
    model.a = model.b = nn.BatchNorm2d(2)
    model = convert(model)
    return [synchronized(model.a), synchronized(model.b)]


@case("modules that hold themselves", "RecursionError", True)
def cycle(convert):
    model = nn.Sequential(nn.BatchNorm2d(2))
    model.me = model
    try:
        return synchronized(convert(model)[0])
    except RecursionError:
        return "RecursionError"


@case("lazy layers", "fails at the first input", "works")
def lazy(convert):
    model = convert(nn.Sequential(nn.LazyBatchNorm1d())).eval()
    try:
        model(torch.randn(4, 2))
    except Exception:
        return "fails at the first input"
    return "works"


@case("a parametrized weight", "TypeError", True)
def parametrized(convert):
    model = nn.Sequential(nn.BatchNorm2d(2))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    try:
        layer = convert(model)[0]
    except TypeError:
        return "TypeError"
    return parametrize.is_parametrized(layer, "weight") and synchronized(layer)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("whose", ["torch", "ours"])
@pytest.mark.parametrize("row", CASES)
def test_rows_of_one_process(row, whose):
    function, expected = CASES[row]
    assert function(CONVERTERS[whose]) == expected[whose]


def rows_of_a_job(whose):
    convert = CONVERTERS[whose]
    group = dist.new_group([0, 1])
    before = nn.Sequential(nn.SyncBatchNorm(2, process_group=group))
    kept = convert(before)[0].process_group is group
    copies = []
    for copied in (copy.deepcopy, pickle.dumps):
        try:
            copied(convert(nn.Sequential(nn.BatchNorm2d(2)), group))
            copies.append("works")
        except TypeError:
            copies.append("TypeError")
    try:
        nn.parallel.DistributedDataParallel(convert(nn.Sequential(nn.BatchNorm2d(2))))
        wrapped = "works"
    except ValueError:
        wrapped = "ValueError"
    try:
        convert(nn.Sequential(nn.BatchNorm2d(2)))(torch.randn(2, 2, 3, 3))
        trained = "works"
    except ValueError:
        trained = "ValueError"
    return kept, copies, wrapped, trained


def test_rows_of_a_job(pool):
    assert pool.run(rows_of_a_job, 2, "torch") == [(False, ["TypeError"] * 2, "ValueError", "ValueError")] * 2
    assert pool.run(rows_of_a_job, 2, "ours") == [(True, ["works"] * 2, "works", "works")] * 2


def test_torchs_converter_replaces_ours_and_ours_takes_it_back():
    """It takes all layers that derive from torch's, so it must not follow; after it ours makes these ours again."""
    model = CONVERTERS["torch"](convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(2), BatchNormAct(2))))
    assert [type(layer) for layer in model] == [nn.SyncBatchNorm] * 2
    assert all(isinstance(layer, SyncBatchNorm) for layer in convert_sync_batchnorm(model))
