"""Containers that have a layer compute the activation next to it; everywhere else both are what they were."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from replicated import parallel
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from bagua_syncbn import (
    SyncBatchNorm,
    conversion_report,
    convert_sync_batchnorm,
    fuse_activations,
    masked,
    ops,
    recompute_outputs,
    revert_sync_batchnorm,
)


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
    "own iteration": (
        lambda: nn.Sequential(
            type("Two", (nn.Sequential,), {"__iter__": lambda self: iter([self[1]])})(nn.BatchNorm2d(4), nn.ReLU()),
            nn.BatchNorm2d(4),
            nn.LeakyReLU(0.3),
        ),
        1,
    ),
}


def make_model(kind):
    torch.manual_seed(0)
    model = nn.Sequential(MODELS[kind][0](), MODELS[kind][0]()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return convert_sync_batchnorm(model)


def step(model, batch, forward=None):
    input = batch.clone().requires_grad_()
    output = (forward or model)(input)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=output.dtype))
    grads = [parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        evaluated = model.eval()(batch)
    model.train()
    return [output.detach(), evaluated, input.grad, *grads, *model.buffers()]


def assert_same(results, expected):
    torch.testing.assert_close(results, expected, rtol=1e-11, atol=1e-11)


@pytest.fixture
def calls(monkeypatch):
    """The calls of the op in which it computed an activation too."""
    found, op = [], ops.batch_norm_elemt

    def noted(*args):
        if len(args) > 5:
            found.append(args)
        return op(*args)

    monkeypatch.setattr(ops, "batch_norm_elemt", noted)
    return found


def train_over_ranks(kind):
    batch = torch.randn(5, 4, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = batch.split([2, 3])[dist.get_rank()]
    fused, checkpointed = (fuse_activations(make_model(kind)) for _ in range(2))
    return [
        step(make_model(kind), own),
        step(fused, own),
        step(checkpointed, own, lambda input: checkpoint(checkpointed, input, use_reentrant=False)),
    ]


@pytest.mark.parametrize("kind", ["residual", "named"])
def test_outputs_and_gradients_stay_over_ranks(pool, kind):
    for expected, *fused in pool.run(train_over_ranks, 2, kind):
        for results in fused:
            assert_same(results, expected)


@pytest.mark.parametrize("kind", MODELS)
def test_neighbours_are_fused_and_nothing_else(kind, calls):
    model, batch = make_model(kind), torch.randn(2, 4, 6, 5, dtype=torch.float64)
    plain = copy.deepcopy(model)
    expected = step(copy.deepcopy(plain), batch)
    assert fuse_activations(model) is model
    assert fuse_activations(model) is model
    assert model.state_dict().keys() == plain.state_dict().keys()
    count = 2 * MODELS[kind][1]
    copies = [copy.deepcopy(model)] + ([pickle.loads(pickle.dumps(model))] if kind != "own iteration" else [])
    for fused in (*copies, model):
        calls.clear()
        assert_same(step(fused, batch), expected)
        assert len(calls) == 2 * count  # in training and in evaluation
        assert str(conversion_report(fused)).count("; computes ") == count
    for part, other in zip(revert_sync_batchnorm(model).modules(), revert_sync_batchnorm(plain).modules(), strict=True):
        assert type(part) is type(other)
        assert vars(part).keys() == vars(other).keys()


def pair(activation=None):
    torch.manual_seed(0)
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4), activation or nn.SiLU()).double())
    return fuse_activations(model)


def watch_global(model):
    return nn.modules.module.register_module_forward_pre_hook(lambda *_: None)


def patch_class(model):
    forward = nn.SiLU.forward
    nn.SiLU.forward = lambda self, input: forward(self, input)
    return type("", (), {"remove": lambda _: setattr(nn.SiLU, "forward", forward)})()


# By what keeps the pair apart.
APART = {
    "a hook on the layer": lambda model: model[0].register_forward_hook(lambda *_: None),
    "a hook before the activation": lambda model: model[1].register_forward_pre_hook(lambda *_: None),
    "a hook for gradients": lambda model: model[1].register_full_backward_hook(lambda *_: None),
    "a hook on all modules": watch_global,
    "a patched class": patch_class,
    "the activation has its own forward": lambda model: setattr(model[1], "forward", model[1].forward),
    "the layer has its own forward": lambda model: setattr(model[0], "forward", model[0].forward),
    "the container has its own forward": lambda model: setattr(
        model, "forward", lambda x: nn.Sequential.forward(model, x)
    ),
    "the activation is compiled": lambda model: model[1].compile(backend="eager"),
    "the layer is compiled": lambda model: model[0].compile(backend="eager"),
    "the container is compiled": lambda model: model.compile(backend="eager"),
    "the layer has an activation": lambda model: setattr(model[0], "fused_activation", "tanh"),
    "the layer recomputes": lambda model: recompute_outputs(model[0]) and None,
    "another class": lambda model: model.__setitem__(1, type("SiLU", (nn.SiLU,), {})()),
    "an activation that layers do not compute": lambda model: model.__setitem__(1, nn.Softplus()),
    "something between": lambda model: model.insert(1, nn.Dropout(1e-9)) and None,
    "the layer is replaced": lambda model: model.__setitem__(0, nn.BatchNorm2d(4).double()),
}


@pytest.mark.parametrize("reason", APART)
def test_what_keeps_a_pair_apart(reason, calls):
    model = pair()
    plain = nn.Sequential(*copy.deepcopy(list(model)))
    handles = [APART[reason](each) for each in (model, plain)]
    batch = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    try:
        output, expected = (each(batch) for each in (model, plain))
    finally:
        for handle in handles[::-1]:
            if handle is not None:
                handle.remove()
    assert_same(output, expected)
    assert len(calls) == 2 * (reason == "the layer has an activation")


def test_masks_keep_a_pair_apart():
    model, batch = pair(), torch.randn(2, 4, 6, 5, dtype=torch.float64)
    plain, mask = nn.Sequential(*copy.deepcopy(list(model))), torch.rand(2, 1, 6, 5) > 0.3
    with masked(model, mask):
        output = model(batch)
    with masked(plain, mask):
        assert_same(output, plain(batch))


def test_layer_and_activation_alone_are_what_they_were(calls):
    model, batch = pair(), torch.randn(2, 4, 6, 5, dtype=torch.float64)
    layer, act = copy.deepcopy(list(model))
    assert_same(model[0](batch), layer(batch))
    assert_same(model[1](batch), act(batch))
    assert_same(model[:1](batch), layer(batch))
    assert_same(nn.Sequential(*model)(batch), act(layer(batch)))
    assert not calls
    assert_same(model[:2](batch), act(layer(batch)))
    assert len(calls) == 1


def deep(count, breaks=False):
    class Block(nn.Sequential):
        if breaks:

            def forward(self, x):
                torch._dynamo.graph_break()
                return super().forward(x)

    torch.manual_seed(0)
    blocks = [Block(nn.Conv2d(4, 4, 1), nn.Sequential(nn.BatchNorm2d(4), nn.SiLU())) for _ in range(count)]
    return convert_sync_batchnorm(nn.Sequential(*blocks).double())


@pytest.mark.parametrize("how", ["each block", "each activation", "each layer", "breaks"])
def test_compiled_parts_apply_activations_once(how):
    """Beyond torch's limit of recompilations, too, where parts run that were not compiled."""
    torch.compiler.reset()
    plain, batch = deep(12, how == "breaks"), torch.randn(2, 4, 6, 5, dtype=torch.float64)
    model = fuse_activations(copy.deepcopy(plain))
    forward = model
    if how == "breaks":
        forward = torch.compile(model, backend="eager")
    for block in () if how == "breaks" else model:
        {"each block": block, "each activation": block[1][1], "each layer": block[1][0]}[how].compile(backend="eager")
    for _ in range(2):
        assert_same(forward(batch), plain(batch))


def test_traces_have_no_part_of_it():
    model = make_model("residual")
    plain, batch = copy.deepcopy(model), torch.randn(2, 4, 6, 5, dtype=torch.float64)
    fuse_activations(model)
    expected = step(plain, batch)
    assert_same(fx.symbolic_trace(model)(batch), expected[0])
    torch.testing.assert_close(torch.jit.trace(model.eval(), batch)(batch), model(batch))
    assert_same(torch.compile(model.train(), fullgraph=True, backend="aot_eager")(batch), expected[0])


def test_fusion_with_recomputed_outputs_or_replicas_equals_the_plain_step(single_threaded):
    batch = torch.randn(4, 4, 6, 5, dtype=torch.float64)
    expected = step(make_model("residual"), batch)
    for model in (
        recompute_outputs(fuse_activations(make_model("residual"))),
        fuse_activations(recompute_outputs(make_model("residual"))),
        parallel(fuse_activations(make_model("residual")), "cpu", 2),
    ):
        assert_same(step(model, batch), expected)


def test_repr_and_report_name_the_fused_activations():
    model = pair()
    assert repr(model).splitlines()[:2] == ["Sequential(", "  computed together: 0 with 1"]
    assert "SyncBatchNorm2d: synchronized already; computes SiLU at '1'" in str(conversion_report(model))
    recompute_outputs(model)
    assert "computes SiLU at '1'; outputs are made anew" in str(conversion_report(model))
    model = convert_sync_batchnorm(nn.Sequential(nn.Sequential(nn.BatchNorm2d(4), nn.SiLU())))
    assert "synchronized already; SiLU at '0.1' works by itself" in str(conversion_report(model))
    with pytest.warns(UserWarning, match="found no synchronized layer with an activation next to it"):
        fuse_activations(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    with pytest.warns(UserWarning, match="found no synchronized layer"):
        fuse_activations(nn.Sequential(SyncBatchNorm(3, activation="silu"), nn.ReLU()))
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module, got list"):
        fuse_activations([])
