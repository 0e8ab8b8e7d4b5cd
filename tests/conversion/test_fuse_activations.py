"""fuse_activations: layers compute adjacent activations; uncertain pairs stay unchanged."""

import copy
import pickle
from collections import OrderedDict
from math import nan

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import fuse_conv_bn_eval, fuse_linear_bn_eval

from bagua_syncbn import (
    SyncBatchNorm2d,
    conversion_report,
    convert_sync_batchnorm,
    fuse_activations,
    masked,
    recompute_outputs,
    revert_sync_batchnorm,
)
from bagua_syncbn.communicators import LOCAL
from tests.helpers.options import UNLIKE_TORCH
from tests.helpers.replicated import parallel
from tests.helpers.steps import check_ranks, draw, step


class Residual(nn.Module):
    """Two layers in a container share an activation, which also runs after the sum."""

    def __init__(self):
        super().__init__()
        act = nn.ReLU(inplace=True)
        first = [nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), act]
        self.body = nn.Sequential(*first, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), act, nn.Conv2d(4, 4, 1))
        self.norm, self.act = nn.BatchNorm2d(4), act

    def forward(self, x):
        return self.act(self.norm(self.body(x)) + x)


class Named(nn.Sequential):
    """A Sequential subclass without a forward, as in torchvision, with inactive dropout, as in MONAI."""

    def __init__(self):
        norm = [("norm", nn.BatchNorm2d(4)), ("none", nn.Identity()), ("drop", nn.Dropout(0.0))]
        super().__init__(OrderedDict([("conv", nn.Conv2d(4, 4, 1)), *norm, ("act", nn.GELU(approximate="tanh"))]))


class Reversed(nn.Sequential):
    def forward(self, x):
        for module in reversed(self):
            x = module(x)
        return x


# Model and number of fused layers.
MODELS = {
    "residual": (Residual, 2),
    "named": (Named, 1),
    "own forward": (lambda: nn.Sequential(Reversed(nn.ReLU(), nn.BatchNorm2d(4)), nn.BatchNorm2d(4), nn.ELU(0.7)), 1),
}


def make_model(kind, process_group=None):
    torch.manual_seed(0)
    model = nn.Sequential(MODELS[kind][0](), MODELS[kind][0]()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return convert_sync_batchnorm(model, process_group)


BATCH, GRAD_OUTPUT = draw(2, 5, 4, 6, 5, seed=1)
MASK = draw(5, 1, 6, 5, seed=3) > -0.5


def results_of(model, batch=BATCH, grad_output=GRAD_OUTPUT):
    """Returns the results of a training step and of an evaluation."""
    results = step(model, batch, grad_output), model.eval()(batch)
    model.train()
    return results


def assert_same(results, expected):
    torch.testing.assert_close(results, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["residual", "named"])
def test_fusing_on_one_rank_equals_one_process(kind):
    alone, model = make_model(kind, LOCAL), make_model(kind)
    if dist.get_rank() == 0:
        fuse_activations(model)
    check_ranks(model, alone, BATCH, GRAD_OUTPUT, [2, 3])


@pytest.mark.parametrize("kind", MODELS)
def test_only_adjacent_pairs_are_fused(kind):
    model = make_model(kind)
    plain, parts, keys = copy.deepcopy(model), list(model.modules()), model.state_dict().keys()
    expected = results_of(copy.deepcopy(plain))
    for _ in range(2):
        assert fuse_activations(model) is model
    assert model.state_dict().keys() == keys
    for fused in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert_same(results_of(fused), expected)
        assert str(conversion_report(fused)).count("; computes ") == 2 * MODELS[kind][1]
        revert_sync_batchnorm(fused.eval())
        for part, other in zip(fused.modules(), revert_sync_batchnorm(plain).modules(), strict=True):
            assert type(part) is type(other)
            assert vars(part).keys() == vars(other).keys()
            assert not part.training
    assert list(model.modules()) == parts


def pair(activation=None):
    torch.manual_seed(0)
    return convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4), activation or nn.SiLU()).double())


def is_fused(model):
    return "FusedActivation(" in repr(model)


class Second(nn.Sequential):
    def __iter__(self):
        return iter([self[1]])


# Changes that prevent fusing.
APART = {
    "a hook on the layer": lambda model: model[0].register_forward_hook(lambda *_: None),
    "a hook before the activation": lambda model: model[1].register_forward_pre_hook(lambda *_: None),
    "a hook for gradients": lambda model: model[1].register_full_backward_hook(lambda *_: None),
    "the layer has its own forward": lambda model: setattr(model[0], "forward", model[0].forward),
    "the container has its own forward": lambda model: setattr(model, "forward", None),
    "the container has its own iteration": lambda model: setattr(model, "__class__", Second),
    "the activation is compiled": lambda model: model[1].compile(backend="eager"),
    "the layer recomputes": lambda model: recompute_outputs(model[0]),
    "the layer runs twice": lambda model: model.append(model[0]),
    "the layer has an activation": lambda model: setattr(model[0], "fused_activation", "tanh"),
    "an activation that layers do not compute": lambda model: model.__setitem__(1, nn.Softplus()),
    "a sigmoid": lambda model: model.__setitem__(1, nn.Sigmoid()),
    "something between": lambda model: model.insert(1, nn.Dropout(1e-9)),
    "no synchronized layer": lambda model: model.__setitem__(0, nn.BatchNorm2d(4).double()),
}


@pytest.mark.parametrize("reason", APART)
def test_uncertain_pairs_are_not_fused(reason):
    model = pair()
    APART[reason](model)
    with pytest.warns(UserWarning, match="fuse_activations: found no synchronized layer"):
        fuse_activations(model)
    assert not is_fused(model)


@pytest.mark.parametrize("cls", [nn.ReLU, nn.GELU, nn.Sigmoid])
@pytest.mark.parametrize("zero_masked", [True, False])
def test_fusing_keeps_masked_positions(cls, zero_masked):
    model, batch = pair(cls()), BATCH.masked_fill(~MASK, nan if zero_masked else 1)
    fused, results = copy.deepcopy(model), []
    if cls is not nn.Sigmoid:  # sigmoid(0) is not 0
        fuse_activations(fused)
    for each in (model, fused):
        with masked(each, MASK, zero_masked=zero_masked):
            results.append(step(each, batch, GRAD_OUTPUT))
    torch.testing.assert_close(*results, equal_nan=True)


def test_fusing_works_with_recomputed_outputs_and_replicas(single_threaded):
    batch, grad_output = BATCH[:4], GRAD_OUTPUT[:4]
    expected, evaluated = results_of(make_model("residual"), batch, grad_output)
    for model in (
        recompute_outputs(fuse_activations(make_model("residual"))),
        fuse_activations(recompute_outputs(make_model("residual"))),
        parallel(fuse_activations(make_model("residual")), "cpu", 2),
    ):
        results, found = results_of(model, batch, grad_output)
        assert_same(
            ({name.removeprefix("module."): value for name, value in results.items()}, found), (expected, evaluated)
        )


def test_revert_undoes_only_fusing():
    model = fuse_activations(pair().eval())
    assert "activation='silu')\n  (1): FusedActivation(SiLU())" in repr(model)
    assert "SyncBatchNorm2d: synchronized already; computes 'silu'" in str(conversion_report(model))
    with pytest.raises(ValueError, match=r"fused_activation=.*silu"):
        revert_sync_batchnorm(model[0])
    model[0].fused_activation = "relu"
    with pytest.raises(ValueError, match=r"fused_activation=.*relu"):
        revert_sync_batchnorm(model)
    assert is_fused(model)
    model[0].fused_activation = "silu"
    reverted = [(type(part), part.training) for part in revert_sync_batchnorm(model)]
    assert reverted == [(nn.BatchNorm2d, False), (nn.SiLU, False)]


@pytest.mark.parametrize(("name", "value"), UNLIKE_TORCH.items())
def test_folding_a_layer_that_does_more_than_scale_raises(name, value):
    layer = SyncBatchNorm2d(4, **{name: value}).eval()
    for fold, other in ((fuse_conv_bn_eval, nn.Conv2d(4, 4, 1)), (fuse_linear_bn_eval, nn.Linear(4, 4))):
        fold(other.eval(), SyncBatchNorm2d(4).eval())
        with pytest.raises(ValueError, match=f"cannot fold SyncBatchNorm2d with .*{name}="):
            fold(other, layer)
