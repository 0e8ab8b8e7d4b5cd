"""Stand-ins for packages in code blocks of the documentation, whether the packages are installed or not.

They have the same names, base classes and attributes as in the packages' sources.
"""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class _OwnForward:
    """A forward that computes batch normalization by hand, as these packages do on several ranks."""

    def forward(self, input):
        channel = input.dim() - 1 if getattr(self, "channel_last", False) else 1
        dims = [dim for dim in range(input.dim()) if dim != channel]
        var, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
        normalized = (input - mean) * (var + self.eps).rsqrt()
        return normalized * self.weight.view(mean.shape) + self.bias.view(mean.shape)


class Apex(_OwnForward, _BatchNorm):
    def __init__(self, num_features, process_group=None, channel_last=False, fuse_relu=False):
        super().__init__(num_features)
        self.process_group, self.channel_last, self.fuse_relu = process_group, channel_last, fuse_relu

    def forward(self, input, z=None):
        output = super().forward(input) if z is None else super().forward(input) + z
        return output.relu() if self.fuse_relu else output


class Fairscale(nn.BatchNorm2d):
    def forward(self, input):
        if not dist.is_initialized() or not self.training:
            return super().forward(input)
        return _OwnForward.forward(self, input)


class Detectron2(nn.BatchNorm2d):
    def forward(self, input):
        if not dist.is_initialized() or dist.get_world_size() == 1 or not self.training:
            return super().forward(input)
        return _OwnForward.forward(self, input)


class Mmcv(_OwnForward, nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, 1e-5, 0.1
        self.affine = self.track_running_stats = True
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))


class _Trainer(SimpleNamespace):
    """Stands in for Lightning's Trainer, and for detectron2's DefaultTrainer, which builds the model."""

    @classmethod
    def build_model(cls, cfg):
        return nn.Sequential(nn.BatchNorm2d(8))


class _UltralyticsTrainer:
    """Like Ultralytics' trainers, whose attributes are set once the model is on its device and before it is wrapped."""

    world_size = 2

    def set_model_attributes(self):
        self.model.nc = 80

    def _setup_train(self):
        self.model = nn.Sequential(nn.BatchNorm2d(8))
        self.set_model_attributes()


class DynamicBatchNorm(nn.Module):
    """Like ModelOpt's, a mixin for the layer's class that returns the active part of each tensor."""

    active = None

    def __getattr__(self, name):
        value = super().__getattr__(name)
        return value[: self.active] if name in ("running_mean", "running_var", "weight", "bias") else value


class _Registry(dict):
    """Like ModelOpt's, for layer classes that share the forward of a registered class."""

    def register(self, classes):
        return lambda value: self.update(dict.fromkeys(classes, value)) or value


def modelopts_convert(model, mode):
    for layer in model.modules():
        if type(layer) in DYNAMIC_CLASSES:
            layer.__class__ = type(f"Dynamic{type(layer).__name__}", (DYNAMIC_CLASSES[type(layer)], type(layer)), {})
    return model


DYNAMIC_CLASSES = _Registry()


class ModuleValidator:
    """Like opacus', accepts a model unless a layer's exact class is registered."""

    VALIDATORS: ClassVar = {nn.BatchNorm2d: lambda layer: ["mixes samples"]}

    @classmethod
    def validate(cls, model):
        checked = (layer for layer in model.modules() if type(layer) in cls.VALIDATORS)
        return [error for layer in checked for error in cls.VALIDATORS[type(layer)](layer)]


def _named(cls: type, name: str) -> type:
    return type(name, (cls,), {"forward": cls.forward})


# Contents of modules, by name.
_CONTENTS = {
    "apex.parallel": {"SyncBatchNorm": _named(Apex, "SyncBatchNorm")},
    "detectron2.engine": {"DefaultTrainer": _Trainer},
    "detectron2.layers": {"NaiveSyncBatchNorm": _named(Detectron2, "NaiveSyncBatchNorm")},
    "fairscale.experimental.nn": {"SyncBatchNorm": _named(Fairscale, "SyncBatchNorm")},
    "lightning.pytorch": {"Trainer": _Trainer},
    "lightning.pytorch.plugins": {"LayerSync": type("LayerSync", (), {})},
    "mmcv.ops": {"SyncBatchNorm": _named(Mmcv, "SyncBatchNorm")},
    "modelopt.torch.nas": {"convert": modelopts_convert},
    "modelopt.torch.nas.modules.norm": {"_DynamicBatchNorm": DynamicBatchNorm},
    "modelopt.torch.nas.registry": {"DMRegistry": DYNAMIC_CLASSES},
    "modelopt.torch.trace": {"SymMap": _Registry()},
    "modelopt.torch.trace.modules.nn": {"get_norm_sym_info": lambda layer: None},
    "opacus.validators": {"ModuleValidator": ModuleValidator},
    "ultralytics.models.rtdetr.train": {"RTDETRTrainer": _UltralyticsTrainer},
}
PACKAGES = {name.partition(".")[0] for name in _CONTENTS}


@contextmanager
def stand_in_for(package: str):
    """Makes ``package`` importable, replacing any installed package of that name."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            patch.delitem(sys.modules, name)
        for name, contents in _CONTENTS.items():
            if name.partition(".")[0] == package:
                vars(_module(patch, name)).update(contents)
        yield


def _module(patch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Returns the module ``name``. Creates it, and the packages that contain it, if they do not exist."""
    if name not in sys.modules:
        patch.setitem(sys.modules, name, ModuleType(name))
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(_module(patch, parent), own, sys.modules[name])
    return sys.modules[name]
