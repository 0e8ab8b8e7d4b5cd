"""Conversion changes only the class of layers, and revert restores it."""

import copy
import inspect
import pickle
import re
import sys
from contextlib import suppress
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import SyncBatchNorm as ImportedBefore
from torch.nn.utils import parametrize

from bagua_syncbn import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    accumulate_statistics,
    conversion_report,
    convert_sync_batchnorm,
    freeze_statistics,
    fuse_activations,
    masked,
    patch_torch_converter,
    recalibrate_statistics,
    recompute_outputs,
    register_converter,
    revert_sync_batchnorm,
    unfreeze_statistics,
    with_bagua,
)
from bagua_syncbn.communicators import LOCAL
from bagua_syncbn.conversion.models import is_data_parallel
from tests.helpers.options import UNLIKE_TORCH
from tests.helpers.user_layers import BatchNormReLU, Doubled, SyncBatchNormAct


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(BatchNormReLU(4), nn.ReLU()))


# Converted layers


@pytest.mark.parametrize(("local", "synced"), [
    *((nn.BatchNorm1d, SyncBatchNorm1d), (nn.BatchNorm2d, SyncBatchNorm2d), (nn.BatchNorm3d, SyncBatchNorm3d)),
    (type(revert_sync_batchnorm(SyncBatchNorm(1))), SyncBatchNorm),
])  # fmt: skip
def test_torchs_layers_convert_and_revert(local, synced):
    assert type(convert_sync_batchnorm(local(3))) is synced
    assert type(revert_sync_batchnorm(synced(3))) is local


USES = convert_sync_batchnorm, revert_sync_batchnorm, conversion_report, fuse_activations
USES += partial(recompute_outputs, enabled=False), partial(with_bagua, optimizers=[])
USES += freeze_statistics, unfreeze_statistics


@pytest.mark.parametrize("use", USES)
def test_arguments_that_are_not_modules_raise(use):
    for what in (nn.BatchNorm2d, [nn.BatchNorm2d(3)], None):
        with pytest.raises(TypeError, match=f"module: expected a torch.nn.Module, got {type(what).__name__}"):
            use(what)


def test_errors_name_the_layer_in_the_model():
    model = net()
    model.again = model[1]
    model.me = model
    copied = pickle.loads(pickle.dumps(copy.deepcopy(convert_sync_batchnorm(model))))
    for layer, name in ((copied[1], "SyncBatchNorm2d '1'"), (copied[2][0], "SyncBatchNormReLU '2.0'")):
        with pytest.raises(RuntimeError, match=f"^{name}: input: expected 4 channels"):
            layer(torch.randn(2, 3, 5, 5))


def test_lazy_layers_convert_before_they_know_their_size():
    model = convert_sync_batchnorm(nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()))
    assert isinstance(model[1], SyncBatchNorm)
    model(torch.randn(2, 3, 6, 6))
    assert type(model[1]) is SyncBatchNorm2d
    assert model[1].num_features == 4
    revert_sync_batchnorm(model)
    assert type(model[1]) is nn.BatchNorm2d


# Refusals


class Slotted(nn.BatchNorm2d):
    """Python forbids assigning a class that does not derive from it."""

    __slots__ = ("foo",)


class FixedGroup(nn.BatchNorm2d):
    @property
    def process_group(self):
        return None


class BecomesSlotted(SyncBatchNorm2d):
    local_class = Slotted


class LocalSubclass(SyncBatchNorm2d):
    """A subclass of ours without ``local_class``."""


def scripted():
    return torch.jit.script(nn.BatchNorm1d(2))


def wrapped():
    layer = nn.BatchNorm2d(2)
    layer.forward = partial(layer.forward)
    return layer


# Each row: a function, a layer that makes it refuse the model, and the error.
REFUSED = [
    (partial(convert_sync_batchnorm, process_group=1), partial(FixedGroup, 2), AttributeError, "process_group"),
    (convert_sync_batchnorm, scripted, TypeError, "RecursiveScriptModule '2'; convert and train the original module"),
    (convert_sync_batchnorm, wrapped, TypeError, "BatchNorm2d '2'.*subclass, or convert before hooks"),
    (revert_sync_batchnorm, partial(BecomesSlotted, 2), TypeError, "__class__ assignment"),
    (revert_sync_batchnorm, partial(LocalSubclass, 2), TypeError, "LocalSubclass, which has no local_class; set it"),
    (revert_sync_batchnorm, partial(SyncBatchNorm, 2, activation="relu"), ValueError, "has no fused_activation='relu'"),
    *(
        (revert_sync_batchnorm, partial(SyncBatchNorm2d, 2, **{name: value}), ValueError, f"Norm2d.*{name}=")
        for name, value in UNLIKE_TORCH.items()
    ),
]


def facts(model):
    """Returns classes, attributes and process groups of all parts."""
    groups = [part.process_group for part in model.modules() if isinstance(part, SyncBatchNorm)]
    return groups, [(type(part), vars(part) | {"_sync_state": None}) for part in model.modules()]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("change", "make", "error", "message"), REFUSED)
def test_a_refused_conversion_leaves_the_model_unchanged(change, make, error, message):
    model = nn.Sequential(nn.SyncBatchNorm(2), SyncBatchNorm2d(2, process_group=LOCAL))
    if change is revert_sync_batchnorm:
        convert_sync_batchnorm(model, 1)
    recompute_outputs(model.append(make()))
    before = facts(model)
    with pytest.raises(error, match=message):
        change(model)
    assert facts(model) == before


@pytest.mark.parametrize("in_place", [False, True])
def test_conversion_and_freezing_recompile_a_compiled_model(in_place):
    torch.compiler.reset()
    model = compiled = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0))
    # Without guards, torch keeps using the compiled code.
    options = {"backend": "eager", "options": {"guard_filter_fn": lambda guards: [False] * len(guards)}}
    if in_place:
        model.compile(**options)
    else:
        compiled = torch.compile(model, **options)
    compiled(torch.full((4, 1), 2.0))
    for change, value, mean in (
        (partial(convert_sync_batchnorm, skip_nonfinite=True), torch.inf, 2),
        (freeze_statistics, 3.0, 2),
        (unfreeze_statistics, 3.0, 3),
        (revert_sync_batchnorm, torch.inf, torch.inf),
    ):
        assert change(compiled).train() is compiled
        compiled(torch.full((4, 1), value))
        assert model[0].running_mean.item() == mean


class Labeled(torch.Tensor):
    pass


def test_changes_of_a_model_do_not_need_modules_that_another_thread_is_importing(monkeypatch):
    for name in (
        "torch._dynamo.eval_frame",
        "torch.distributed._composable.replicate",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "bagua.torch_api.communication",
        "numpy.random",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # in sys.modules, but still without its names
    model = nn.Sequential(nn.BatchNorm2d(3))
    for change in (convert_sync_batchnorm, freeze_statistics, unfreeze_statistics, revert_sync_batchnorm):
        assert change(model) is model
    recalibrate_statistics(convert_sync_batchnorm(model), [torch.randn(4, 3, 2, 2)])
    assert not is_data_parallel(model)
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    assert type(convert_sync_batchnorm(model)(torch.randn(4, 3, 2, 2).as_subclass(Labeled))) is Labeled
    with pytest.raises(TypeError, match="process_group: expected None"):
        convert_sync_batchnorm(model, object())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripting_a_converted_model_raises():
    """Otherwise, torch would replace the synchronized layer in the given model."""
    model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(2, 3, 1), nn.Sequential(BatchNormReLU(3))))
    layer = model[1][0]
    message = f"cannot script {type(layer).__name__}; script bagua_syncbn.revert_sync_batchnorm(copy.deepcopy(model))"
    for module in (model, layer):
        with pytest.raises(TypeError, match=re.escape(message)):
            torch.jit.script(module)
    assert model[1][0] is layer
    assert isinstance(layer, SyncBatchNorm)


@pytest.mark.parametrize("context", [accumulate_statistics, partial(masked, mask=torch.ones(1, 1, 1, 1).bool())])
def test_revert_raises_inside_contexts(context):
    model = convert_sync_batchnorm(net())
    with context(model):
        with pytest.raises(RuntimeError, match=r"module: cannot revert SyncBatchNorm2d '1' inside .*; leave it first"):
            revert_sync_batchnorm(model)
        model(torch.randn(2, 3, 5, 5))
    assert model[1].num_batches_tracked == 1
    revert_sync_batchnorm(model)


@pytest.mark.parametrize("given", ["by conversion", "at construction", "later"])
def test_options_end_with_revert(given):
    """The next conversion uses the defaults, and the layer has no attribute that torch's layer lacks."""
    skips = {"skip_nonfinite": True}
    layer = SyncBatchNorm2d(2, **skips) if given == "at construction" else nn.BatchNorm2d(2)
    convert_sync_batchnorm(layer, **(skips if given == "by conversion" else {}))
    if given == "later":
        layer.skip_nonfinite = True
        layer.eps_mode, layer.fused_activation = "plus", None
    assert "skip_nonfinite=True" in repr(layer)
    assert vars(revert_sync_batchnorm(layer)).keys() == vars(nn.BatchNorm2d(2)).keys()
    assert not convert_sync_batchnorm(layer).skip_nonfinite


class Skipping(nn.BatchNorm2d):
    skip_nonfinite = True


def test_revert_keeps_options_of_the_original_class():
    layer = Skipping(2)
    layer.skip_nonfinite = False
    assert not revert_sync_batchnorm(convert_sync_batchnorm(layer)).skip_nonfinite
    assert Skipping(2).skip_nonfinite


# Parametrizations


@pytest.mark.parametrize("parametrized_first", [True, False])
@pytest.mark.parametrize("cls", [nn.BatchNorm2d, BatchNormReLU])
def test_parametrizations_survive_conversion_and_revert(cls, parametrized_first):
    model, input = nn.Sequential(cls(3)), torch.randn(4, 3, 2, 2)
    layer = model[0]
    if not parametrized_first:
        convert_sync_batchnorm(model)
    for name in ("weight", "bias"):
        parametrize.register_parametrization(layer, name, Doubled())
    for sync in ("Sync", "", "Sync"):
        (convert_sync_batchnorm if sync else revert_sync_batchnorm)(model)
        assert type(layer).__name__ == f"Parametrized{sync}{cls.__name__}"
        assert (isinstance(layer, SyncBatchNorm), isinstance(layer, cls)) == (bool(sync), True)
        assert layer.weight.tolist() == [2, 2, 2]
    parametrize.remove_parametrizations(layer, "weight")
    assert isinstance(layer, SyncBatchNorm)
    twin = revert_sync_batchnorm(copy.deepcopy(model))
    assert not isinstance(twin[0], SyncBatchNorm)
    assert parametrize.is_parametrized(twin[0], "bias")
    torch.testing.assert_close(twin(input), model(input))
    parametrize.remove_parametrizations(layer, "bias")
    assert not parametrize.is_parametrized(layer)
    assert isinstance(layer, SyncBatchNorm)
    assert layer.weight.tolist() == [2, 2, 2]
    assert type(revert_sync_batchnorm(model)[0]) is cls


# Copies, states and groups


@pytest.mark.ranks(2)
@pytest.mark.parametrize("convert_first", [True, False])
def test_sharded_layers_synchronize_whenever_they_are_converted(convert_first):
    model = nn.Sequential(nn.BatchNorm2d(2, momentum=1.0), BatchNormReLU(2))
    if convert_first:
        convert_sync_batchnorm(model)
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    rank = dist.get_rank()
    for change in (convert_sync_batchnorm, revert_sync_batchnorm, convert_sync_batchnorm):
        change(model)(torch.full((2, 2, 2, 2), float(rank))).square().sum().backward()
        sync, mean = ("", rank) if change is revert_sync_batchnorm else ("Sync", 0.5)
        assert [type(layer).__name__ for layer in model] == [f"FSDP{sync}BatchNorm2d", f"FSDP{sync}BatchNormReLU"]
        assert model[0].running_mean[0].item() == mean


@pytest.mark.ranks(2)
def test_revert_restores_the_group_of_torchs_layers():
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    model = nn.Sequential(*(nn.SyncBatchNorm(1, process_group=groups[0]) for _ in range(2)))
    convert_sync_batchnorm(model, groups[1])
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    convert_sync_batchnorm(model, "node")
    for reverted in map(revert_sync_batchnorm, (model, twin)):
        assert all(layer.process_group is groups[0] for layer in reverted)
    for layer in revert_sync_batchnorm(loaded):  # files hold ranks, but torch's layers need a group
        assert dist.get_process_group_ranks(layer.process_group) == [0, 1]


class Foreign(nn.BatchNorm2d):
    """A layer of another package, which names its group differently."""


@pytest.mark.ranks(2)
def test_conversion_finds_the_group_of_other_packages_layers():
    group, other = dist.new_group([0, 1]), dist.new_group([1, 0])
    register_converter(Foreign, lambda layer: SyncBatchNorm2d)
    try:
        layer = Foreign(1)
        layer.group = group
        assert convert_sync_batchnorm(layer).process_group is group
        assert convert_sync_batchnorm(layer, other).process_group is other
        assert revert_sync_batchnorm(layer).group is group
        layer.second = other
        with pytest.raises(TypeError, match="Foreign has several process groups"):
            convert_sync_batchnorm(layer)
        assert type(layer) is Foreign
    finally:
        register_converter(Foreign, None)


# Trainers that call torch's converter or build torch's layer


def torch_functions():
    functions = vars(nn.SyncBatchNorm)["__init__"], vars(nn.SyncBatchNorm)["convert_sync_batchnorm"]
    return functions, [inspect.signature(f) for f in (nn.SyncBatchNorm, nn.SyncBatchNorm.convert_sync_batchnorm)]


def test_the_patch_keeps_signatures_and_is_undone_by_close():
    before, signatures = torch_functions()
    outer = patch_torch_converter()
    patched = torch_functions()
    assert patched[1] == signatures
    with suppress(KeyError), patch_torch_converter():
        model = nn.Sequential(BatchNormReLU(2), SyncBatchNormAct(2), ImportedBefore(2, process_group=1))
        assert [isinstance(layer, SyncBatchNorm) for layer in model] == [False, True, True]
        assert ImportedBefore.convert_sync_batchnorm(model) is model
        raise KeyError
    assert torch_functions() == patched
    outer.close()
    assert torch_functions() == (before, signatures)
    assert all(isinstance(layer, SyncBatchNorm) for layer in model)
    assert [layer.process_group for layer in model] == [None, None, 1]
    assert model[1](torch.randn(4, 2)).min() == 0
    revert_sync_batchnorm(model)
    assert [type(layer) for layer in model] == [BatchNormReLU, SyncBatchNormAct, nn.SyncBatchNorm]
    assert model[2].process_group == 1
