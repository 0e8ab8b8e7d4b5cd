"""Converted models with user-written layers: ranks and replicas equal the original model."""

import copy
import operator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bagua_syncbn import SyncBatchNorm, conversion_report, convert_sync_batchnorm, revert_sync_batchnorm
from bagua_syncbn.data_parallel import DataParallelWithCallback
from tests.helpers.steps import check_ranks, through_file
from tests.helpers.user_layers import BatchNormAct, BatchNormReLU, SyncBatchNormAct

SIZES = (1, 3)  # the ranks' batch sizes
BatchNorm = type(revert_sync_batchnorm(SyncBatchNorm(1)))  # for any number of dimensions


class CallsTorchByName(nn.BatchNorm2d):
    def forward(self, input):
        return nn.BatchNorm2d.forward(self, input).tanh()


class CallsAten(nn.BatchNorm2d):
    def forward(self, input):
        factor = 1 / float(self.num_batches_tracked.add_(1)) if self.momentum is None else self.momentum
        buffers = self.running_mean, self.running_var
        return torch.batch_norm(input, self.weight, self.bias, *buffers, self.training, factor, self.eps, False)


class WithPart(nn.BatchNorm2d):
    """A layer with a second torch layer, as in adversarial propagation."""

    def __init__(self, num_features):
        super().__init__(num_features)
        self.part = nn.BatchNorm2d(num_features)

    def forward(self, input):
        return super().forward(input) + self.part(input * 2)


class NormalizesInPart(WithPart):
    """A layer that normalizes with its part in training."""

    def forward(self, input):
        return self.part(input) if self.training else nn.BatchNorm2d.forward(self, input)


class TwoBuffers(nn.BatchNorm2d):
    def __init__(self, num_features):
        super().__init__(num_features)
        self.register_buffer("other_mean", torch.zeros(num_features))
        self.register_buffer("other_var", torch.ones(num_features))

    def forward(self, input):
        factor = 0.1 if self.momentum is None else self.momentum
        return F.batch_norm(input, self.other_mean, self.other_var, None, None, self.training, factor, self.eps)


class CallsSuperOfType(nn.BatchNorm2d):
    """Calls torch's forward through ``super(type(self), self)``, like SparK."""

    def forward(self, input):
        return super(type(self), self).forward(input * 2)


class PlainTorchSync(nn.SyncBatchNorm):
    """A subclass without a custom forward."""


class Frozen(nn.BatchNorm2d):
    """Normalizes with running statistics in training."""

    def forward(self, input):
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class TorchSparse(nn.BatchNorm1d):
    """Passes torch's forward to a function, as in torchsparse.

    A sparse tensor consists of features of points, (points, C), and their coordinates.
    """

    def forward(self, input):
        return self._apply_to_features(input, super().forward)

    @staticmethod
    def _apply_to_features(input, function):
        return SimpleNamespace(features=function(input.features), places=input.places)


class Sparse(nn.Sequential):
    def forward(self, input):
        for layer in self:
            points = layer(SimpleNamespace(features=input, places="kept"))
            assert points.places == "kept"
            input = points.features
        return input


def layers(cls, container=nn.Sequential, **options):
    """Returns two layers; the second has momentum=None."""
    model = container(cls(3, **options), cls(3, **options))
    for part in model[1].modules():
        part.momentum = None
    return model


def of_monai(name, *arguments, **options):
    return getattr(pytest.importorskip("monai.networks.nets"), name)(2, 1, *arguments, **options)


def of_transformers(name, **options):
    package = pytest.importorskip("transformers")
    return getattr(package, f"{name}Model")(getattr(package, f"{name}Config")(num_channels=1, **options))


def of_timm(name):
    return pytest.importorskip("timm").create_model(name, in_chans=1, num_classes=3)


def of_torchvision(name):
    models = pytest.importorskip("torchvision.models")
    return nn.Sequential(nn.Conv2d(1, 3, 1), models.get_model(name, num_classes=3))


OF_PACKAGES = [
    partial(of_monai, "UNet", 2, channels=(4, 8), strides=(2,), norm="batch", dropout=0),
    partial(of_transformers, "ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    # efficientnet_lite0's BatchNormAct2d calls F.batch_norm directly.
    *(partial(of_timm, name) for name in ("resnet10t", "efficientnet_lite0")),
    *(partial(of_torchvision, name) for name in ("resnet18", "mobilenet_v3_small")),
]
PLANAR, IMAGES, UNTRACKED = (3, 4, 4), (1, 64, 64), {"track_running_stats": False}
OF_TORCH = [BatchNorm, nn.SyncBatchNorm]
OWN_FORWARDS = [BatchNormReLU, BatchNormAct, CallsTorchByName, CallsAten, WithPart, NormalizesInPart, TwoBuffers]
OWN_FORWARDS += [SyncBatchNormAct, CallsSuperOfType, Frozen]
# Model constructors, and the shape of a sample.
MODELS = {
    "BatchNorm1d": (partial(layers, nn.BatchNorm1d), (3,)),
    "BatchNorm3d": (partial(layers, nn.BatchNorm3d), (3, 2, 2, 2)),
    **{cls.__name__: (partial(layers, cls), PLANAR) for cls in [PlainTorchSync, *OF_TORCH, *OWN_FORWARDS]},
    "no parameters": (partial(layers, BatchNormAct, affine=False), PLANAR),
    "untracked": (partial(layers, nn.BatchNorm2d, **UNTRACKED), PLANAR),
    "untracked, own forward": (partial(layers, BatchNormAct, **UNTRACKED), PLANAR),
    "untracked, no parameters": (partial(layers, BatchNormAct, affine=False, **UNTRACKED), PLANAR),
    "sparse": (partial(layers, TorchSparse, Sparse), (3,)),
    **{f"{make.func.__name__} {make.args[0]}": (make, IMAGES) for make in OF_PACKAGES},
}


def make(kind):
    torch.manual_seed(0)
    model = MODELS[kind][0]().double()
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
    return model


def batch_of(kind):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(sum(SIZES), *MODELS[kind][1], generator=generator, dtype=torch.float64)


class OneTensor(nn.Module):
    """Returns the first tensor of a model's output; with ``alone``, as if no job were running."""

    def __init__(self, model, alone=False):
        super().__init__()
        self.model, self.alone = model, alone

    def forward(self, input):
        with patch.object(dist, "is_initialized", lambda: False) if self.alone else nullcontext():
            output = self.model(input)
        output = getattr(output, "last_hidden_state", output)
        return output[0] if isinstance(output, (list, tuple)) else output


THROUGH = {
    "nothing": lambda model: model,
    "a file": through_file,
    "compile": partial(torch.compile, backend="eager"),
    "replicas": partial(DataParallelWithCallback, device_ids=["cpu", "cpu"]),
}


def check_model(kind, through, splits):
    """Trains the converted model on this rank's share, and the original on the whole batch; evaluates both."""
    plain, batch, rank = OneTensor(make(kind), alone=True), batch_of(kind), dist.get_rank() if len(splits) > 1 else 0
    model = THROUGH[through](convert_sync_batchnorm(OneTensor(make(kind))))
    for number in range(3):
        check_ranks(model, plain, (number + 1) * batch + number, torch.cos, splits, tolerance=1e-6)
    # Untracked layers normalize with the statistics of their own batch; replicas split it.
    if through != "replicas" or all(getattr(part, "track_running_stats", True) for part in plain.modules()):
        own = batch.split(splits)[rank]
        torch.testing.assert_close(model.eval()(own), plain.eval()(own), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "through"), [
    *((kind, "nothing") for kind in MODELS),
    *((kind, "replicas") for kind in MODELS if MODELS[kind][1] is not IMAGES),
    *(("CallsSuperOfType", through) for through in ("a file", "compile")),
])  # fmt: skip
def test_ranks_and_replicas_of_a_converted_model_equal_one_process(pool, kind, through):
    make(kind)  # skips the test if the package is missing
    if through == "replicas":
        check_model(kind, through, [sum(SIZES)])
    else:
        pool.run(check_model, 2, kind, through, SIZES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "untracked"])  # whose bits are our kernels'
def test_conversion_changes_only_classes_and_revert_restores_them(kind):
    model, batch = OneTensor(make(kind)).eval(), batch_of(kind)
    expected, state, parts = model(batch), model.state_dict(), list(model.modules())
    classes, attributes = [type(part) for part in parts], [dict(vars(part)) for part in parts]
    norms, tensors = [part for part in parts if isinstance(part, _BatchNorm)], [*model.parameters(), *model.buffers()]

    assert convert_sync_batchnorm(model) is model
    assert list(model.modules()) == parts
    assert all(map(operator.is_, [*model.parameters(), *model.buffers()], tensors))
    assert [part for part in parts if isinstance(part, SyncBatchNorm)] == norms != []
    assert sum(row.action == "converted" for row in conversion_report(model).layers) == len(norms)
    for part, cls, before in zip(parts, classes, attributes, strict=True):
        assert isinstance(part, cls) or cls in OF_TORCH
        assert not isinstance(part, nn.SyncBatchNorm)  # DistributedDataParallel rejects nn.SyncBatchNorm on CPU
        for name, value in before.items():
            assert vars(part).get(name) is value
    assert list(model.state_dict()) == list(state)
    assert model.state_dict()._metadata == state._metadata
    model.load_state_dict(state)

    converted = [type(part) for part in parts]
    for each in (copy.deepcopy(model), through_file(model), model):
        assert [type(part) for part in each.modules()] == converted
        assert each is model or not {*map(id, each.parameters())} & {*map(id, model.parameters())}
        assert torch.equal(each(batch), expected)
        assert revert_sync_batchnorm(each) is each
        assert [type(part) for part in each.modules()] == classes
        assert torch.equal(each(batch), expected)
    assert [vars(part) for part in parts] == attributes
    for layer in norms:  # alone
        cls = type(layer)
        assert isinstance(convert_sync_batchnorm(layer), SyncBatchNorm)
        assert type(revert_sync_batchnorm(layer)) is cls
