"""Converted models with exporters, tracers and fusers."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import fuse_modules_qat, get_default_qat_qconfig, prepare_qat
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.fusion import fuse_conv_bn_eval

from bagua_syncbn import SyncBatchNorm2d, convert_sync_batchnorm, mean_over_ranks, sync_batch_norm
from tests.helpers.steps import check_ranks, draw

OPTIONS = {"eps": 0.5, "eps_mode": "clamp", "activation": ("leaky_relu", 0.25)}


def onnx_of(model, input):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(torch.onnx.export(model, (input,), dynamo=True).model_proto)
    return lambda input: torch.from_numpy(session.run(None, {session.input_names[0]: input.numpy()})[0])


DEPLOYED = {
    "export": lambda model, input: torch.export.export(model, (input,), strict=True).module(),
    "export, not strict": lambda model, input: torch.export.export(model, (input,), strict=False).module(),
    "jit.trace": torch.jit.trace,
    "onnx": onnx_of,
    "fuse_conv_bn_eval": lambda model, input: nn.Sequential(fuse_conv_bn_eval(model[0], model[1]), *model[2:]),
}


@pytest.mark.filterwarnings("ignore", "error::torch.jit.TracerWarning")
@pytest.mark.parametrize(("how", "options"), [
    *((how, OPTIONS) for how in DEPLOYED if how != "fuse_conv_bn_eval"), ("fuse_conv_bn_eval", {}),
], ids=str)  # fmt: skip
def test_exported_models_use_only_torch_operations(how, options):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), SyncBatchNorm2d(4, **options), nn.Sigmoid())
    nn.init.normal_(model[1].weight)
    model(torch.randn(4, 3, 8, 8) * 2 + 1)
    model.eval()
    deployed = DEPLOYED[how](model, torch.randn(2, 3, 8, 8))
    input = torch.randn(2, 3, 8, 8) * 2
    torch.testing.assert_close(deployed(input), model(input), rtol=1e-4, atol=1e-5)
    graph = deployed.inlined_graph if how == "jit.trace" else getattr(deployed, "graph", "")
    assert not re.search(r"ops\.bagua_syncbn|bagua_syncbn::", str(graph))


def traced_in_training(how, size):
    """Returns a layer in training, traced with ``size`` samples but a dynamic batch dimension."""
    layer, input = SyncBatchNorm2d(8), torch.randn(size, 8, 8, 8)
    if how == "export":
        batch = torch.export.Dim("batch")
        return torch.export.export(nn.Sequential(layer), (input,), dynamic_shapes=({0: batch},)).module()
    if how == "compile":
        return torch.compile(layer, backend="eager", dynamic=True, fullgraph=True)
    if how == "fx":
        return make_fx(lambda x: sync_batch_norm(x, None, None), tracing_mode="symbolic")(input)
    return torch.jit.trace(layer, input)


# With 4 samples, F.batch_norm runs; with 300, our kernels are faster.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize("how", ["export", "compile", "fx", "jit"])
def test_traces_of_training_work_for_all_sizes(how, size):
    traced = traced_in_training(how, size)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for samples in (size, 4, 300):
            input = torch.randn(samples, 8, 8, 8)
            torch.testing.assert_close(traced(input), nn.functional.batch_norm(input, None, None, training=True))


class Replayed(torch.autograd.Function):
    """A graph of a step as a function of the input and the parameters, for a known ``grad_output``."""

    @staticmethod
    def forward(ctx, graph, buffers, grad_output, *tensors):
        output, *ctx.grads = graph(buffers, grad_output, *tensors)
        return output

    @staticmethod
    def backward(ctx, _):
        return None, None, None, *ctx.grads


def made_by_fx(model, input, **options):
    """Returns ``model``, traced with ``input``, as a function of the input and the gradient of the output."""
    names, parameters = zip(*model.named_parameters(), strict=True)

    def run(buffers, grad_output, input, *parameters):
        tensors = dict(zip(names, parameters, strict=True)) | buffers
        output = torch.func.functional_call(model, tensors, input)
        return output, *torch.autograd.grad(output, (input, *parameters), grad_output)

    copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
    graph = make_fx(run, **options)(copies, torch.ones_like(input), input.requires_grad_(), *parameters)
    return lambda input, grad_output: Replayed.apply(
        graph, dict(model.named_buffers()), grad_output, input, *parameters
    )


def made_by_aot(model, _):
    from functorch.compile import aot_module, nop  # takes seconds

    traced = aot_module(model, nop)
    return lambda input, grad_output: traced(input)


TRACED_FOR_LATER = {
    "aot_module": made_by_aot,
    "fake": partial(made_by_fx, tracing_mode="fake"),
    "symbolic": partial(made_by_fx, tracing_mode="symbolic"),
    "before autograd": partial(made_by_fx, tracing_mode="fake", pre_dispatch=True),
    "real": made_by_fx,
}


def model_of_two_layers():
    torch.manual_seed(0)  # equal models on all ranks
    layers = [nn.BatchNorm2d(3, momentum=momentum, dtype=torch.float64) for momentum in (0.1, None)]
    for layer in layers:
        for values in (layer.weight, layer.running_mean):
            nn.init.normal_(values)
    return nn.Sequential(layers[0], nn.SiLU(), layers[1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("how", "training"), [
    *((how, True) for how in TRACED_FOR_LATER),
    *((how, False) for how in TRACED_FOR_LATER if how != "before autograd"),  # torch raises for any layer
])  # fmt: skip
def test_traced_graphs_synchronize_even_if_the_trace_sent_nothing(how, training):
    plain, group, splits = model_of_two_layers().train(training), dist.new_group(), (2, 3)
    model = convert_sync_batchnorm(copy.deepcopy(plain), group)
    batches = [(draw(5, 3, 4, 4, seed=seed), draw(5, 3, 4, 4, seed=seed + 9)) for seed in range(3)]
    rank = dist.get_rank()
    if training and how == "real":
        with pytest.raises(RuntimeError, match=r'make_fx\(tracing_mode="real"\) cannot record .* over several ranks'):
            TRACED_FOR_LATER[how](model, draw(splits[rank], 3, 4, 4))
    else:
        traced = TRACED_FOR_LATER[how](model, draw(splits[rank], 3, 4, 4))
        for input, grad_output in batches:
            call = partial(traced, grad_output=grad_output.split(splits)[rank])
            check_ranks(model, plain, input, grad_output, splits, call=call)
    check_ranks(model, plain, *batches[0], splits)
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_graphs_of_second_derivatives_and_means_synchronize_when_they_run():
    def run(input):
        (grad,) = torch.autograd.grad(sync_batch_norm(input, None, None).pow(3).sum(), input, create_graph=True)
        return *torch.autograd.grad(grad.pow(3).sum(), input), mean_over_ranks(input)

    def draw_own(seed):
        return draw(2, 4, 3, seed=2 * seed + dist.get_rank()).requires_grad_()

    graph = make_fx(run, tracing_mode="fake")(draw_own(0))
    torch.testing.assert_close(graph(draw_own(1).detach()), run(draw_own(1)))


class Activated(nn.BatchNorm2d):
    def forward(self, input, *, shift):
        return super().forward(input).relu() + shift


class Net(nn.Sequential):
    def forward(self, input):
        convolution, norm, activated = self
        return activated(norm(convolution(input)), shift=input.mean())


@pytest.mark.parametrize("training", [True, False])
def test_symbolic_traces_keep_layers_as_leaves(training):
    model = convert_sync_batchnorm(Net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Activated(4)))
    model.train(training)
    twin = copy.deepcopy(model)
    traced = torch.fx.symbolic_trace(model)
    input = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(traced(input), twin(input))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1", "2"]
    torch.testing.assert_close(traced.state_dict(), twin.state_dict())


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(4), Activated(4)])
def test_tracing_a_layer_itself_raises(layer):
    convert_sync_batchnorm(layer)
    message = rf"torch\.fx: cannot trace {type(layer).__name__} itself; trace a model .* nn\.Sequential\(layer\)"
    with pytest.raises(TypeError, match=message):
        torch.fx.symbolic_trace(layer)
    assert repr(layer).startswith(type(layer).__name__)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantization_aware_training_converts_last():
    model = fuse_modules_qat(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), ["0", "1", "2"])
    model.qconfig = get_default_qat_qconfig()
    model = prepare_qat(convert_sync_batchnorm(model))
    assert type(model[0].bn) is nn.BatchNorm2d  # a new layer
    convert_sync_batchnorm(model)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert type(model[0].bn) is SyncBatchNorm2d
    assert model[0].bn.num_batches_tracked == 1
