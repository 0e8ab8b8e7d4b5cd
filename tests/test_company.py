"""Converted models in the company that they keep: wrappers, checkpointing, exporters, fusers."""

import copy

import pytest
import torch
import torch.distributed as dist
from test_training import STEPS, check, make_batches, make_model, make_optimizer, one_process, train
from torch import nn
from torch.ao.quantization import fuse_modules, fuse_modules_qat, get_default_qat_qconfig, prepare_qat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.fx.experimental.optimization import fuse
from torch.nn.utils.fusion import fuse_conv_bn_eval

from bagua_syncbn import SyncBatchNorm, SyncBatchNorm2d, convert_sync_batchnorm, revert_sync_batchnorm


class WithUnused(nn.Sequential):
    """Has a parameter that takes no part."""

    def __init__(self):
        super().__init__(*make_model())
        self.unused = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, input):
        for layer in self:
            input = layer(input)
        return input


def train_ddp(options, unused):
    model = convert_sync_batchnorm(WithUnused() if unused else make_model(), "node")
    model = nn.parallel.DistributedDataParallel(model, **options)
    state = train(model, make_optimizer(model), (1, 3), dist.get_rank())
    state.pop("module.unused", None)
    return state


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ({"find_unused_parameters": True}, True),
        ({"static_graph": True}, True),
        ({"broadcast_buffers": True}, False),
        ({"broadcast_buffers": False}, False),
        ({"gradient_as_bucket_view": True}, False),
    ],
    ids=str,
)
def test_distributed_data_parallel(pool, options, unused):
    check(pool.run(train_ddp, 2, options, unused), (1, 3), "module.")


def accumulate(wrapped):
    """Steps of two micro-batches each; without communication after the first."""
    model = convert_sync_batchnorm(make_model())
    model = nn.parallel.DistributedDataParallel(model) if wrapped else model
    optimizer = make_optimizer(model)
    for inputs, targets in make_batches(8):
        halves = list(zip(inputs.split(4), targets.split(4), strict=True))
        optimizer.zero_grad()
        for index, (input, target) in enumerate(halves):
            if wrapped:
                input, target = (part.split((1, 3))[dist.get_rank()] for part in (input, target))
                model.require_backward_grad_sync = index == 1  # what no_sync() sets
            loss = (model(input) - target).square().sum() * (2 if wrapped else 1) / 8
            loss.backward()
        optimizer.step()
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


def accumulate_with_no_sync():
    model = nn.parallel.DistributedDataParallel(convert_sync_batchnorm(make_model()))
    input = torch.ones(2, 3, 8, 8, dtype=torch.float64) * dist.get_rank()
    with model.no_sync():
        model(input).sum().backward()
    model(input).sum().backward()
    return model.module[1].running_mean


def test_gradient_accumulation(pool):
    expected = accumulate(False)
    for state in pool.run(accumulate, 2, True):
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-9)
    first, second = pool.run(accumulate_with_no_sync, 2)
    assert torch.equal(first, second)


def full(state):
    """Whole tensors, and buffers under the names that they have in the model."""
    return {
        name.replace("_fsdp_wrapped_module.", ""): value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in state.items()
    }


def train_fully_shard():
    model = convert_sync_batchnorm(make_model())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return full(train(model, make_optimizer(model), (1, 3), dist.get_rank()))


def train_fsdp(wrap_each):
    policy = ModuleWrapPolicy({nn.Conv2d, SyncBatchNorm2d}) if wrap_each else None
    model = FullyShardedDataParallel(
        convert_sync_batchnorm(make_model()),
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    train(model, make_optimizer(model), (1, 3), dist.get_rank())
    with FullyShardedDataParallel.summon_full_params(model):
        return full({name: value.clone() for name, value in model.state_dict(keep_vars=True).items()})


def test_fully_shard(pool):
    check(pool.run(train_fully_shard, 2), (1, 3))


FSDP_WARNINGS = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@FSDP_WARNINGS
@pytest.mark.parametrize("wrap_each", [False, True])
def test_fsdp(pool, wrap_each):
    expected = one_process((1, 3))
    for state in pool.run(train_fsdp, 2, wrap_each):
        for name, value in expected.items():
            torch.testing.assert_close(state[name].view(value.shape), value, rtol=1e-9, atol=1e-9)


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False))


def rows(rank):
    """Whose mean and scale differ from rank to rank, so that unsynchronized outputs are far off."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(16, 4, generator=generator) * (1 + rank) + 4 * rank


def mixed_precision(kind):
    model = convert_sync_batchnorm(small())
    if kind == "fully_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    else:
        precision = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
        policy = ModuleWrapPolicy({nn.Linear}) if kind == "fsdp, layers apart" else None
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            mixed_precision=precision,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    outputs = model(rows(dist.get_rank()))
    outputs.float().square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    last = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)][-1]
    return outputs.detach().float(), last.running_mean.float(), all(bool(g.isfinite().all()) for g in gradients)


@FSDP_WARNINGS
@pytest.mark.parametrize("kind", ["fully_shard", "fsdp", "fsdp, layers apart"])
def test_sharded_mixed_precision(pool, kind):
    reference = small()
    expected = reference(torch.cat([rows(0), rows(1)])).detach()
    unsynchronized = small()(rows(0)).detach()
    assert (unsynchronized - expected[:16]).abs().max() > 0.5
    for rank, (outputs, running_mean, finite) in enumerate(pool.run(mixed_precision, 2, kind)):
        torch.testing.assert_close(outputs, expected[rank * 16 : rank * 16 + 16], rtol=0.03, atol=0.05)
        torch.testing.assert_close(running_mean, reference[3].running_mean, rtol=0.03, atol=0.01)
        assert finite


def evaluated(process_group="node"):
    """A model in evaluation whose running statistics are not those it began with."""
    model = convert_sync_batchnorm(make_model().float(), process_group)
    model(torch.randn(4, 3, 8, 8) * 2 + 1)
    return model.eval(), torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    model, input = evaluated()
    program = torch.export.export(model, (input,), strict=strict)
    torch.testing.assert_close(program.module()(input), model(input))
    assert not any("bagua" in str(node.target) for node in program.graph.nodes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnx(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    model, input = evaluated()
    torch.onnx.export(model, (input,), tmp_path / "model.onnx", dynamo=True)
    session = ReferenceEvaluator(str(tmp_path / "model.onnx"))
    (output,) = session.run(None, {session.input_names[0]: input.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), model(input).detach(), rtol=1e-4, atol=1e-5)


def test_fuse_conv_bn_eval():
    model, input = evaluated()
    fused = fuse_conv_bn_eval(model[0], model[1])
    torch.testing.assert_close(fused(input), model[:2](input), rtol=1e-4, atol=1e-5)


class Activated(nn.BatchNorm2d):
    def forward(self, input, *, shift):
        return super().forward(input).relu() + shift


class Net(nn.Sequential):
    def forward(self, input):
        convolution, norm, activated = self
        return activated(norm(convolution(input)), shift=input.mean())


@pytest.mark.parametrize("training", [True, False])
def test_symbolic_trace(training):
    model = convert_sync_batchnorm(Net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Activated(4)))
    model.train(training)
    twin = copy.deepcopy(model)
    traced = torch.fx.symbolic_trace(model)
    input = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(traced(input), twin(input))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1", "2"]
    torch.testing.assert_close(traced.state_dict(), twin.state_dict())
    with pytest.raises(torch.fx.proxy.TraceError, match="SyncBatchNorm2d is one node"):
        torch.fx.symbolic_trace(SyncBatchNorm2d(3))


def test_fx_fuses_what_is_reverted():
    model, input = evaluated()
    traced = torch.fx.symbolic_trace(model)
    fused = fuse(revert_sync_batchnorm(traced))
    assert sum(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in fused.modules()) == 0
    torch.testing.assert_close(fused(input), model(input), rtol=1e-4, atol=1e-5)


def make_block():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


@pytest.mark.parametrize(("fuser", "training"), [(fuse_modules, False), (fuse_modules_qat, True)])
def test_quantization_fuses_what_is_not_converted(fuser, training):
    names = ["0", "1", "2"]
    model = convert_sync_batchnorm(make_block().train(training))
    with pytest.raises(AssertionError, match="SyncBatchNorm2d"):
        fuser(model, names)
    assert type(fuser(revert_sync_batchnorm(model), names)[0]) is type(fuser(make_block().train(training), names)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantization_aware_training_converts_last():
    model = fuse_modules_qat(make_block(), ["0", "1", "2"])
    model.qconfig = get_default_qat_qconfig()
    model = prepare_qat(convert_sync_batchnorm(model))
    assert type(model[0].bn) is nn.BatchNorm2d  # a new layer
    convert_sync_batchnorm(model)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert type(model[0].bn) is SyncBatchNorm2d
    assert model[0].bn.num_batches_tracked == 1


def average(process_group):
    model = convert_sync_batchnorm(make_model(), process_group)
    ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = make_optimizer(model)
    for inputs, targets in make_batches(4):
        input, target = (part.split((1, 3))[dist.get_rank()] for part in (inputs, targets))
        loss = (model(input) - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        ema.update_parameters(model)
    torch.optim.swa_utils.update_bn((input for input, _ in [(input, None)]), ema)
    return ema.state_dict()


def test_averaged_models_on_ranks(pool):
    for process_group in (None, "node", [[0, 1]]):
        first, second = pool.run(average, 2, process_group)
        assert first["n_averaged"] == STEPS
        assert all(torch.equal(first[name], second[name]) for name in first if "running" in name)
