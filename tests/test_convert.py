"""Conversion changes the class and nothing else, and revert brings it back."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

import bagua_syncbn
from bagua_syncbn import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)
from bagua_syncbn.sync_batchnorm import BatchNorm


class BatchNormReLU(nn.BatchNorm2d):
    """A subclass as research code writes them: the layer's own forward, and something after it."""

    def __init__(self, num_features, slope=0.1):
        super().__init__(num_features)
        self.slope = slope

    def forward(self, input):
        return nn.functional.leaky_relu(super().forward(input), self.slope)


class Centered(nn.BatchNorm2d):
    """A subclass that never comes to torch's batch normalization."""

    def forward(self, input):
        return input - input.mean((0, 2, 3), keepdim=True)


class OwnSyncBatchNorm(nn.SyncBatchNorm):
    pass


class LocalSubclass(SyncBatchNorm2d):
    """A subclass of ours that does not say what it becomes."""


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


STANDARD = [
    (nn.BatchNorm1d, SyncBatchNorm1d, (4, 3)),
    (nn.BatchNorm2d, SyncBatchNorm2d, (4, 3, 2, 2)),
    (nn.BatchNorm3d, SyncBatchNorm3d, (4, 3, 2, 2, 2)),
    (BatchNorm, SyncBatchNorm, (4, 3, 2, 2)),
]


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(BatchNormReLU(4), nn.ReLU()))


@pytest.mark.parametrize(("local", "synced", "shape"), STANDARD)
def test_standard_layers(local, synced, shape):
    model = nn.Sequential(local(3))
    layer, attributes = model[0], dict(vars(model[0]))
    assert convert_sync_batchnorm(model) is model
    assert model[0] is layer
    assert type(layer) is synced
    assert vars(layer) == attributes
    model(torch.randn(shape))
    assert revert_sync_batchnorm(model) is model
    assert type(layer) is local
    assert vars(layer) == attributes


def test_everything_about_a_layer_survives():
    model = net()
    layer = model[1]
    before = dict(layer.named_parameters()) | dict(layer.named_buffers())
    calls = []
    layer.register_forward_hook(lambda module, args, output: calls.append("forward"))
    layer.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    layer.register_state_dict_post_hook(lambda module, state, prefix, metadata: calls.append("state_dict"))
    layer.qconfig = "custom"
    layer.weight.requires_grad_(False)
    layer.eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    convert_sync_batchnorm(model)
    assert (dict(layer.named_parameters()) | dict(layer.named_buffers())).keys() == before.keys()
    for name, tensor in before.items():
        assert getattr(layer, name) is tensor
    assert layer.qconfig == "custom"
    assert not layer.training
    assert not layer.weight.requires_grad
    assert model.training
    model(torch.randn(2, 3, 6, 6))
    model.state_dict()
    assert calls == ["pre", "forward", "state_dict"]
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert {id(parameter) for parameter in model.parameters()} == held


def test_a_subclass_keeps_its_forward_and_its_attributes():
    model = net()
    layer = model[2][0]
    input = torch.randn(2, 3, 8, 8)
    expected = copy.deepcopy(model)(input)
    convert_sync_batchnorm(model)
    assert isinstance(layer, BatchNormReLU)
    assert isinstance(layer, SyncBatchNorm)
    assert type(layer).__name__ == "SyncBatchNormReLU"
    assert layer.slope == 0.1
    torch.testing.assert_close(model(input), expected)
    with pytest.raises(ValueError, match="4D"):
        layer(torch.randn(2, 4))
    revert_sync_batchnorm(model)
    assert type(layer) is BatchNormReLU


def test_one_class_for_all_layers_of_a_class():
    first, second = convert_sync_batchnorm(nn.Sequential(BatchNormReLU(2), BatchNormReLU(3)))
    assert type(first) is type(second)


@pytest.mark.parametrize(
    ("cls", "reason"), [(Centered, "would stay unsynchronized"), (OwnSyncBatchNorm, "synchronizes by itself")]
)
def test_a_layer_that_would_stay_unsynchronized_is_refused(cls, reason):
    model = nn.Sequential(nn.BatchNorm2d(2), cls(2))
    with pytest.raises(TypeError, match=f"{cls.__name__}, .*{reason}"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d
    assert type(model[1]) is cls


def test_a_forward_put_on_the_object_is_refused():
    model = nn.Sequential(nn.BatchNorm2d(2))
    model[0].forward = model[0].forward
    with pytest.raises(TypeError, match="BatchNorm2d at '0' with one of its own"):
        convert_sync_batchnorm(model)


def test_shared_layers_stay_one():
    shared = nn.BatchNorm1d(2)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Sequential(shared)})
    model.again = shared
    convert_sync_batchnorm(model)
    assert model["a"] is model["b"] is model["c"][0] is model.again is shared
    assert type(shared) is SyncBatchNorm1d


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm2d(3), nn.SyncBatchNorm(3), BatchNormReLU(3)], ids=lambda m: str(type(m))
)
def test_a_model_that_is_one_layer_is_copied(layer):
    before = type(layer)
    converted = convert_sync_batchnorm(layer)
    assert type(layer) is before
    assert isinstance(converted, SyncBatchNorm)
    assert converted.weight is layer.weight
    assert converted.running_mean is layer.running_mean
    converted.register_forward_hook(lambda *args: None)
    converted.extra = nn.Parameter(torch.ones(1))
    assert not layer._forward_hooks
    assert len(list(layer.parameters())) == 2
    reverted = revert_sync_batchnorm(converted)
    assert type(reverted) is before
    assert isinstance(converted, SyncBatchNorm)


def test_torchs_synchronized_layers():
    model = nn.Sequential(nn.SyncBatchNorm(3, process_group=None))
    layer = model[0]
    convert_sync_batchnorm(model)
    assert isinstance(layer, SyncBatchNorm)
    assert not isinstance(layer, nn.SyncBatchNorm)  # DistributedDataParallel would refuse it on CPU
    assert model(torch.randn(4, 3, 2)).shape == (4, 3, 2)
    pickle.loads(pickle.dumps(model))(torch.randn(4, 3, 2))
    revert_sync_batchnorm(model)
    assert type(layer) is nn.SyncBatchNorm


def test_lazy_layers_convert_before_they_know_their_size():
    model = convert_sync_batchnorm(nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()))
    assert isinstance(model[1], SyncBatchNorm)
    model(torch.randn(2, 3, 6, 6))
    assert type(model[1]) is SyncBatchNorm2d
    assert model[1].num_features == 4
    revert_sync_batchnorm(model)
    assert type(model[1]) is nn.BatchNorm2d

    alone = nn.LazyBatchNorm1d()
    assert convert_sync_batchnorm(alone) is alone  # torch cannot copy it
    assert revert_sync_batchnorm(alone) is alone
    assert type(alone) is nn.LazyBatchNorm1d
    convert_sync_batchnorm(alone)(torch.randn(4, 2))
    assert type(alone) is SyncBatchNorm1d


def test_parametrized_layers_keep_their_parametrization():
    model = nn.Sequential(nn.BatchNorm1d(3))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    input = torch.randn(5, 3)
    expected = copy.deepcopy(model)(input)
    convert_sync_batchnorm(model)
    assert isinstance(model[0], SyncBatchNorm)
    torch.testing.assert_close(model(input), expected)
    revert_sync_batchnorm(model)
    assert parametrize.is_parametrized(model[0], "weight")


def test_converting_twice_changes_the_group_and_nothing_else():
    from bagua_syncbn.communicators import LOCAL, RankGroup

    model = convert_sync_batchnorm(net(), RankGroup((0,)))
    layer, cls = model[1], type(model[1])
    convert_sync_batchnorm(model)
    assert layer.process_group == RankGroup((0,))
    convert_sync_batchnorm(model, LOCAL)
    assert layer.process_group is LOCAL
    assert model[1] is layer
    assert type(layer) is cls


def test_revert_forgets_the_group_and_refuses_what_it_does_not_know():
    from bagua_syncbn.communicators import LOCAL

    model = revert_sync_batchnorm(convert_sync_batchnorm(net(), LOCAL))
    assert not hasattr(model[1], "process_group")
    mixed = nn.Sequential(SyncBatchNorm1d(2), LocalSubclass(2))
    with pytest.raises(TypeError, match="LocalSubclass; set local_class"):
        revert_sync_batchnorm(mixed)
    assert type(mixed[0]) is SyncBatchNorm1d


def test_other_normalizations_are_left_alone():
    model = nn.Sequential(nn.InstanceNorm2d(2, affine=True), nn.GroupNorm(1, 2), nn.LayerNorm(2))
    classes = [type(layer) for layer in model]
    convert_sync_batchnorm(model)
    assert [type(layer) for layer in model] == classes


def test_classmethod():
    model = net()
    assert SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert type(model[1]) is SyncBatchNorm2d


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save", "swa"])
def test_copies_of_converted_models(copied):
    model = convert_sync_batchnorm(net())
    input = torch.randn(2, 3, 8, 8)
    model(input)
    if copied == "deepcopy":
        twin = copy.deepcopy(model)
    elif copied == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    elif copied == "swa":
        twin = torch.optim.swa_utils.AveragedModel(model).module
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    assert torch.equal(twin.eval()(input), model.eval()(input))
    assert twin[1].weight is not model[1].weight
    assert type(revert_sync_batchnorm(twin)[2][0]) is BatchNormReLU


class Wrapped(nn.Module):
    """Stands for a module that Bagua has made data parallel: it has Bagua's mark."""

    def __init__(self):
        super().__init__()
        self.layer = nn.BatchNorm1d(2)
        self.bagua_ddp = object()


def convert_after_wrapping():
    errors = []
    wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(2)))
    replicated = bagua_syncbn.with_bagua(nn.Sequential(nn.BatchNorm1d(2)), [])
    for model in (wrapped, nn.Sequential(wrapped), replicated, Wrapped()):
        try:
            convert_sync_batchnorm(model)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_converting_too_late_says_so(pool):
    for errors in pool.run(convert_after_wrapping, 2):
        assert len(errors) == 4
        assert all("convert first, then wrap" in error for error in errors)


def test_converting_a_compiled_or_scripted_model_says_so():
    compiled = torch.compile(nn.Sequential(nn.BatchNorm1d(2)))
    in_place = nn.Sequential(nn.BatchNorm1d(2))
    in_place.compile()
    for model in (compiled, nn.Sequential(compiled), in_place):
        with pytest.raises(RuntimeError, match="convert, then compile"):
            convert_sync_batchnorm(model)
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        scripted = torch.jit.script(nn.BatchNorm1d(2))
    with pytest.raises(TypeError, match="RecursiveScriptModule at '0'; convert, then script"):
        convert_sync_batchnorm(nn.Sequential(scripted))


def torch_layer_keeps_its_group():
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = nn.Sequential(nn.SyncBatchNorm(1, process_group=groups[dist.get_rank()]))
    convert_sync_batchnorm(model)
    model(torch.full((2, 1), float(dist.get_rank())))
    return model[0].running_mean.item(), model[0].process_group is groups[dist.get_rank()]


def test_a_synchronized_layer_keeps_its_group(pool):
    (first, first_kept), (second, second_kept) = pool.run(torch_layer_keeps_its_group, 2)
    assert first_kept
    assert second_kept
    assert (first, second) == pytest.approx((0.0, 0.1))
