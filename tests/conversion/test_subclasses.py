"""Layers with a custom forward are synchronized, or raise an error."""

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bagua_syncbn import SyncBatchNorm2d, convert_sync_batchnorm, register_converter, revert_sync_batchnorm
from tests.conversion.test_models import NormalizesInPart, WithPart
from tests.helpers.fake_packages import Mmcv
from tests.helpers.user_layers import BatchNormAct, Centered


class OfGhosts(nn.BatchNorm2d):
    """Normalizes parts of the batch separately."""

    def forward(self, input):
        mean, var = self.running_mean.repeat(2), self.running_var.repeat(2)
        halves = F.batch_norm(input.view(-1, 6, 4, 4), mean, var, training=self.training)
        return super().forward(halves.view_as(input))


@pytest.mark.parametrize(("cls", "what"), [
    (Centered, "called neither"),
    (NormalizesInPart, "called neither"),  # its part is left out by filter
    (OfGhosts, "called F.batch_norm with tensors that are not the layer's"),
])  # fmt: skip
def test_an_unsynchronized_forward_raises(cls, what):
    model, input = nn.Sequential(cls(3)), torch.randn(4, 3, 4, 4)
    convert_sync_batchnorm(model, filter=lambda name, layer: "part" not in name)
    with pytest.raises(RuntimeError, match=re.escape(f"{cls.__module__}.{cls.__name__}: cannot") + ".*" + what):
        model(input)
    model.eval()(input)
    revert_sync_batchnorm(model).train()(input)


@pytest.mark.ranks(2)
def test_custom_forwards_use_the_group_of_the_layer():
    layer = convert_sync_batchnorm(BatchNormAct(1, momentum=1.0), [[0], [1]])
    layer(torch.full((2, 1, 1, 1), float(dist.get_rank())))
    assert layer.running_mean.item() == dist.get_rank()


def test_a_filtered_part_stays_unchanged():
    model, input = nn.Sequential(WithPart(3)), torch.randn(4, 3, 2, 2)
    expected = copy.deepcopy(model)(input)
    convert_sync_batchnorm(model, filter=lambda name, layer: not name.endswith("part"))
    torch.testing.assert_close(model(input), expected)
    assert type(model[0].part) is nn.BatchNorm2d
    assert model[0].part.num_batches_tracked == 1


class InChunks(nn.BatchNorm2d):
    """A recursive forward."""

    def forward(self, input, chunks=2):
        if chunks > 1:
            return torch.cat([self(chunk, 1) for chunk in input.chunk(chunks)])
        if self.eps == 0:
            raise ArithmeticError
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, True)


def test_a_recursive_forward_leaves_no_state():
    layer, input = convert_sync_batchnorm(InChunks(3)), torch.randn(4, 3, 5, 5)
    before = vars(copy.deepcopy(layer)).keys()
    torch.testing.assert_close(layer(input), InChunks(3)(input))
    layer.eps = 0
    with pytest.raises(ArithmeticError):
        layer(input)
    assert vars(copy.deepcopy(layer)).keys() == before


# Registered converters


class Foreign(Mmcv):
    """A layer that does not derive from torch's, without momentum."""

    def __init__(self, num_features):
        super().__init__(num_features)
        del self.momentum
        self.process_group = "its own"

    def forward(self, input):
        return super().forward(input).relu()


class SyncForeign(SyncBatchNorm2d):
    local_class, momentum = Foreign, 0.1

    def forward(self, input):
        return super().forward(input).relu()


@pytest.fixture
def registered():
    register_converter(Foreign, lambda layer: SyncForeign if layer.num_features > 2 else None)
    register_converter(Centered, lambda layer: SyncBatchNorm2d)
    yield
    for cls in (Foreign, Centered):
        register_converter(cls, None)


@pytest.mark.usefixtures("registered")
def test_a_registered_converter_is_used_and_undone():
    model = nn.Sequential(Foreign(3), Centered(3), Foreign(2))
    layers, weight, input = list(model), model[0].weight, torch.randn(4, 3, 5, 5)
    expected = copy.deepcopy(model[0])(input)
    convert_sync_batchnorm(model, 1)
    convert_sync_batchnorm(model)
    assert list(model) == layers
    assert isinstance(model[0], SyncForeign)
    assert isinstance(model[1], SyncBatchNorm2d)
    assert type(model[2]) is Foreign
    assert model[0].weight is weight
    assert model[0].process_group == 1
    torch.testing.assert_close(model[0](input), expected)
    register_converter(Foreign, None)  # files can be loaded without the converter
    for net in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), model):
        assert isinstance(net[0], SyncForeign)
        revert_sync_batchnorm(net)
        assert [type(layer) for layer in net] == [Foreign, Centered, Foreign]
        assert net[0].process_group == "its own"
        assert not hasattr(net[1], "process_group")


def test_register_converter_checks_its_arguments():
    models = nn.Sequential(nn.Linear(1, 1)), "got Sequential$"
    for cls, got in ((int, "got <class 'int'>"), ("Foreign", ""), (SyncBatchNorm2d, ""), models):
        with pytest.raises(TypeError, match=f"cls: expected .*{got}"):
            register_converter(cls, None)
    for converter, got in (
        ("SyncForeign", r"\(layer\), or None, got str"),
        (SyncForeign, r"of a layer, such as lambda layer: .*, got <class .*SyncForeign'>"),
        (SyncForeign(3), r"of a layer, such as lambda layer: .*, got SyncForeign\(3"),
        (lambda: SyncForeign, r"\(layer\), or None, got a function with the arguments \(\)"),
    ):
        with pytest.raises(TypeError, match=f"converter: expected a function .*{got}"):
            register_converter(Foreign, converter)


@pytest.mark.usefixtures("registered")
def test_classes_of_converters_are_checked():
    register_converter(Foreign, lambda layer: nn.BatchNorm2d)
    with pytest.raises(TypeError, match=r"converter of .*test_subclasses\.Foreign: expected .*, got .*BatchNorm2d"):
        convert_sync_batchnorm(nn.Sequential(Foreign(3)))
