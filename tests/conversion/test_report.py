"""Filters of conversion, its warnings, and the conversion report."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua_syncbn import (
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    conversion_report,
    convert_sync_batchnorm,
    freeze_statistics,
    register_converter,
    unfreeze_statistics,
    with_bagua,
)
from tests.helpers.user_layers import BatchNormReLU


class BatchRenorm1d(nn.Module):
    """Batch normalization by name only, like torchrl's class."""


class StrangeSyncBN(nn.Module):
    """A synchronized layer that does not derive from torch's, like mmcv's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))
        self.register_buffer("running_var", torch.ones(2))


class FrozenBatchNorm2d(StrangeSyncBN):
    pass


class FrozenBatchNorm1d(nn.Module):
    """Frozen batch normalization by name only."""


def choice():
    model = nn.ModuleDict({"a": nn.Sequential(nn.BatchNorm2d(2), nn.InstanceNorm2d(2)), "b": BatchNormReLU(2)})
    model["again"] = model["a"][0]
    model["c"] = nn.BatchNorm2d(2)
    model["c"].forward = model["c"].forward
    model["wrapped"] = nn.Sequential(nn.BatchNorm1d(2))
    model["wrapped"].bagua_ddp = object()  # Bagua's mark of data parallel models
    return model


@contextmanager
def conversion_warns(match=None):
    """Context manager that expects a warning about the caller's line, or no warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [warning.filename for warning in caught] == ([__file__] if match else [])
    assert not match or match in str(caught[0].message)


def test_filter_selects_by_name_and_layer():
    model = choice()
    convert_sync_batchnorm(model, filter=lambda name, layer: name not in ("a.0", "c", "wrapped.0"))
    assert [type(model[name]).__name__ for name in "bc"] == ["SyncBatchNormReLU", "BatchNorm2d"]
    assert type(model["again"]) is SyncBatchNorm2d  # the filter accepts one of its names
    assert type(model["wrapped"][0]) is nn.BatchNorm1d
    convert_sync_batchnorm(model, 1, filter=lambda name, layer: name == "b")
    assert (model["b"].process_group, model["again"].process_group) == (1, None)
    for use in (convert_sync_batchnorm, conversion_report, freeze_statistics, unfreeze_statistics):
        with pytest.raises(TypeError, match=r"filter: expected a function .* got str"):
            use(model, filter="b")
        with pytest.raises(TypeError, match=r"filter: expected a function filter\(name, module\).* got .*\(name\)$"):
            use(model, filter=lambda name: True)


def test_the_report_previews_conversion():
    model = choice()
    model["foreign"] = FrozenBatchNorm2d()
    classes = [type(module) for module in model.modules()]
    report = conversion_report(model, filter=lambda name, layer: name != "b")
    assert [type(module) for module in model.modules()] == classes
    expected = [
        "1 converted, 3 skipped, 2 refused",
        "converted  a.0, again  BatchNorm2d: becomes SyncBatchNorm2d",
        "skipped    a.1  InstanceNorm2d: not batch normalization: it normalizes each sample by itself",
        "skipped    b  BatchNormReLU: left out by filter",
        "refused    c  BatchNorm2d: module: cannot convert BatchNorm2d 'c' because its forward is assigned",
        "refused    wrapped.0  BatchNorm1d: module: cannot convert BatchNorm1d 'wrapped.0' in data parallel",
        "skipped    foreign  FrozenBatchNorm2d: has running statistics",
    ]
    for line, begin in zip(str(report).splitlines(), expected, strict=True):
        assert line.startswith(begin)
    assert report.layers[0].module is model["again"]
    layer = convert_sync_batchnorm(nn.BatchNorm1d(2))
    assert str(conversion_report(layer)).endswith(
        "\nconverted  (the model itself)  SyncBatchNorm1d: synchronized already"
    )
    assert str(conversion_report(nn.Linear(2, 2))) == "no batch normalization layers"


@pytest.mark.ranks(1)
def test_the_report_covers_wrapped_models():
    def model():
        return nn.Sequential(convert_sync_batchnorm(nn.BatchNorm1d(2)), nn.Sequential(nn.BatchNorm1d(2)))

    for wrapped, prefix in ((DistributedDataParallel(model()), "module."), (with_bagua(model(), []), "")):
        rows = [(layer.names, layer.action) for layer in conversion_report(wrapped).layers]
        assert rows == [([f"{prefix}0"], "converted"), ([f"{prefix}1.0"], "refused")]
        for late in (wrapped, nn.Sequential(wrapped)):
            with pytest.raises(RuntimeError, match="convert first, then wrap"):
                convert_sync_batchnorm(late)


class OfPyG(nn.Module):
    """A layer that contains a layer, like torch_geometric.nn.BatchNorm."""

    def __init__(self, allow_single_element):
        super().__init__()
        self.module = nn.BatchNorm1d(2)
        self.allow_single_element = allow_single_element


OfPyG.__name__ = "BatchNorm"


def test_pygs_layers_are_reported_once():
    model = nn.Sequential(OfPyG(False), OfPyG(True))
    rows = [(layer.names, layer.action) for layer in conversion_report(model).layers]
    assert rows == [(["0.module"], "converted"), (["1"], "refused")]
    with pytest.raises(ValueError, match="allow_single_element=False in BatchNorm '1', got True"):
        convert_sync_batchnorm(model)
    model[1].allow_single_element = False
    assert type(convert_sync_batchnorm(model)[1].module) is SyncBatchNorm1d


def test_a_conversion_of_nothing_warns():
    with conversion_warns():
        convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm2d(2)))
    with conversion_warns("InstanceNorm2d: 0 converted, 1 skipped, 0 refused"):
        convert_sync_batchnorm(nn.InstanceNorm2d(2))
    with conversion_warns("convert_sync_batchnorm: Linear: no batch normalization layers"):
        convert_sync_batchnorm(nn.Linear(2, 2))


def test_conversion_warns_of_layers_that_resemble_batch_normalization():
    model = nn.ModuleDict(
        {"a": nn.BatchNorm2d(2), "b": BatchRenorm1d(), "c": FrozenBatchNorm2d(), "d": StrangeSyncBN()}
    )
    model["e"] = FrozenBatchNorm1d()
    with conversion_warns("cannot convert BatchRenorm1d 'b', StrangeSyncBN 'd', not derived"):
        convert_sync_batchnorm(model)
    report = conversion_report(model, filter=lambda name, layer: name != "b")
    reasons = [layer.reason[:11] for layer in report.layers]
    assert reasons == ["synchronize", "left out by", "has running", "not derived", "named like "]
    with conversion_warns():
        convert_sync_batchnorm(model, filter=lambda name, layer: name not in "bd")
        register_converter(StrangeSyncBN, lambda layer: None)
        convert_sync_batchnorm(model, filter=lambda name, layer: name != "b")
        register_converter(StrangeSyncBN, None)
