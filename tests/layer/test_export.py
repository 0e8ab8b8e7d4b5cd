"""Converted models in the company that they keep: exporters, tracers, fusers, averages."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import fuse_modules_qat, get_default_qat_qconfig, prepare_qat
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.fusion import fuse_conv_bn_eval

from bagua_syncbn import SyncBatchNorm2d, convert_sync_batchnorm, sync_batch_norm
from tests.helpers.training import STEPS, make_batches, make_model, make_optimizer


def evaluated(process_group="node"):
    """A model in evaluation whose running statistics are not those it began with."""
    model = convert_sync_batchnorm(make_model().float(), process_group)
    model(torch.randn(4, 3, 8, 8) * 2 + 1)
    return model.eval(), torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_hold_torchs_operations_alone(strict):
    model, input = evaluated()
    program = torch.export.export(model, (input,), strict=strict)
    torch.testing.assert_close(program.module()(input), model(input))
    assert not any("bagua" in str(node.target) for node in program.graph.nodes)


def traced_in_training(how, size):
    """A layer in training, traced with an input of ``size`` samples so that it takes others."""
    torch._dynamo.reset()
    layer, input = SyncBatchNorm2d(8), torch.randn(size, 8, 8, 8)
    if how == "export":
        batch = torch.export.Dim("batch")
        return torch.export.export(nn.Sequential(layer), (input,), dynamic_shapes=({0: batch},)).module()
    if how == "compile":
        return torch.compile(layer, backend="eager", dynamic=True, fullgraph=True)
    if how == "fx":
        return make_fx(lambda x: sync_batch_norm(x, None, None), tracing_mode="symbolic")(input)
    return torch.jit.trace(layer, input)


# 4 samples are left to F.batch_norm, and of 300 the kernels are faster.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize("how", ["export", "compile", "fx", "jit"])
def test_no_trace_of_training_depends_on_what_is_faster(how, size):
    traced = traced_in_training(how, size)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for samples in (size, 4, 300):
            input = torch.randn(samples, 8, 8, 8)
            torch.testing.assert_close(traced(input), nn.functional.batch_norm(input, None, None, training=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnx_models_give_the_same_output(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    model, input = evaluated()
    torch.onnx.export(model, (input,), tmp_path / "model.onnx", dynamo=True)
    session = ReferenceEvaluator(str(tmp_path / "model.onnx"))
    (output,) = session.run(None, {session.input_names[0]: input.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), model(input).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_traced_models_hold_torchs_operations_alone():
    model, input = evaluated()
    traced = torch.jit.trace(model, input)
    assert "bagua_syncbn::" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(input[:1]), model(input[:1]))


def test_fuse_conv_bn_eval_keeps_the_output():
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
def test_symbolic_traces_keep_layers_whole(training):
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


def make_block():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


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


def test_averaged_models_agree_on_all_ranks(pool):
    for process_group in (None, "node", [[0, 1]]):
        first, second = pool.run(average, 2, process_group)
        assert first["n_averaged"] == STEPS
        assert all(torch.equal(first[name], second[name]) for name in first if "running" in name)
