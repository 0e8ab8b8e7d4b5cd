"""Filters of conversion, and the conversion report."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua_syncbn
from bagua_syncbn import SyncBatchNorm1d, SyncBatchNorm2d, conversion_report, convert_sync_batchnorm, with_bagua
from tests.helpers.fake_packages import ModuleValidator, stand_in_for
from tests.helpers.user_layers import BatchNormReLU


def choice():
    model = nn.ModuleDict({"a": nn.Sequential(nn.BatchNorm2d(2), nn.InstanceNorm2d(2)), "b": BatchNormReLU(2)})
    model["again"] = model["a"][0]
    model["c"] = nn.BatchNorm2d(2)
    model["c"].forward = model["c"].forward
    return model


def data_parallel():
    """Returns a model with Bagua's mark of data parallel models."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.bagua_ddp = object()
    return model


def test_filter_selects_by_name_and_layer():
    asked = []

    def chosen(name, layer):
        asked.append((name, type(layer)))
        return name not in ("a.0", "c")

    model = convert_sync_batchnorm(choice(), filter=chosen)
    assert [type(layer).__name__ for layer in (model["b"], model["c"])] == ["SyncBatchNormReLU", "BatchNorm2d"]
    assert type(model["again"]) is SyncBatchNorm2d  # one of its names is accepted
    assert set(asked) == {
        ("a.0", nn.BatchNorm2d),
        ("again", nn.BatchNorm2d),
        ("b", BatchNormReLU),
        ("c", nn.BatchNorm2d),
    }
    convert_sync_batchnorm(model, 1, filter=lambda name, layer: name == "b")
    assert (model["b"].process_group, model["again"].process_group) == (1, None)

    layer = nn.BatchNorm1d(2)
    assert convert_sync_batchnorm(layer, filter=lambda name, layer: bool(name)) is layer
    for use in (convert_sync_batchnorm, conversion_report):
        with pytest.raises(TypeError, match=r"filter: expected a function .* got str"):
            use(model, filter="b")


def test_filter_may_leave_out_a_refused_submodule():
    model = nn.Sequential(nn.BatchNorm1d(2), data_parallel())
    convert_sync_batchnorm(model, filter=lambda name, layer: not name.startswith("1"))
    assert type(model[0]) is SyncBatchNorm1d
    assert type(model[1][0]) is nn.BatchNorm1d


def test_the_report_previews_conversion():
    model = choice()
    model["wrapped"] = data_parallel()
    model["foreign"] = type("FrozenBatchNorm2d", (nn.Identity,), {})()
    classes = [type(module) for module in model.modules()]
    report = conversion_report(model, filter=lambda name, layer: name != "b")
    assert [type(module) for module in model.modules()] == classes
    assert [(layer.names, type(layer.module).__name__, layer.action) for layer in report.layers] == [
        (["a.0", "again"], "BatchNorm2d", "converted"),
        (["a.1"], "InstanceNorm2d", "skipped"),
        (["b"], "BatchNormReLU", "skipped"),
        (["c"], "BatchNorm2d", "refused"),
        (["wrapped.0"], "BatchNorm1d", "refused"),
        (["foreign"], "FrozenBatchNorm2d", "skipped"),
    ]
    summary, *lines = str(report).splitlines()
    assert summary == "1 converted, 3 skipped, 2 refused"
    assert lines[0] == "converted  a.0, again  BatchNorm2d: becomes SyncBatchNorm2d"
    assert lines[2] == "skipped    b  BatchNormReLU: left out by filter"
    assert "BatchNorm2d 'c' with one of its own" in lines[3]
    assert "convert first, then wrap" in lines[4]
    assert "register_converter" in lines[5]

    convert_sync_batchnorm(model["wrapped"][0])
    report = conversion_report(model["wrapped"])
    assert str(report) == "1 converted, 0 skipped, 0 refused\nconverted  0  SyncBatchNorm1d: synchronized already"
    again = conversion_report(convert_sync_batchnorm(nn.BatchNorm1d(2)))
    assert str(again).splitlines()[1] == "converted  (the model itself)  SyncBatchNorm1d: synchronized already"


@pytest.mark.ranks(1)
def test_the_report_covers_wrapped_models():
    def model():
        return nn.Sequential(convert_sync_batchnorm(nn.BatchNorm1d(2)), nn.Sequential(nn.BatchNorm1d(2)))

    for wrapped, prefix in ((DistributedDataParallel(model()), "module."), (with_bagua(model(), []), "")):
        assert [(layer.names, layer.action) for layer in conversion_report(wrapped).layers] == [
            ([f"{prefix}0"], "converted"),
            ([f"{prefix}1.0"], "refused"),
        ]
        assert str(conversion_report(wrapped, filter=lambda name, layer: "1" not in name)).startswith("1 converted, 0")
        for late in (wrapped, nn.Sequential(wrapped)):
            with pytest.raises(RuntimeError, match="convert first, then wrap"):
                convert_sync_batchnorm(late)


class OfPyG(nn.Module):
    """Like torch_geometric.nn.BatchNorm, a layer that contains a layer."""

    def __init__(self, allow_single_element):
        super().__init__()
        self.module = nn.BatchNorm1d(2)
        self.allow_single_element = allow_single_element


OfPyG.__name__ = "BatchNorm"


def test_pygs_layers_are_reported_once():
    model = nn.Sequential(OfPyG(False), OfPyG(True))
    inner, refused = conversion_report(model).layers
    assert (inner.names, inner.action) == (["0.module"], "converted")
    assert (refused.names, refused.action) == (["1"], "refused")
    with pytest.raises(ValueError, match="allow_single_element=False, got True in BatchNorm '1'"):
        convert_sync_batchnorm(model)
    model[1].allow_single_element = False
    assert type(convert_sync_batchnorm(model)[1].module) is SyncBatchNorm1d


def test_verbose_prints_the_number_of_converted_layers(capsys):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm2d(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_sync_batchnorm(model)
        convert_sync_batchnorm(model, verbose=True)
    assert capsys.readouterr().out == "convert_sync_batchnorm: Sequential: 1 converted, 1 skipped, 0 refused\n"
    with pytest.warns(UserWarning, match="InstanceNorm2d: 0 converted, 1 skipped, 0 refused") as caught:
        convert_sync_batchnorm(model[1])
    assert caught[0].filename == __file__


class StrangeSyncBN(nn.Module):
    """A synchronized layer that does not derive from torch's, as in mmcv and inplace_abn."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))
        self.register_buffer("running_var", torch.ones(2))


def test_foreign_synchronized_layers_are_named():
    model = nn.Sequential(nn.BatchNorm2d(2), StrangeSyncBN())
    (_, stranger) = conversion_report(model).layers
    assert stranger.action == "skipped"
    assert "synchronizes by itself" in stranger.reason
    with pytest.warns(UserWarning, match="synchronize by themselves: StrangeSyncBN '1';") as caught:
        convert_sync_batchnorm(model)
    assert caught[0].filename == __file__
    assert type(model[0]) is SyncBatchNorm2d
    bagua_syncbn.register_converter(StrangeSyncBN, lambda layer: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_sync_batchnorm(model)
        bagua_syncbn.register_converter(StrangeSyncBN, None)
        convert_sync_batchnorm(model, filter=lambda name, layer: not isinstance(layer, StrangeSyncBN))
        unsynchronized = type("ABN", (StrangeSyncBN,), {})()
        convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(2), unsynchronized))
    assert "not derived" in conversion_report(unsynchronized).layers[0].reason


class BatchRenorm1d(nn.Module):
    """Batch normalization by name only, as in torchrl; e3nn and PyG have such classes too."""


class FrozenBatchNorm2d(StrangeSyncBN):
    pass


def test_layers_that_are_batch_normalization_by_name_only_are_named():
    model = nn.ModuleDict({"a": nn.BatchNorm2d(2), "b": BatchRenorm1d(), "c": FrozenBatchNorm2d()})
    model["d"] = BatchRenorm1d()
    with pytest.warns(UserWarning, match="not synchronized: BatchRenorm1d 'b', BatchRenorm1d 'd'; ") as caught:
        convert_sync_batchnorm(model)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_sync_batchnorm(model, filter=lambda name, layer: name not in "bd")
    report = conversion_report(model, filter=lambda name, layer: name != "b")
    assert [layer.reason[:11] for layer in report.layers] == [
        "synchronize",
        "left out by",
        "not derived",
        "not derived",
    ]


def test_a_model_without_batch_normalization_is_called_that():
    with pytest.warns(UserWarning, match="convert_sync_batchnorm: Linear: no batch normalization layers$"):
        convert_sync_batchnorm(nn.Linear(2, 2))
    assert str(conversion_report(nn.Linear(2, 2))) == "no batch normalization layers"


def test_conversion_warns_if_opacus_would_accept_the_layers(monkeypatch):
    model, validators = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm1d(2)), {}
    monkeypatch.setattr(ModuleValidator, "VALIDATORS", validators)
    with stand_in_for("opacus"):
        with pytest.warns(UserWarning, match="in SyncBatchNorm1d, SyncBatchNorm2d; .*VALIDATORS") as caught:
            convert_sync_batchnorm(model)
        assert caught[0].filename == __file__
        validators[SyncBatchNorm1d] = object()
        with pytest.warns(UserWarning, match="in SyncBatchNorm2d;"):
            convert_sync_batchnorm(model)
        validators[SyncBatchNorm2d] = object()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            convert_sync_batchnorm(model)
    validators.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_sync_batchnorm(model)  # opacus is not imported
