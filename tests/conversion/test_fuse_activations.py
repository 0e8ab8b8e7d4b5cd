"""Layers that do the work of the activation module after them, where nothing else reads their output."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from replicated import parallel
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from bagua_syncbn import (
    SyncBatchNorm,
    conversion_report,
    convert_sync_batchnorm,
    fuse_activations,
    ops,
    recompute_outputs,
    revert_sync_batchnorm,
)


class Bottleneck(nn.Module):
    """One ReLU, in place, for three layers; after the sum it works by itself. As in torchvision and timm."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3)
        self.conv2, self.bn2 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.conv3, self.bn3 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.drop_block, self.relu = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x, scale=None):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = self.relu(self.drop_block(out))
        out = self.bn3(self.conv3(out))
        out += x if scale is None else scale * x
        return self.relu(out)


class Conv(nn.Module):
    """As in YOLO: the activation is one object of the class."""

    default = nn.SiLU()

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs), self.default

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class CSP(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = Conv(4, 6), nn.ModuleList([Conv(3, 3), Conv(3, 3)]), Conv(12, 4)

    def forward(self, x):
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Backbone(nn.ModuleDict):
    """As torchvision's IntermediateLayerGetter: a container with a forward."""

    def __init__(self):
        super().__init__({"conv": nn.Conv2d(4, 4, 1), "norm": nn.BatchNorm2d(4), "relu": nn.ReLU(inplace=True)})

    def forward(self, x):
        for layer in self.values():
            x = layer(x)
        return x


class InvertedResidual(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(
            nn.Sequential(nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish()),
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.Dropout(0.0), nn.Hardswish()),
            nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)),
        )

    def forward(self, x):
        return x + self.block(x)


class Segmentation(nn.Module):
    """Norm and activation first, from lists; as in MONAI's SegResNet."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in self.norms])
        self.act = nn.LeakyReLU(0.2)

    def forward(self, x):
        return self.body(x) + x

    def body(self, x):
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = conv(self.act(norm(x)))
        return x


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.GELU(approximate="tanh")

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        training = self.training
        mean, var = self.running_mean, self.running_var
        x = F.batch_norm(x, mean, var, self.weight, self.bias, training, self.momentum, self.eps)
        return self.act(self.drop(x))


# Each with the number of its layers that compute their activation.
MODELS = {
    "bottleneck": (Bottleneck, 2),
    "csp": (CSP, 4),
    "backbone": (Backbone, 1),
    "inverted residual": (InvertedResidual, 2),
    "segmentation": (Segmentation, 2),
    "timm": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), BatchNormAct2d(4), nn.Conv2d(4, 4, 1)), 1),
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


class Calls:
    """How often the fused op was called."""

    def __init__(self, monkeypatch):
        self.count, op = 0, ops.batch_norm_act_elemt

        def counted(*args):
            self.count += 1
            return op(*args)

        monkeypatch.setattr(ops, "batch_norm_act_elemt", counted)


def train_over_ranks(kind):
    batch = torch.randn(5, 4, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = batch.split([2, 3])[dist.get_rank()]
    fused, checkpointed = (fuse_activations(make_model(kind)) for _ in range(2))
    return [
        step(make_model(kind), own),
        step(fused, own),
        step(checkpointed, own, lambda input: checkpoint(checkpointed, input, use_reentrant=False)),
    ]


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients_stay(pool, kind):
    for expected, *fused in pool.run(train_over_ranks, 2, kind):
        for results in fused:
            torch.testing.assert_close(results, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_fused(kind, monkeypatch):
    model, batch = make_model(kind), torch.randn(2, 4, 6, 5, dtype=torch.float64)
    plain = copy.deepcopy(model)
    buffers = [buffer.clone() for buffer in model.buffers()]
    assert fuse_activations(model) is model
    torch.testing.assert_close(list(model.buffers()), buffers, rtol=0, atol=0)  # nothing has run
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    expected = step(copy.deepcopy(plain), batch)
    calls, count = Calls(monkeypatch), 2 * MODELS[kind][1]
    # A layer with a forward of its own does not come by the layer's in evaluation.
    in_both = count * (1 if kind == "timm" else 2)
    for fused in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = calls.count
        torch.testing.assert_close(step(fused, batch), expected, rtol=1e-11, atol=1e-11)
        assert calls.count - before == in_both
    report = str(conversion_report(fuse_activations(model)))
    assert report.count("; computes ") - report.count("computes no") == count

    before = calls.count
    model.zero_grad()
    revert_sync_batchnorm(model)
    for part, other in zip(model.modules(), revert_sync_batchnorm(plain).modules(), strict=True):
        assert type(part) is type(other)
        assert vars(part).keys() == vars(other).keys()
    assert calls.count == before


def test_all_that_is_not_proven():
    class Unproven(nn.Module):
        def __init__(self):
            super().__init__()
            self.read_twice, self.function, self.dropped, self.kept, self.either, self.asked = (
                nn.BatchNorm1d(3) for _ in range(6)
            )
            self.act, self.drop, self.prelu = nn.ReLU(), nn.Dropout(0.1), nn.PReLU()

    class ReadTwice(Unproven):
        def forward(self, x):
            y = self.read_twice(x)
            return self.act(y) * y

    class Function(Unproven):
        def forward(self, x):
            return F.relu(self.function(x))

    class Residual(Unproven):
        def forward(self, x):
            y = self.function(x)
            y += x
            return self.act(y)

    class Dropped(Unproven):
        def forward(self, x):
            return self.act(self.drop(self.dropped(x)))

    class Kept(Unproven):
        def forward(self, x):
            self.last = y = self.kept(x)
            return self.act(y)

    class Either(Unproven):
        def forward(self, x, flag=False):
            y = self.either(x)
            return y if flag else self.act(y)

    class InEvaluation(Unproven):
        def forward(self, x):
            y = self.either(x)
            return self.act(y) if self.training else y

    class Asked(Unproven):
        def forward(self, x):
            y = self.asked(x)
            return self.act(y) if isinstance(x, torch.Tensor) else y

    class Branches(Unproven):
        def forward(self, x):
            y = self.asked(x)
            return self.act(y) if x.sum() > 0 else y

    class GELU(nn.Module):
        """Not torch's."""

        def forward(self, x):
            return F.gelu(x)

    class Unknown(Unproven):
        def __init__(self):
            super().__init__()
            self.unknown = GELU()

        def forward(self, x):
            return self.unknown(self.asked(x))

    class NotComputed(Unproven):
        def forward(self, x):
            return self.prelu(self.asked(x))

    class Returned(Unproven):
        def forward(self, x):
            return self.kept(self.act(x))

    class RunTwice(Unproven):
        def body(self, x):
            return self.act(self.kept(x))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    reasons = {
        ReadTwice: "as not one but 2 read its output in the forward of ReadTwice",
        Function: "as relu, which is no module, reads its output",
        Residual: "as a sum reads its output, which only a layer that is called with a residual makes",
        Dropped: "as Dropout reads its output",
        Kept: "as torch.fx cannot follow the forward of Kept: it keeps tensors",
        Either: "as other things follow in the forward of Either at other times",
        InEvaluation: "as other things follow",
        Asked: "as the forward of Asked depends on what isinstance says",
        Branches: "as torch.fx cannot follow the forward of Branches: symbolically traced variables",
        Unknown: f"as {__name__}.test_all_that_is_not_proven.<locals>.GELU reads its output",
        NotComputed: "as PReLU reads its output",
        Returned: "as its output is returned",
        RunTwice: "as torch.fx cannot follow the forward of RunTwice: a function that is no method of it calls a layer",
    }
    for cls, reason in reasons.items():
        model = convert_sync_batchnorm(cls())
        expected, batch = copy.deepcopy(model).eval(), torch.randn(5, 3)
        with pytest.warns(UserWarning, match="found no activation to fuse"):
            fuse_activations(model)
        assert f"computes no activation, {reason}" in str(conversion_report(model))
        assert "last" not in vars(model)
        assert type(model.act) is nn.ReLU
        torch.testing.assert_close(model.eval()(batch), expected(batch))


def test_methods_of_a_forward(monkeypatch):
    """Also of base classes; but not where other code calls them, with other arguments."""

    class Methods(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.other, self.act = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.SiLU()

        def body(self, x, raw=False):
            y = self.bn(x)
            return y if raw else self.act(y)

        def forward(self, x, skip):
            x = self.body(x)
            y = self.other(x)
            return y if skip is None else self.act(y) + skip.size(0)

    class Derived(Methods):
        def forward(self, x, *, skip):
            return super().forward(x, skip) + 1

    batch = torch.randn(5, 3)
    for cls in (Methods, Derived):
        plain = convert_sync_batchnorm(cls())
        model, calls = fuse_activations(copy.deepcopy(plain)), Calls(monkeypatch)
        for skip in (None, batch):
            torch.testing.assert_close(model(batch, skip=skip), plain(batch, skip=skip))
        for raw in (True, False):
            torch.testing.assert_close(model.body(batch, raw), plain.body(batch, raw))
        assert calls.count == 2
        assert f"other things follow in the forward of {cls.__name__} at other times" in str(conversion_report(model))


def test_where_each_does_its_own_work(monkeypatch):
    model = make_model("bottleneck")
    plain = copy.deepcopy(model)
    block, batch = fuse_activations(model)[0], torch.randn(2, 4, 6, 5, dtype=torch.float64)
    calls = Calls(monkeypatch)
    part = batch[:, :3]
    for mode in (nn.Module.train, nn.Module.eval):
        mode(block), mode(plain)
        torch.testing.assert_close(block.bn1(part), plain[0].bn1(part))  # called by this code
        torch.testing.assert_close(block.relu(part), part.relu())
    seen = []
    for register in (
        block.bn1.register_forward_hook,
        block.relu.register_forward_pre_hook,
        block.relu.register_forward_hook,
    ):
        handle = register(lambda *args: seen.append(args) and None)
        torch.testing.assert_close(block(batch), plain[0](batch))
        handle.remove()
    assert calls.count == 1  # of bn2, where only bn1 is watched
    block.relu = nn.Tanh()
    plain[0].relu = nn.Tanh()
    torch.testing.assert_close(block(batch), plain[0](batch))
    assert calls.count == 1


def test_hooks_of_all_modules():
    """As debuggers have them: what activations are given stays what it was."""
    plain, batch, seen = make_model("timm"), torch.randn(2, 4, 6, 5, dtype=torch.float64), []
    with nn.modules.module.register_module_forward_pre_hook(lambda module, given: seen.append(given[0])):
        plain(batch)
        count = len(seen)
        fuse_activations(plain)(batch)
    torch.testing.assert_close(seen[count:], seen[:count])


def test_what_comes_between_later():
    model, plain = make_model("inverted residual"), make_model("inverted residual")
    fuse_activations(model)
    batch, results = torch.randn(2, 4, 6, 5, dtype=torch.float64), []
    for each in (model, plain):
        torch.manual_seed(1)
        each[0].block[1][2].p = 0.5
        results.append(each(batch))
    torch.testing.assert_close(*results)


def test_traces_have_no_part_of_it():
    model = make_model("bottleneck")
    plain, batch = copy.deepcopy(model), torch.randn(2, 4, 6, 5, dtype=torch.float64)
    fuse_activations(model)
    expected = step(plain, batch)
    traced = fx.symbolic_trace(model)
    torch.testing.assert_close(traced(batch), expected[0])
    torch.testing.assert_close(torch.jit.trace(model.eval(), batch)(batch), model(batch))
    compiled = torch.compile(model.train(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch), expected[0])


def test_replicas_and_recomputed_outputs(single_threaded):
    batch = torch.randn(4, 4, 6, 5, dtype=torch.float64)
    expected = step(make_model("csp"), batch)
    recomputed = recompute_outputs(fuse_activations(make_model("csp")))
    torch.testing.assert_close(step(recomputed, batch), expected, rtol=1e-11, atol=1e-11)
    replicated = parallel(fuse_activations(make_model("csp")), "cpu", 2)
    torch.testing.assert_close(step(replicated, batch), expected, rtol=1e-11, atol=1e-11)


def test_a_model_without_layers():
    with pytest.warns(UserWarning, match="found no activation"):
        fuse_activations(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module, got list"):
        fuse_activations([])
    layer = SyncBatchNorm(3, activation="silu")
    model = fuse_activations(nn.Sequential(layer, nn.ReLU()))
    batch = torch.randn(5, 3)
    torch.testing.assert_close(model(batch), SyncBatchNorm(3, activation="silu")(batch).relu())
