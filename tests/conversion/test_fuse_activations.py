"""Layers that compute the activations next to them; what is not certain is left alone."""

import copy
import pickle
from collections import OrderedDict
from contextlib import nullcontext
from math import nan

import pytest
import torch
import torch.distributed as dist
from torch import nn

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
from bagua_syncbn.conversion.fusing import FusedActivation
from bagua_syncbn.ops.activations import MODULES as ACTIVATIONS
from tests.helpers.replicated import parallel


class Residual(nn.Module):
    """Two layers that share an activation, in a container, and one that works by itself after the sum."""

    def __init__(self):
        super().__init__()
        act = nn.ReLU(inplace=True)
        first = [nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), act]
        self.body = nn.Sequential(*first, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), act, nn.Conv2d(4, 4, 1))
        self.norm, self.act = nn.BatchNorm2d(4), act

    def forward(self, x):
        return self.act(self.norm(self.body(x)) + x)


class Named(nn.Sequential):
    """A subclass without a forward of its own, as torchvision's, and dropout that drops nothing, as MONAI's."""

    def __init__(self):
        norm = [("norm", nn.BatchNorm2d(4)), ("none", nn.Identity()), ("drop", nn.Dropout(0.0))]
        super().__init__(OrderedDict([("conv", nn.Conv2d(4, 4, 1)), *norm, ("act", nn.GELU(approximate="tanh"))]))


class Reversed(nn.Sequential):
    def forward(self, x):
        for module in reversed(self):
            x = module(x)
        return x


# Each with how many of its layers compute their activation.
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


def draw(size=5):
    """Returns a batch, a gradient of its output, and a mask."""
    generator = torch.Generator().manual_seed(1)
    batch, grad_output = torch.randn(2, size, 4, 6, 5, generator=generator, dtype=torch.float64)
    return batch, grad_output, torch.rand(size, 1, 6, 5, generator=generator) > 0.3


def step(model, batch, grad_output, mask=None):
    """Returns results for each sample, and those of the model: gradients, which ranks add up, and buffers."""
    input = batch.clone().requires_grad_()
    with nullcontext() if mask is None else masked(model, mask):
        output = model(input)
    output.backward(grad_output)
    with torch.no_grad():
        evaluated = model.eval()(batch)
    model.train()
    return [output.detach(), evaluated, input.grad], [p.grad for p in model.parameters()], list(model.buffers())


def assert_same(results, expected):
    torch.testing.assert_close(results, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("kind", ["residual", "named"])
def test_ranks_of_which_one_fuses_equal_one_process(kind, is_masked):
    tensors = draw()[: 2 + is_masked]
    rank, alone, model = dist.get_rank(), make_model(kind, LOCAL), make_model(kind)
    expected = step(alone, *tensors)
    if rank == 0:
        fuse_activations(model)
    results = step(model, *(tensor.split([2, 3])[rank] for tensor in tensors))
    for gradient in results[1]:
        dist.all_reduce(gradient)
    assert_same(results, ([tensor.split([2, 3])[rank] for tensor in expected[0]], *expected[1:]))


@pytest.mark.parametrize("kind", MODELS)
def test_neighbours_are_fused_and_nothing_else(kind):
    model, (batch, grad_output, _) = make_model(kind), draw()
    plain, parts, keys = copy.deepcopy(model), list(model.modules()), model.state_dict().keys()
    expected = step(copy.deepcopy(plain), batch, grad_output)
    assert fuse_activations(model) is model
    assert fuse_activations(model) is model
    assert model.state_dict().keys() == keys
    for fused in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert_same(step(fused, batch, grad_output), expected)
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


def patch_class(model):
    forward = nn.SiLU.forward
    nn.SiLU.forward = lambda self, input: forward(self, input)
    return type("", (), {"remove": lambda _: setattr(nn.SiLU, "forward", forward)})()


class Second(nn.Sequential):
    def __iter__(self):
        return iter([self[1]])


HOOKS = "SiLU '1' works by itself: one of the two has hooks or was compiled"
# By what keeps the pair apart, with what the report says.
APART = {
    "a hook on the layer": (lambda model: model[0].register_forward_hook(lambda *_: None), HOOKS),
    "a hook before the activation": (lambda model: model[1].register_forward_pre_hook(lambda *_: None), HOOKS),
    "a hook for gradients": (lambda model: model[1].register_full_backward_hook(lambda *_: None), HOOKS),
    "a patched class": (patch_class, HOOKS),
    "the layer has its own forward": (lambda model: setattr(model[0], "forward", model[0].forward), HOOKS),
    "the container has its own forward": (lambda model: setattr(model, "forward", None), ""),
    "the container has its own iteration": (lambda model: setattr(model, "__class__", Second), ""),
    "the activation is compiled": (lambda model: model[1].compile(backend="eager"), HOOKS),
    "the layer recomputes": (lambda model: recompute_outputs(model[0]) and None, HOOKS),
    "the layer runs twice": (
        lambda model: model.append(model[0]) and None,
        "itself: the layer is in several places",
    ),
    "the layer has an activation": (lambda model: setattr(model[0], "fused_activation", "tanh"), ""),
    "an activation that layers do not compute": (lambda model: model.__setitem__(1, nn.Softplus()), ""),
    "something between": (lambda model: model.insert(1, nn.Dropout(1e-9)) and None, ""),
    "no synchronized layer": (lambda model: model.__setitem__(0, nn.BatchNorm2d(4).double()), ""),
}


@pytest.mark.parametrize("reason", APART)
def test_a_pair_that_cannot_be_fused_says_why(reason):
    change, told = APART[reason]
    model, (batch, *_) = pair(), draw()
    handle = change(model)
    expected = copy.deepcopy(model)(batch) if "container" not in reason else None
    try:
        with pytest.warns(UserWarning, match="fuse_activations: found no synchronized layer"):
            fuse_activations(model)
        assert not any(isinstance(part, FusedActivation) for part in model.modules())
        report = str(conversion_report(model))
        assert told in report if told else "by itself" not in report
        if expected is not None:
            assert_same(model(batch), expected)
    finally:
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize("cls", ACTIVATIONS)
@pytest.mark.parametrize("zero_masked", [True, False])
def test_masked_positions_are_what_they_were(cls, zero_masked):
    model, (batch, grad_output, mask) = pair(cls()), draw()
    fused, batch, results = copy.deepcopy(model), batch.masked_fill(~mask, nan if zero_masked else 1), []
    if cls is not nn.Sigmoid:
        fuse_activations(fused)
    assert isinstance(fused[1], FusedActivation) is (cls is not nn.Sigmoid)
    for each in (model, fused):
        input = batch.clone().requires_grad_()
        with masked(each, mask, zero_masked=zero_masked):
            output = each(input)
        results.append((output, *torch.autograd.grad(output, [input, *each.parameters()], grad_output)))
    torch.testing.assert_close(*results, equal_nan=True)


def test_fusion_with_recomputed_outputs_or_replicas_equals_the_plain_step(single_threaded):
    batch, grad_output, _ = draw(4)
    expected = step(make_model("residual"), batch, grad_output)
    for model in (
        recompute_outputs(fuse_activations(make_model("residual"))),
        fuse_activations(recompute_outputs(make_model("residual"))),
        parallel(fuse_activations(make_model("residual")), "cpu", 2),
    ):
        assert_same(step(model, batch, grad_output), expected)


def test_revert_puts_back_what_fusing_took_and_no_more():
    model = fuse_activations(pair())
    with pytest.raises(ValueError, match=r"fused_activation=.*silu"):
        revert_sync_batchnorm(model[0])
    model[0].fused_activation = "relu"
    with pytest.raises(ValueError, match=r"fused_activation=.*relu"):
        revert_sync_batchnorm(model)
    model[0].fused_activation = "silu"
    model.append(SyncBatchNorm2d(4, eps_mode="clamp"))
    with pytest.raises(ValueError, match="eps_mode='clamp'"):
        revert_sync_batchnorm(model)
    assert isinstance(model[1], FusedActivation)
    assert [type(part) for part in revert_sync_batchnorm(model[:2])] == [nn.BatchNorm2d, nn.SiLU]


def test_repr_and_report_name_the_fused_activations():
    model = fuse_activations(pair())
    assert "activation='silu')\n  (1): FusedActivation(SiLU())" in repr(model)
    assert "SyncBatchNorm2d: synchronized already; computes SiLU '1'" in str(conversion_report(model))
    recompute_outputs(model)
    assert "outputs are recomputed; computes SiLU '1'" in str(conversion_report(model))
    assert "; SiLU '0.1' works by itself" in str(conversion_report(nn.Sequential(pair())))
