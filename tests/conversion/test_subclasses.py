"""Layers with a forward of their own: synchronized with it, or never unnoticed."""

import copy
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fake_packages import Apex, Fairscale, Mmcv
from torch import nn
from user_layers import BatchNormAct, Centered

import bagua_syncbn
from bagua_syncbn import (
    SyncBatchNorm,
    SyncBatchNorm2d,
    convert_sync_batchnorm,
    register_converter,
    revert_sync_batchnorm,
)
from bagua_syncbn.conversion import registry
from bagua_syncbn.data_parallel import DataParallelWithCallback


class ByName(nn.BatchNorm2d):
    def forward(self, input):
        return nn.BatchNorm2d.forward(self, input).tanh()


class OfAten(nn.BatchNorm2d):
    def forward(self, input):
        factor = 1 / float(self.num_batches_tracked.add_(1)) if self.momentum is None else self.momentum
        buffers = self.running_mean, self.running_var
        return torch.batch_norm(input, self.weight, self.bias, *buffers, self.training, factor, self.eps, False)


class ByHelper(nn.BatchNorm2d):
    def forward(self, input):
        return self._normalize(input) * 2

    def _normalize(self, input):
        return super().forward(input)


class WithPart(nn.BatchNorm2d):
    """Two statistics in one layer, the second with a plain layer of torch, as in adversarial propagation."""

    def __init__(self, num_features, **options):
        super().__init__(num_features, **options)
        self.part = nn.BatchNorm2d(num_features, **options)

    def forward(self, input):
        return super().forward(input) + self.part(input * 2)


class TwoBuffers(nn.BatchNorm2d):
    def __init__(self, num_features, **options):
        super().__init__(num_features, **options)
        self.register_buffer("other_mean", torch.zeros(num_features, dtype=options.get("dtype")))
        self.register_buffer("other_var", torch.ones(num_features, dtype=options.get("dtype")))

    def forward(self, input):
        factor = 0.1 if self.momentum is None else self.momentum
        return F.batch_norm(input, self.other_mean, self.other_var, None, None, self.training, factor, self.eps)


class OfTorchsSync(nn.SyncBatchNorm):
    """As timm's SyncBatchNormAct."""

    def __init__(self, num_features, **options):
        super().__init__(num_features, **options)
        self.act = nn.Tanh()

    def forward(self, input):
        return self.act(super().forward(input))


CLASSES = [BatchNormAct, ByName, OfAten, ByHelper, WithPart, TwoBuffers, OfTorchsSync]


def run(layer, input):
    """Three steps in training, one in evaluation; returns outputs, gradients of the input and buffers."""
    results = []
    for step in range(4):
        layer.train(step < 3)
        own = (input * (step + 1) + step).clone().requires_grad_()
        output = layer(own)
        output.backward((own.detach() * 3).sin())
        results += [output.detach(), own.grad]
    return results, dict(layer.named_buffers())


def batch():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 3, 4, 4, generator=generator, dtype=torch.float64)


def run_share(cls, options, sizes, through):
    layer = convert_sync_batchnorm(nn.Sequential(cls(3, dtype=torch.float64, **options)))
    if through == "deepcopy":
        layer = copy.deepcopy(layer)
    elif through == "pickle":
        layer = pickle.loads(pickle.dumps(layer))
    elif through == "compile":
        layer = torch.compile(layer, backend="eager")
    return run(layer, batch().split(sizes)[dist.get_rank()])


def check(cls, options, sizes, results):
    """Compares with the layer itself on the whole batch in this process, which is alone."""
    expected, buffers = run(nn.Sequential(cls(3, dtype=torch.float64, **options)), batch())
    for rank, (outputs, own_buffers) in enumerate(results):
        # Without running statistics evaluation is by each rank's own batch: only training is compared.
        compared = 8 if options.get("track_running_stats", True) else 6
        for output, whole in zip(outputs[:compared], expected[:compared], strict=True):
            torch.testing.assert_close(output, whole.split(sizes)[rank])
        own_buffers = {name.removeprefix("_orig_mod."): buffer for name, buffer in own_buffers.items()}
        torch.testing.assert_close(own_buffers, buffers)


@pytest.mark.parametrize("options", [{}, {"momentum": None}], ids=str)
@pytest.mark.parametrize("cls", CLASSES)
def test_forwards_of_their_own_are_synchronized(pool, cls, options):
    sizes = (2, 4)
    check(cls, options, sizes, pool.run(run_share, 2, cls, options, sizes, None))


NOTHING = {"affine": False, "track_running_stats": False}


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}, NOTHING], ids=str)
def test_layers_without_parameters_and_buffers_are_synchronized_too(pool, options):
    check(BatchNormAct, options, (3, 3), pool.run(run_share, 2, BatchNormAct, options, (3, 3), None))


@pytest.mark.parametrize("through", ["deepcopy", "pickle", "compile"])
@pytest.mark.parametrize("cls", [BatchNormAct, ByHelper, OfTorchsSync])
def test_copied_and_compiled_layers_are_synchronized_too(pool, cls, through):
    check(cls, {}, (1, 5), pool.run(run_share, 2, cls, {}, (1, 5), through))


@pytest.mark.parametrize("cls", CLASSES)
def test_evaluation_is_left_alone_and_revert_is_exact(cls):
    model = nn.Sequential(cls(3).eval())
    input = torch.randn(2, 3, 4, 4)
    expected = model(input)
    convert_sync_batchnorm(model)
    assert isinstance(model[0], cls)
    assert isinstance(model[0], SyncBatchNorm)
    assert not isinstance(model[0], nn.SyncBatchNorm)  # DistributedDataParallel would refuse it on CPU
    assert torch.equal(model(input), expected)
    assert type(revert_sync_batchnorm(pickle.loads(pickle.dumps(model)))[0]) is cls
    assert type(revert_sync_batchnorm(model)[0]) is cls
    assert torch.equal(model(input), expected)


class OnlyInEvaluation(nn.BatchNorm2d):
    """Batch renormalization is written like this."""

    def forward(self, input):
        if self.training:
            return (input - input.mean((0, 2, 3), keepdim=True)) / input.std((0, 2, 3), keepdim=True)
        return super().forward(input)


class OfGhosts(nn.BatchNorm2d):
    """Statistics of parts of the batch."""

    def forward(self, input):
        mean, var = self.running_mean.repeat(2), self.running_var.repeat(2)
        halves = F.batch_norm(input.view(-1, 6, 4, 4), mean, var, training=self.training)
        return super().forward(halves.view_as(input))


@pytest.mark.parametrize(("cls", "what"), [
    (Centered, "called neither"),
    (OnlyInEvaluation, "called neither"),
    (OfGhosts, "called F.batch_norm with tensors that are not the layer's"),
])  # fmt: skip
def test_what_turns_out_to_be_unsynchronized_raises(cls, what):
    model = convert_sync_batchnorm(nn.Sequential(cls(3)))
    with pytest.raises(RuntimeError, match=re.escape(f"{cls.__module__}.{cls.__name__}: expected") + ".*" + what):
        model(torch.randn(4, 3, 4, 4))
    model.eval()
    if cls is OnlyInEvaluation:
        model(torch.randn(4, 3, 4, 4))
    revert_sync_batchnorm(model).train()
    model(torch.randn(4, 3, 4, 4))


def means_of_pairs():
    layer = convert_sync_batchnorm(nn.Sequential(BatchNormAct(1, momentum=1.0)), [[0, 2], [1, 3]])
    layer(torch.full((2, 1, 1, 1), float(dist.get_rank())))
    return layer[0].running_mean.item()


def test_the_group_of_the_layer_is_used(pool):
    assert pool.run(means_of_pairs, 4) == [1, 2, 1, 2]


class ActWithPart(BatchNormAct):
    def __init__(self, num_features):
        super().__init__(num_features)
        self.part = nn.BatchNorm2d(num_features)

    def forward(self, input):
        return super().forward(input) + self.part(input * 2)


@pytest.mark.parametrize("cls", [WithPart, ActWithPart])
def test_a_part_that_is_left_out_stays_as_it_is(cls):
    model = nn.Sequential(cls(3))
    input = torch.randn(4, 3, 2, 2)
    expected = copy.deepcopy(model)(input)
    convert_sync_batchnorm(model, filter=lambda name, layer: not name.endswith("part"))
    torch.testing.assert_close(model(input), expected)
    assert type(model[0].part) is nn.BatchNorm2d
    assert model[0].part.num_batches_tracked == 1


class InChunks(nn.BatchNorm2d):
    """A forward that calls itself."""

    def forward(self, input, chunks=2):
        if chunks > 1:
            return torch.cat([self(chunk, 1) for chunk in input.chunk(chunks)])
        if self.eps == 0:
            raise ArithmeticError
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, True)


def test_a_forward_that_calls_itself_leaves_nothing_behind():
    layer = bagua_syncbn.convert_sync_batchnorm(InChunks(3))
    input = torch.randn(4, 3, 5, 5)
    expected = InChunks(3)(input)
    before = set(vars(layer))
    torch.testing.assert_close(layer(input), expected)
    layer.eps = 0
    with pytest.raises(ArithmeticError):
        layer(input)
    assert set(vars(layer)) == before, "nothing stays behind, to be pickled with the layer"


class Frozen(nn.BatchNorm2d):
    """In training, but by its running statistics."""

    def forward(self, input):
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def test_frozen_statistics_stay_frozen():
    model = convert_sync_batchnorm(nn.Sequential(Frozen(3)))
    model(torch.randn(4, 3, 4, 4))
    assert model[0].running_mean.tolist() == [0, 0, 0]


class Foreign(nn.Module):
    """Batch normalization that has nothing of torch's class."""

    def __init__(self, num_features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.num_features = num_features
        self.process_group = "its own"

    def forward(self, input):
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, self.training).relu()


class SyncForeign(SyncBatchNorm2d):
    local_class = Foreign
    eps, momentum, affine, track_running_stats, num_batches_tracked = 1e-5, 0.1, True, True, None

    def forward(self, input):
        return super().forward(input).relu()


@pytest.fixture
def registered():
    register_converter(Foreign, lambda layer: SyncForeign if layer.num_features > 2 else None)
    register_converter(Centered, lambda layer: SyncBatchNorm2d)
    yield
    register_converter(Foreign, None)
    register_converter(Centered, None)


@pytest.mark.usefixtures("registered")
def test_a_registered_converter_is_used_and_undone():
    model = nn.Sequential(Foreign(3), Centered(3), Foreign(2))
    layers = list(model)
    weight = model[0].weight
    input = torch.randn(4, 3, 5, 5)
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
    register_converter(Foreign, None)  # a file can be read without
    for net in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), model):
        assert isinstance(net[0], SyncForeign)
        revert_sync_batchnorm(net)
        assert [type(layer) for layer in net] == [Foreign, Centered, Foreign]
        assert net[0].process_group == "its own"
        assert "groups_before" not in vars(net[0])
        assert not hasattr(net[1], "process_group")


@pytest.mark.parametrize(
    ("cls", "converter", "argument"),
    [(int, None, "cls"), ("Foreign", None, "cls"), (SyncBatchNorm2d, None, "cls"), (Foreign, "name", "converter")],
)
def test_register_converter_checks_its_arguments(cls, converter, argument):
    with pytest.raises(TypeError, match=f"{argument}: expected"):
        register_converter(cls, converter)


@pytest.mark.usefixtures("registered")
def test_what_a_converter_returns_is_checked():
    register_converter(Foreign, lambda layer: nn.BatchNorm2d)
    with pytest.raises(TypeError, match=r"from the converter of test_subclasses\.Foreign, got .*BatchNorm2d"):
        convert_sync_batchnorm(nn.Sequential(Foreign(3)))


PAGE = Path(__file__).resolve().parents[2] / "docs" / "switching.md"


@pytest.fixture
def recipe_for_apex(monkeypatch):
    """Runs the recipe of docs/switching.md; tests/tools/test_docs.py runs all of its recipes."""
    monkeypatch.setattr(registry, "_converters", {})
    recipe = re.search(r"^class FromApex.*?: FromApex\)\n", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    exec(
        recipe[0], {"bagua_syncbn": bagua_syncbn, "apex": SimpleNamespace(parallel=SimpleNamespace(SyncBatchNorm=Apex))}
    )


@pytest.mark.usefixtures("recipe_for_apex")
@pytest.mark.parametrize("options", [{}, {"channel_last": True}, {"fuse_relu": True}], ids=str)
def test_the_recipe_for_apex_keeps_outputs_and_reverts(options):
    model = nn.Sequential(Apex(4, **options))
    input, z = torch.randn(2, 3, 4, 4, 4)
    expected = model[0](input), model[0](input, z)
    convert_sync_batchnorm(model)
    torch.testing.assert_close((model[0](input), model[0](input, z)), expected)
    assert type(revert_sync_batchnorm(model)[0]) is Apex


def groups_by_other_names():
    group, other = dist.new_group([0, 1]), dist.new_group([1, 0])
    for cls in (Mmcv, Fairscale):
        register_converter(cls, lambda layer: SyncBatchNorm)
    try:
        model = nn.Sequential(Mmcv(1, group=group), Fairscale(1))
        model[1]._process_group = group
        convert_sync_batchnorm(model)
        taken = [layer.process_group is group for layer in model]
        copied = [layer.process_group is group for layer in copy.deepcopy(model)]
        twin = revert_sync_batchnorm(copy.deepcopy(model))
        restored = [twin[0].group.size(), twin[1]._process_group.size()]
        revert_sync_batchnorm(convert_sync_batchnorm(model, other))
        kept = [model[0].group is group, model[1]._process_group is group]
        left = any({"_group_spec", "groups_before"} & vars(layer).keys() for layer in model)
        model[0].second = other
        with pytest.raises(TypeError, match="Mmcv with group and second"):
            convert_sync_batchnorm(model[:1])
        return taken, copied, restored, kept, left
    finally:
        for cls in (Mmcv, Fairscale):
            register_converter(cls, None)


def test_a_group_is_taken_from_the_attribute_that_has_it(pool):
    assert pool.run(groups_by_other_names, 2) == [([True] * 2, [True] * 2, [2, 2], [True] * 2, False)] * 2


@pytest.mark.parametrize("cls", [BatchNormAct, ByName, OfAten, ByHelper], ids=lambda cls: cls.__name__)
def test_replicas_normalize_by_the_whole_batch_in_own_forwards(cls):
    """The redirected call goes to the other replicas, like that of any synchronized layer."""
    torch.manual_seed(0)
    model = nn.Sequential(cls(3)).double()
    expected = copy.deepcopy(model)
    input, grad_output = torch.randn(2, 6, 3, 4, 4, dtype=torch.float64).unbind()
    own, whole = (input.clone().requires_grad_() for _ in range(2))
    parallel = DataParallelWithCallback(convert_sync_batchnorm(model), device_ids=["cpu", "cpu"])
    output, expected_output = parallel(own), expected(whole)
    output.backward(grad_output)
    expected_output.backward(grad_output)
    torch.testing.assert_close(output, expected_output)
    torch.testing.assert_close(own.grad, whole.grad)
    torch.testing.assert_close(model[0].running_var, expected[0].running_var)
